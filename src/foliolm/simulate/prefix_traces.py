"""Traces that name each request's prefix blocks: equal names stand for equal prefixes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foliolm.core.errors import ConfigError

BLOCK_TOKENS = {"mooncake": 512, "vllm-run": 16}
"""Tokens that one hash id stands for, by format."""
RUN_FILE = "prefix_blocks16.jsonl"
"""In the folder of a measured vLLM run, the file that names its prefix blocks."""


@dataclass(frozen=True, slots=True)
class PrefixChain:
    """One request's prompt.

    Attributes:
        num_tokens: of the prompt.
        hash_ids: a name for each block of it and all before it, in order. Tokens beyond them have no name: a
            ``vllm-run`` leaves the last block out unless it is full.
    """

    num_tokens: int
    hash_ids: tuple[int, ...]


def read_prefix_chains(trace: Path, format: str) -> Iterator[PrefixChain]:
    """The prompts of a trace, in its order, which is the order of arrival.

    Args:
        trace: a file of JSON lines with ``input_length`` and ``hash_ids``; for ``vllm-run`` also the run's folder.
        format: one of ``BLOCK_TOKENS``.

    Raises:
        ConfigError: an unknown format, a file that cannot be read, or a line that is not of the format.
    """
    if format not in BLOCK_TOKENS:
        raise ConfigError(
            f"format is {format!r}; formats that name prefix blocks are {', '.join(sorted(BLOCK_TOKENS))}"
        )
    path = trace / RUN_FILE if format == "vllm-run" and trace.is_dir() else trace
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _chain(line, BLOCK_TOKENS[format], f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _chain(line: str, block_tokens: int, where: str) -> PrefixChain:
    try:
        entry: Any = json.loads(line)
    except ValueError:
        raise ConfigError(f"{where}: not JSON") from None
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: not a JSON object")
    length, ids = entry.get("input_length"), entry.get("hash_ids")
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ConfigError(f"{where}: input_length is {length!r:.80}; it must be an integer of at least 1")
    if not isinstance(ids, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
        raise ConfigError(f"{where}: hash_ids must be a list of integers")
    if len(ids) > -(-length // block_tokens):
        raise ConfigError(
            f"{where}: {len(ids)} hash_ids for input_length {length}; "
            f"ceil({length}/{block_tokens}) = {-(-length // block_tokens)} is the most"
        )
    return PrefixChain(length, tuple(ids))

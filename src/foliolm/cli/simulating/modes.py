"""Ways of batching by name, and what other engines do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foliolm.core.errors import ConfigError

MODES: dict[str, dict[str, Any]] = {
    "static": {"batching": "static"},
    "prefill-first": {"prefill_policy": "first"},
    "mixed": {"enable_chunked_prefill": False},
    "chunked": {},
}
"""By name, the flags that choose it."""

_VLLM = {
    "block_size": 16,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 256,
    "short_prompt_share": 0.0,
    "watermark": 0.0,
    "pipeline_depth": 1,
}
_SGLANG = {
    "prefill_policy": "first",
    "block_size": 1,
    "watermark": 0.0,
    "pipeline_depth": 1,
}
_TGI = {"prefill_policy": "first", "block_size": 1, "watermark": 0.0, "max_num_seqs": 128}
LIKE: dict[str, tuple[dict[str, Any], str]] = {
    "vllm": (
        _VLLM,
        "like vLLM (V1): decodes first, chunked prefill in order of arrival with no share for short prompts, 8,192 "
        "tokens and 256 sequences a step, no watermark, the next step planned while one runs",
    ),
    "sglang": (
        _SGLANG,
        "like SGLang: a waiting prompt goes before all decodes and has steps of its own, page size 1, radix cache, "
        "overlap scheduling. Prompts are computed whole here; SGLang cuts those over its chunked-prefill size",
    ),
    "tgi": (
        _TGI,
        "like TGI: waiting prompts are computed whole and apart, then join the running batch (no waiting-served ratio "
        "is kept: a prompt joins as soon as there is room), 128 requests a batch",
    ),
}


def like_engine(name: str | None, settings: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The flags with another engine's where none was given, and what that means.

    Raises:
        ConfigError: an unknown engine.
    """
    if name is None:
        return dict(settings), ()
    if name not in LIKE:
        raise ConfigError(f"--like is {name!r}; it must be one of {', '.join(LIKE)}")
    theirs, about = LIKE[name]
    return {**theirs, **settings}, (about,)


def modes_of(names: str, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The engine flags of each way of batching that is named, with commas between.

    Raises:
        ConfigError: an unknown name, one that is there twice, or flags that choose a way themselves.
    """
    for flag in ("batching", "prefill_policy", "enable_chunked_prefill"):
        if flag in settings:
            raise ConfigError(f"--compare chooses the ways of batching; leave out --{flag.replace('_', '-')}")
    chosen: dict[str, dict[str, Any]] = {}
    for name in (word.strip() for word in names.split(",")):
        if name not in MODES:
            raise ConfigError(f"--compare has {name!r}; it must be some of {', '.join(MODES)}")
        if name in chosen:
            raise ConfigError(f"--compare names {name} twice")
        chosen[name] = {**settings, **MODES[name]}
    return chosen

"""A measured run's folder: the engine's settings, its requests, and when each was answered."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foliolm.core.errors import ConfigError
from foliolm.simulate.workload.item import Item
from foliolm.simulate.workload.rows import json_rows
from foliolm.simulate.workload.traces import Trace

VLLM_SEQS, VLLM_TOKENS, VLLM_BLOCK = 256, 2048, 16
"""What vLLM takes where a run's settings say nothing."""
ASYNC_SINCE = (0, 14)
"""Since this version vLLM plans a step while the one before it runs."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one request: from its arrival to its first and to its last token, and its output tokens."""

    ttft: float
    latency: float
    output: int

    @property
    def tpot(self) -> float:
        """Seconds a token after the first."""
        return (self.latency - self.ttft) / max(1, self.output - 1)


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One run.

    Attributes:
        path: its folder; the folder around it names the GPU.
        model: as its settings name it.
        engine: its settings (vLLM's keyword arguments).
        kv_blocks: usable blocks, and block_size: tokens in each; None: not recorded.
        depth: steps in flight while the next is planned.
        items: requests in order of arrival, the first at 0.
        times: measured, by label.
    """

    path: Path
    model: str
    engine: dict[str, Any]
    kv_blocks: int | None
    block_size: int
    depth: int
    items: tuple[Item, ...]
    times: dict[str, Times]

    @property
    def name(self) -> str:
        """GPU and model, as the folders are named."""
        return f"{self.gpu}/{self.path.resolve().name}"

    @property
    def gpu(self) -> str:
        """The GPU's folder."""
        return self.path.resolve().parent.name

    def whole(self, name: str, default: int) -> int:
        """A whole number of the engine's settings."""
        value = self.engine.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.path / 'meta.json'}: {name} is {value!r}; it must be a whole number from 1 on")
        return value


def read_measured_run(path: Path) -> MeasuredRun:
    """Read a run.

    ``arrival_time`` is a wall clock and the other stamps are monotonic; the least of ``queued_ts − arrival_time`` is
    taken for the difference of the clocks. Time counts from the arrival: ``queued_ts`` is stamped between steps, and
    ``scheduled_ts`` a step before execution.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    meta = _meta(path / "meta.json")
    rows = list(json_rows(path / "requests.jsonl"))
    if not rows:
        raise ConfigError(f"{path / 'requests.jsonl'} holds no request")
    offset = min(row.real("queued_ts") - row.real("arrival_time") for row in rows)
    times = {}
    for row in rows:
        arrival = row.real("arrival_time") + offset
        first, last = row.real("first_token_ts") - arrival, row.real("last_token_ts") - arrival
        if not 0 < first <= last:
            raise ConfigError(f"{row.where}: its tokens come before its arrival, or the last before the first")
        times[row.text("request_id")] = Times(first, last, row.whole("output_toks", 1))
    engine = meta.get("engine_kwargs") or {}
    cache = meta.get("kv_cache") or {}
    size = cache.get("block_size") or engine.get("block_size") or VLLM_BLOCK
    blocks = cache.get("num_gpu_blocks")
    for field, value in (("kv_cache.block_size", size), ("kv_cache.num_gpu_blocks", blocks or 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{path / 'meta.json'}: {field} is {value!r}; it must be a whole number from 1 on")
    items = tuple(Trace(path, "vllm-run").items())
    return MeasuredRun(path, str(meta["model"]), engine, blocks, size, _depth(meta, engine), items, times)


def _meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"measured run {path}: {error}") from None
    if not isinstance(meta, dict) or "model" not in meta:
        raise ConfigError(f"measured run {path}: field 'model' is missing")
    return meta


def _depth(meta: dict[str, Any], engine: dict[str, Any]) -> int:
    said = engine.get("async_scheduling")
    if isinstance(said, bool):
        return int(said)
    try:
        version = tuple(int(word) for word in str(meta.get("vllm_version", "")).split(".")[:2])
    except ValueError:
        version = ASYNC_SINCE
    return int(version >= ASYNC_SINCE) if version else 1

"""Steps out of vLLM's log: the lines that it prints with ``--enable-logging-iteration-details``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from foliolm.core.errors import ConfigError
from foliolm.ledger.accounts import ModelAccount
from foliolm.ledger.samples import Sample
from foliolm.ledger.step_cost import StepCounts

_ITERATION = re.compile(
    r"Iteration\((?P<index>\d+)\): (?P<ctx_requests>\d+) context requests?, (?P<ctx_tokens>\d+) context tokens?, "
    r"(?P<gen_requests>\d+) generation requests?, (?P<gen_tokens>\d+) generation tokens?, "
    r"iteration elapsed time: (?P<ms>[\d.]+) ms"
)
_USAGE = re.compile(r"KV cache usage: (?P<percent>[\d.]+) ?%")
_POOL = re.compile(r"KV cache size: (?P<tokens>[\d,]+) tokens")


@dataclass(frozen=True, slots=True)
class VllmLog:
    """What a log says.

    Attributes:
        samples: its iterations as steps.
        pool_tokens: tokens of the KV pool, as the log or the caller says.
        num_without_usage: iterations before the first line that says how full the pool was; they are left out.
    """

    samples: list[Sample]
    pool_tokens: int
    num_without_usage: int


def read_vllm_log(lines: Iterable[str], model: ModelAccount, pool_tokens: int | None = None) -> VllmLog:
    """Read a log.

    The log does not say whose context is how long, only how full the pool is: the tokens in it are taken as the
    decodes' summed context, the step's own context tokens taken out, and a chunk as having nothing cached. A usage on
    the iteration's own line counts; else the newest one before it.

    Args:
        lines: the log.
        model: whose KV the pool holds.
        pool_tokens: tokens of the pool; None: from the log's ``GPU KV cache size`` line.

    Raises:
        ConfigError: there are no such lines, or the pool's size is not known.
    """
    samples: list[Sample] = []
    usage: float | None = None
    without = 0
    for line in lines:
        size = _POOL.search(line)
        if size and pool_tokens is None:
            pool_tokens = int(size["tokens"].replace(",", ""))
        said = _USAGE.search(line)
        if said:
            usage = float(said["percent"]) / 100
        found = _ITERATION.search(line)
        if found is None or float(found["ms"]) <= 0:
            continue
        if pool_tokens is None:
            raise ConfigError(
                "the log does not say how large the KV pool is before its first iteration; give --kv-cache-tokens"
            )
        if usage is None:
            without += 1
            continue
        samples.append(_sample(found, usage * pool_tokens, model))
    if not samples:
        raise ConfigError(
            "the log has no iteration lines with a KV cache usage; start vLLM with --enable-logging-iteration-details"
        )
    assert pool_tokens is not None
    return VllmLog(samples, pool_tokens, without)


def _sample(found: re.Match[str], pool: float, model: ModelAccount) -> Sample:
    chunks, new, decodes, generated = (
        int(found[name]) for name in ("ctx_requests", "ctx_tokens", "gen_requests", "gen_tokens")
    )
    context = max(0.0, pool - new - generated) if decodes else 0.0
    each = context / decodes if decodes else 0.0
    per_group = tuple(decodes * min(each, spec.window or each) for spec in model.kv)
    # How the tokens fall on the chunks is not said either: evenly.
    prefills = tuple((new // chunks + (i < new % chunks), 0) for i in range(chunks)) if chunks else ()
    counts = StepCounts(new + generated, chunks + generated, chunks + decodes, per_group, prefills)
    return Sample(counts, float(found["ms"]) / 1e3)

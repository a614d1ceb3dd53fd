"""Calibration from the lines that vLLM prints."""

from __future__ import annotations

import random

import pytest

from foliolm.core.errors import ConfigError
from foliolm.ledger.calibration import calibrate
from foliolm.ledger.step_cost import StepCounts
from foliolm.ledger.vllm_log import read_vllm_log
from support.books import real_cost
from support.steps import with_coefficients

TRUTH = {
    "step_s": 6e-3,
    "layer_s": 0.0,
    "sequence_s": 2e-4,
    "weights": 0.55,
    "matmul": 0.35,
    "kv_decode": 0.6,
    "kv_mixed": 0.3,
}
POOL = 400_000


def made_log(cost, count=600, inline=True):
    """A log as vLLM writes it, of a device whose step cost is known."""
    rng = random.Random(5)
    lines = ["INFO 01-01 00:00:00 [kv_cache_utils.py:1] GPU KV cache size: 400,000 tokens"]
    for index in range(count):
        chunks = 0 if index % 3 == 0 else rng.randrange(1, 3)
        decodes = 0 if index % 3 == 1 else rng.randrange(1, 65)
        new = chunks * rng.choice((16, 128, 700, 2000))
        percent = round(rng.uniform(2, 60), 1) if decodes else 1.0
        context = max(0.0, percent / 100 * POOL - new - decodes) if decodes else 0.0
        prefills = ((new // chunks, 0),) * chunks if chunks else ()
        ms = 1e3 * cost.seconds(StepCounts(new + decodes, chunks + decodes, chunks + decodes, (context,), prefills))
        iteration = (
            f"INFO 01-01 00:00:01 [core.py:1] Iteration({index}): {chunks} context requests, {new} context tokens, "
            f"{decodes} generation requests, {decodes} generation tokens, iteration elapsed time: {ms:.2f} ms"
        )
        usage = f"GPU KV cache usage: {percent}%"
        if inline:
            lines.append(f"{iteration}, {usage}")
        else:
            lines += [f"INFO [loggers.py:1] Engine 000: Running: {decodes} reqs, {usage}, Prefix: 0.0%", iteration]
    return lines


@pytest.mark.parametrize("inline", [True, False])
def test_known_coefficients_come_back_within_five_percent(inline):
    prior = real_cost()
    truth = with_coefficients(prior, **TRUTH)
    log = read_vllm_log(made_log(truth, inline=inline), prior.model)
    assert len(log.samples) == 600
    assert log.pool_tokens == POOL
    found = calibrate(prior, log.samples, table=False)
    for name, value in TRUTH.items():
        assert getattr(found.cost.coefficients, name) == pytest.approx(value, rel=0.05), name


def test_what_is_missing_is_said():
    prior = real_cost()
    lines = made_log(prior, 20)
    with pytest.raises(ConfigError, match="--kv-cache-tokens"):
        read_vllm_log(lines[1:], prior.model)
    assert len(read_vllm_log(lines[1:], prior.model, POOL).samples) == 20
    with pytest.raises(ConfigError, match="--enable-logging-iteration-details"):
        read_vllm_log(["INFO nothing here"], prior.model)

"""200 requests in a pool so small that many must give way: the tokens are those of an engine with room for all."""

from __future__ import annotations

import random

import pytest

from support.same_tokens import assert_same_tokens
from support.script import MadePrices
from support.tiny_models import VOCAB, ours, reference
from support.torch_engine import generate, request

COUNT = 200
POOL = {"chunk": 48, "block_size": 4, "num_blocks": 80, "max_num_seqs": 24, "max_model_len": 80}


@pytest.fixture(scope="module")
def model():
    return ours(reference("llama", num_hidden_layers=2, hidden_size=32, num_attention_heads=4), "llama")


@pytest.fixture(scope="module")
def requests():
    rng = random.Random("pressure")
    trunks = [[rng.randrange(VOCAB) for _ in range(24)] for _ in range(4)]
    found = []
    for rid in range(1, COUNT + 1):
        own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        trunk = trunks[rid % 4][: rng.randrange(25)] if rng.random() < 0.6 else []
        found.append(request(rid, trunk + own, max_tokens=rng.randrange(4, 28), logprobs=2))
    return found


@pytest.fixture(scope="module")
def unpressed(model, requests):
    """Tokens, and by token how far the two best logits are apart, with room for everybody and nothing shared."""
    run = generate(model, requests, chunk=512, block_size=16, num_blocks=COUNT * 5, max_num_seqs=64)
    assert run.preemptions == 0
    return {
        rid: (one.tokens, [entry.top[0][1] - entry.top[1][1] for entry in one.logprobs])
        for rid, one in run.by_id.items()
    }


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
def test_the_same_tokens_with_and_without(model, requests, unpressed, mode, sharing):
    # By these prices short requests are computed again and long ones moved, so that one run does both often.
    run = generate(
        model,
        requests,
        **POOL,
        depth=1 if sharing else 0,
        num_host_blocks=120,
        preemption_mode=mode,
        preemption_victim="last",
        enable_prefix_caching=sharing,
        prices=LongOnesSwap(0.0),
    )
    swaps, recomputes = run.stats.num_swaps, run.preemptions - run.stats.num_swaps
    if mode != "recompute":
        assert swaps >= 25
    if mode != "swap":
        assert recomputes >= 25
    if sharing:
        assert run.stats.prefix_hits > 500
    check(run, unpressed)


@pytest.mark.parametrize("depth", [0, 2])
def test_the_same_tokens_with_prefixes_on_the_host(model, requests, unpressed, depth):
    run = generate(
        model,
        requests,
        **POOL,
        depth=depth,
        num_host_blocks=60,
        preemption_mode="swap",
        preemption_victim="last",
        enable_prefix_caching=True,
        kv_offloading="always",
    )
    assert run.stats.num_swaps >= 25
    assert run.stats.loaded_blocks > 25
    assert run.stats.host_hits > 50
    check(run, unpressed)


def check(run, unpressed):
    for rid, (tokens, gaps) in unpressed.items():
        assert_same_tokens(run.by_id[rid].tokens, tokens, gaps)
        assert run.by_id[rid].error is None


class LongOnesSwap(MadePrices):
    """Moving costs as much as computing 12 tokens, whatever moves."""

    def swap(self, blocks: int) -> float:
        return 12.0

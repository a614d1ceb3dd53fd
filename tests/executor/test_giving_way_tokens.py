"""KV that moved to the host and back: bit for bit the same, and the same tokens, whatever the pool is too small for."""

from __future__ import annotations

import random

import pytest
import torch

from foliolm.core.plan import BlockSwap
from foliolm.executor.torch.kv_tensors import KVTensors
from support.same_tokens import assert_same_tokens
from support.tiny_models import VOCAB, ours, reference, reference_greedy
from support.torch_engine import generate, request


@pytest.fixture(scope="module")
def models():
    theirs = reference("llama")
    return theirs, ours(theirs, "llama")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_is_bit_exact(models, dtype):
    shape = models[1].shape
    kv = KVTensors(shape, dtype, torch.device("cpu"), num_blocks=12, block_size=4, num_host_blocks=6)
    groups = kv._groups
    for group in groups:
        # Every bit pattern, NaNs among them.
        group.view(torch.int16).random_(-(1 << 15), (1 << 15) - 1)
    before = [group.clone() for group in groups]
    out = [BlockSwap(group, block, slot) for group in range(len(groups)) for block, slot in ((3, 5), (7, 0), (9, 2))]
    kv.swap_out(out)
    for group in groups:
        group[:, :, [3, 7, 9]] = 0
    back = [BlockSwap(swap.group, {3: 9, 7: 4, 9: 3}[swap.device_block], swap.host_block) for swap in out]
    kv.swap_in(back)
    for group, old in zip(groups, before, strict=True):
        for source, target in ((3, 9), (7, 4), (9, 3)):
            assert torch.equal(group[:, :, target].view(torch.int16), old[:, :, source].view(torch.int16))


def test_logprobs_after_a_swap_are_those_without_one(models):
    """Logprobs of a run that swapped are those of one that never had to."""
    _, model = models
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(30)] for _ in range(3)]
    requests = [request(rid, prompt, max_tokens=40, logprobs=0) for rid, prompt in enumerate(prompts, 1)]
    free = generate(model, requests, block_size=8, num_blocks=200)
    tight = generate(model, requests, block_size=8, num_blocks=20, num_host_blocks=40, preemption_mode="swap")
    assert tight.stats.num_swaps > 0
    assert tight.stats.recomputed_tokens == 0
    for rid in free.by_id:
        assert tight.by_id[rid].tokens == free.by_id[rid].tokens
        for ours_, theirs in zip(tight.by_id[rid].logprobs, free.by_id[rid].logprobs, strict=True):
            assert ours_.logprob == pytest.approx(theirs.logprob, abs=1e-5)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_the_same_tokens_as_the_reference_under_pressure(models, mode, depth):
    theirs, model = models
    rng = random.Random(f"{mode} {depth}")
    trunk = [rng.randrange(VOCAB) for _ in range(20)]
    prompts = {
        rid: [*(trunk if rid % 2 else []), *(rng.randrange(VOCAB) for _ in range(rng.randrange(3, 25)))]
        for rid in range(1, 13)
    }
    requests = [request(rid, prompt, max_tokens=12 + rid % 5) for rid, prompt in prompts.items()]
    run = generate(
        model,
        requests,
        chunk=16,
        block_size=4,
        num_blocks=40,
        depth=depth,
        max_model_len=100,
        num_host_blocks=60,
        preemption_mode=mode,
        enable_prefix_caching=depth != 1,
    )
    assert (run.stats.num_swaps if mode == "swap" else run.stats.recomputed_tokens) > 0
    for rid, prompt in prompts.items():
        tokens, gaps = reference_greedy(theirs, prompt, 12 + rid % 5)
        assert_same_tokens(run.by_id[rid].tokens, tokens, gaps)


def test_seeded_draws_penalties_and_logprobs_go_on_after_a_swap(models):
    _, model = models
    rng = random.Random(9)
    prompts = [[rng.randrange(VOCAB) for _ in range(12)] for _ in range(6)]
    extra = {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.3, "max_tokens": 24}
    requests = [request(rid, prompt, **extra) for rid, prompt in enumerate(prompts, 1)]
    free = generate(model, requests, block_size=4, num_blocks=200)
    tight = generate(model, requests, block_size=4, num_blocks=26, num_host_blocks=60, preemption_mode="swap")
    assert tight.stats.num_swaps > 0
    for rid in free.by_id:
        assert tight.by_id[rid].tokens == free.by_id[rid].tokens

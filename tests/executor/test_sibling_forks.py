"""Siblings of one prompt: it is computed once and held once, and each says what it would say alone."""

from dataclasses import replace

import pytest

from foliolm.core.request import EngineRequest
from foliolm.core.sampling import SamplingParams
from support.tiny_models import VOCAB, ours, reference
from support.torch_engine import generate


@pytest.fixture(scope="module")
def model():
    return ours(reference("llama"), "llama")


def siblings(n, length, count=12, first_id=1, **sampling):
    """n sampled completions of a prompt, each with a seed of its own."""
    prompt = tuple((17 * i * i + 31 * length + 3) % VOCAB for i in range(length))
    params = SamplingParams(n=n, temperature=0.9, seed=7, max_tokens=count, ignore_eos=True, **sampling)
    return [
        EngineRequest(first_id + child, prompt, params.child(child), arrival_ns=first_id, sibling=child)
        for child in range(n)
    ]


def apart(requests):
    """The same requests, each on its own."""
    return [replace(one, sibling=0, share_prefix=False) for one in requests]


def said(run, requests):
    return [(run.by_id[one.request_id].tokens, run.by_id[one.request_id].finish) for one in requests]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(("block_size", "length"), [(1, 9), (16, 31), (16, 32), (16, 33), (4, 70)])
def test_siblings_say_what_each_says_alone(model, depth, block_size, length):
    requests = siblings(5, length)
    alone = generate(model, apart(requests), block_size=block_size, chunk=20)
    forked = generate(model, requests, block_size=block_size, chunk=20, depth=depth)
    assert said(forked, requests) == said(alone, requests)
    assert sum(row.num_new_tokens for plan in forked.plans for row in plan.rows) == length
    assert len({tuple(tokens) for tokens, _ in said(forked, requests)}) > 1


def test_logprobs_penalties_and_short_answers_are_each_ones_own(model):
    for changes in ({"logprobs": 2}, {"repetition_penalty": 1.3, "frequency_penalty": 0.5}, {"count": 1}):
        requests = siblings(4, 21, **changes)
        alone, forked = generate(model, apart(requests)), generate(model, requests)
        assert said(forked, requests) == said(alone, requests)
        for one in requests:
            ours_, theirs = forked.by_id[one.request_id].logprobs, alone.by_id[one.request_id].logprobs
            assert [entry.token_id for entry in ours_] == [entry.token_id for entry in theirs]
            assert [entry.logprob for entry in ours_] == pytest.approx([entry.logprob for entry in theirs], abs=1e-4)


def test_eight_siblings_hold_a_prompt_of_a_thousand_tokens_once(model):
    requests = siblings(8, 1000, count=8)
    # 62 full blocks once; the 63rd, half full, once for each that writes in it.
    run = generate(model, requests, num_blocks=1 + 62 + 8, chunk=256, max_model_len=1008)
    assert run.preemptions == 0
    assert sum(row.num_new_tokens for plan in run.plans for row in plan.rows) == 1000
    assert all(len(run.by_id[one.request_id].tokens) == 8 for one in requests)
    # All copies in one step, and none by the last of the holders, who keeps what was shared.
    assert [len(plan.copies) for plan in run.plans if plan.copies] == [7]


def test_a_full_last_block_is_never_copied(model):
    run = generate(model, siblings(4, 48), chunk=16)
    assert not any(plan.copies for plan in run.plans)


def test_where_there_is_no_room_for_all_none_forks_and_all_are_served(model):
    requests = siblings(6, 40)
    alone = generate(model, apart(requests), num_blocks=100)
    few_seats = generate(model, requests, max_num_seqs=3, chunk=64)
    assert not any(plan.forks for plan in few_seats.plans)
    assert said(few_seats, requests) == said(alone, requests)
    tight = generate(model, requests, num_blocks=1 + 3 * 3, chunk=64, max_model_len=64)
    assert said(tight, requests) == said(alone, requests)

"""Beam search in the engine finds what transformers' finds, and shares blocks."""

from dataclasses import replace

import pytest

from foliolm.core.request import FinishReason
from foliolm.core.sampling import BeamSearch
from support.beams import assert_same_beams, reference_beams, search
from support.tiny_models import VOCAB, ours, reference
from support.torch_engine import generate, request

PROMPTS = [[(17 * i * i + 31 * n + 3) % VOCAB for i in range(n)] for n in (5, 16, 33)]
ENDS = tuple(range(40, 52))  # many, so that hypotheses finish at all lengths


@pytest.fixture(scope="module")
def small():
    theirs = reference("llama")
    return ours(theirs, "llama"), theirs


def found(run, requests):
    beam = requests[0].sampling.beam
    each = [run.by_id[one.request_id] for one in requests]
    return [
        (one.tokens, sum(entry.logprob for entry in one.logprobs) / len(one.tokens) ** beam.length_penalty)
        for one in each
    ]


@pytest.mark.parametrize(
    ("width", "penalty", "early", "eos"),
    [
        (2, 1.0, True, ()),
        (2, 1.0, False, ENDS[:2]),
        (4, 1.0, False, ()),
        (4, 1.0, False, ENDS),
        (4, 0.0, True, ENDS),
        (4, 2.0, "never", ENDS),
        (3, -1.0, "never", ENDS),
        (8, 0.6, True, ENDS[:3]),
    ],
)
def test_it_finds_what_transformers_finds(small, width, penalty, early, eos):
    model, theirs = small
    beam = BeamSearch(width, penalty, early)
    requests = [search(1 + 10 * i, prompt, beam, 12, eos) for i, prompt in enumerate(PROMPTS)]
    run = generate(model, [one for each in requests for one in each], max_num_seqs=32)
    for prompt, each in zip(PROMPTS, requests, strict=True):
        assert_same_beams(found(run, each), reference_beams(theirs, prompt, beam, 12, eos))
        for one in each:
            got = run.by_id[one.request_id]
            assert got.finish is (FinishReason.STOP if got.tokens[-1] in eos else FinishReason.LENGTH)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_blocks_depth_and_company_change_nothing(small, depth, block_size):
    model, theirs = small
    beam = BeamSearch(4)
    requests = search(1, PROMPTS[2], beam, 12, ENDS)
    company = [request(50 + i, prompt, max_tokens=20) for i, prompt in enumerate(PROMPTS)]
    alone = generate(model, company, depth=depth, block_size=block_size, chunk=16)
    run = generate(model, [company[0], *requests, *company[1:]], depth=depth, block_size=block_size, chunk=16)
    assert_same_beams(found(run, requests), reference_beams(theirs, PROMPTS[2], beam, 12, ENDS))
    for one in company:
        assert run.by_id[one.request_id].tokens == alone.by_id[one.request_id].tokens


def test_hypotheses_share_the_prompt_and_copy_only_what_they_write(small):
    model, _ = small
    beam, prompt = BeamSearch(4), [(7 * i) % VOCAB for i in range(100)]
    requests = search(1, prompt, beam, 20)
    # The prompt's 6 full blocks once, and for each of 4 hypotheses the 2 blocks behind them: 14 of 16 tokens.
    run = generate(model, requests, num_blocks=1 + 6 + 4 * 2, max_model_len=128)
    assert all(len(run.by_id[one.request_id].tokens) == 20 for one in requests)
    assert sum(row.num_new_tokens for plan in run.plans for row in plan.rows) == len(prompt)
    copies = [copy for plan in run.plans for copy in plan.copies]
    assert copies
    assert len(copies) <= 4 * 20


def test_a_search_under_pressure_keeps_its_room_and_others_give_way(small):
    model, theirs = small
    beam = BeamSearch(4)
    requests = search(1, PROMPTS[2], beam, 44)
    company = [replace(request(50 + i, PROMPTS[2], max_tokens=60), share_prefix=False) for i in range(3)]
    run = generate(model, [*company, *requests], num_blocks=1 + 2 + 4 * 3 + 8, max_model_len=112)
    assert run.preemptions
    assert_same_beams(found(run, requests), reference_beams(theirs, PROMPTS[2], beam, 44))
    for one in company:
        assert len(run.by_id[one.request_id].tokens) == 60

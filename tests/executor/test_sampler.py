"""Tokens from logits: cuts, penalties, bans, logprobs, against plain definitions."""

import math

import numpy as np
import pytest
import torch

from foliolm.core.plan import Admission
from foliolm.core.sampling import SamplingParams
from foliolm.executor.torch.asked_draws import AskedDraws
from foliolm.executor.torch.draws import streams, uniforms, uniforms_at
from foliolm.executor.torch.requests import RequestTable
from foliolm.executor.torch.sampler import NOT_FINITE, NOTHING_LEFT, Sampler, token_logprobs
from foliolm.model.loader import load_model
from support.tiny_models import kernels, ours, reference, shape_of
from support.torch_engine import generate, request

V = 40


def table_with(*params: SamplingParams, prompt=(1, 2, 3), output=(), eos=(), vocab=V, seed=None) -> RequestTable:
    table = RequestTable(1, vocab, seed)
    for i, each in enumerate(params):
        table.admit(Admission(i, (*prompt, *output), len(prompt), each, eos))
    return table


def sample(table: RequestTable, logits: torch.Tensor, library=None):
    slots = table.slots(range(len(logits)))
    return Sampler(table, library).sample(logits.clone(), slots)


def draws(params: SamplingParams, row: torch.Tensor, count: int, library=None) -> np.ndarray:
    """``count`` tokens, each the first of a request with its own seed."""
    table = RequestTable(1, len(row), seed=5)
    for i in range(count):
        table.admit(Admission(i, (1,), 1, params, ()))
    return Sampler(table, library).sample(row.expand(count, -1).clone(), table.slots(range(count))).tokens


def distribution(params: SamplingParams, row: torch.Tensor) -> torch.Tensor:
    """What should be drawn from, one definition after another."""
    x = row.double() / params.temperature
    p = torch.softmax(x, -1)
    p = torch.where(p >= params.min_p * p.max(), p, 0)
    if params.top_k > 0:
        p = torch.where(p >= torch.sort(p, descending=True).values[params.top_k - 1], p, 0)
    p = p / p.sum()
    ordered = torch.sort(p, descending=True)
    kept = int((ordered.values.cumsum(0) < params.top_p - 1e-12).sum()) + 1
    p = torch.where(p >= ordered.values[min(kept, len(p)) - 1], p, 0)
    return p / p.sum()


@pytest.fixture(scope="module", params=["torch", "native"])
def library(request):
    return None if request.param == "torch" else kernels(request.param)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=3.0, top_k=7),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(temperature=2.0, min_p=0.1),
        SamplingParams(temperature=2.0, min_p=0.02, top_k=20, top_p=0.9),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=1e-6),
    ],
    ids=lambda params: f"T{params.temperature} k{params.top_k} p{params.top_p} m{params.min_p}",
)
def test_draws_follow_the_distribution(params, library):
    torch.manual_seed(3)
    row = torch.randn(V) * 2
    count = 8000
    expected = distribution(params, row)
    got = torch.from_numpy(np.bincount(draws(params, row, count, library), minlength=V)) / count
    assert got[expected == 0].sum() == 0, "a token that was cut has been drawn"
    spread = torch.sqrt(expected * (1 - expected) / count)
    assert (got - expected).abs().le(4.5 * spread + 1e-9).all()


def test_top_p_looks_as_far_as_it_must():
    flat = torch.randn(5000) * 0.01  # half of the mass needs thousands of candidates
    got = draws(SamplingParams(temperature=1.0, top_p=0.5), flat, 300)
    expected = distribution(SamplingParams(temperature=1.0, top_p=0.5), flat)
    assert 2000 < int((expected > 0).sum()) < 2600
    assert (expected[got] > 0).all()
    assert len(set(got.tolist())) > 250


def test_padding_rows_are_never_drawn():
    theirs = reference("llama", vocab_size=128)
    model = ours(theirs, "llama")
    limited = load_model(shape_of(theirs, "llama"), theirs.state_dict().items(), dtype=torch.float32, num_tokens=100)
    hot = [request(i, [i % 100], max_tokens=100, temperature=5.0, logprobs=3) for i in range(100)]
    run = generate(limited, hot, block_size=32, num_blocks=1000)
    drawn = [token for one in run.by_id.values() for token in one.tokens]
    assert len(drawn) == 10_000
    assert max(drawn) == 99
    tops = {token for one in run.by_id.values() for entry in one.logprobs for token, _ in entry.top}
    assert max(tops) < 100
    unlimited = generate(model, [request(i, [i % 100], max_tokens=20, temperature=5.0) for i in range(20)])
    assert max(token for one in unlimited.by_id.values() for token in one.tokens) >= 100, "padding would be drawn"


def test_penalties_are_their_formulas():
    params = SamplingParams(
        temperature=0.0, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.5, logprobs=V // 2
    )
    prompt, output = (5, 6, 6), (7, 7, 7, 5)
    table = table_with(params, prompt=prompt, output=output)
    torch.manual_seed(0)
    row = torch.randn(V)
    expected = row.clone()
    for token in {*prompt, *output}:
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token in set(output):
        expected[token] -= 0.7 + 0.4 * output.count(token)
    from foliolm.executor.torch.logits import edit_logits

    got = row.clone()
    edit_logits(got, params, (), list(output), table.history[0])
    torch.testing.assert_close(got, expected)
    result = sample(table, row[None])
    assert result.tokens.tolist() == [int(expected.argmax())]
    # Logprobs stay those of the raw logits.
    assert result.logprobs[0].logprob == pytest.approx(float(torch.log_softmax(row, -1)[result.tokens[0]]), abs=1e-5)


def test_penalties_follow_the_tokens_as_they_come():
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    table = table_with(params, prompt=(1,))
    row = torch.zeros(1, V)
    row[0, 3], row[0, 8] = 3.0, 2.0
    seen = []
    for _ in range(4):
        result = sample(table, row)
        table.append(table.slots([0]), result.tokens)
        seen += result.tokens.tolist()
    assert seen == [3, 8, 3, 0]


def test_a_request_that_comes_back_keeps_its_counts():
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0, presence_penalty=0.5)
    table = table_with(params, prompt=(4, 4), output=(9,))
    table.append(table.slots([0]), np.array([9]))
    before = dict(zip(table.history[0].ids.tolist(), table.history[0].counts.tolist(), strict=True))
    table.forget_table(0)
    table.admit(Admission(0, (4, 4, 9, 9), 2, params, ()))
    after = dict(zip(table.history[0].ids.tolist(), table.history[0].counts.tolist(), strict=True))
    assert before == after == {4: 0, 9: 2}


def test_bans_and_biases():
    row = torch.arange(V, dtype=torch.float32)[None]

    def token(params: SamplingParams, **known) -> int:
        result = sample(table_with(params, **known), row)
        assert not result.errors
        return int(result.tokens[0])

    def greedy(**fields) -> SamplingParams:
        return SamplingParams(temperature=0.0, **fields)

    assert token(greedy()) == 39
    assert token(greedy(logit_bias=((7, 100.0),))) == 7
    assert token(greedy(logit_bias=((38, 0.7), (38, 0.7)))) == 38
    assert token(greedy(allowed_token_ids=(3, 11, 5))) == 11
    assert token(greedy(bad_words_token_ids=((39,), (38,)))) == 37
    assert token(greedy(bad_words_token_ids=((8, 9, 39),)), output=(8, 9)) == 38
    assert token(greedy(bad_words_token_ids=((8, 9, 39),)), output=(9, 8)) == 39
    assert token(greedy(bad_words_token_ids=((3, 39),)), prompt=(1, 3)) == 39, "the prompt was not generated"
    assert token(greedy(min_tokens=2), output=(1,), eos=(39, 38)) == 37
    assert token(greedy(min_tokens=2, stop_token_ids=(39,)), output=(1,), eos=(38,)) == 37
    assert token(greedy(min_tokens=2, ignore_eos=True), output=(1,), eos=(39,)) == 39
    assert token(greedy(min_tokens=2), output=(1, 1), eos=(39,)) == 39
    assert token(greedy(min_tokens=1), eos=(39, V + 5)) == 38


def test_what_cannot_be_sampled_fails_alone(library):
    good = SamplingParams(temperature=0.0)
    table = table_with(
        good,
        SamplingParams(temperature=0.0, allowed_token_ids=(5,), bad_words_token_ids=((5,),)),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, allowed_token_ids=(V,)),
        SamplingParams(temperature=0.0, logit_bias=((V + 2, 1.0),)),
        good,
    )
    logits = torch.arange(V, dtype=torch.float32).repeat(6, 1)
    logits[2, 4] = math.nan
    result = sample(table, logits, library)
    assert result.errors[1] == NOTHING_LEFT
    assert result.errors[2] == NOT_FINITE
    assert f"token id {V};" in result.errors[3]
    assert "logit_bias" in result.errors[4]
    assert set(result.errors) == {1, 2, 3, 4}
    assert result.tokens[[0, 5]].tolist() == [39, 39]


def test_logprobs_are_of_the_raw_logits():
    (entry,) = token_logprobs(torch.tensor([[2.0, 1.0, 0.0]]), np.array([1]), 3)
    assert entry.token_id == 1
    assert entry.rank == 2
    assert entry.logprob == pytest.approx(-1.40761, abs=1e-4)
    assert [token for token, _ in entry.top] == [0, 1, 2]
    assert [logprob for _, logprob in entry.top] == pytest.approx([-0.40761, -1.40761, -2.40761], abs=1e-4)


def test_logprobs_owe_nothing_to_the_cuts_and_are_finite():
    torch.manual_seed(1)
    row = torch.randn(1, V) * 30
    fields = {"temperature": 0.8, "logprobs": 3, "seed": 4}
    plain = sample(table_with(SamplingParams(**fields)), row).logprobs[0]
    cut = sample(table_with(SamplingParams(**fields, top_p=0.5, top_k=2, min_p=0.3)), row).logprobs[0]
    banned = sample(table_with(SamplingParams(**fields, bad_words_token_ids=((int(row.argmax()),),))), row).logprobs[0]
    assert plain.top == cut.top == banned.top
    assert banned.token_id != int(row.argmax())
    for entry in (plain, cut, banned):
        for logprob in (entry.logprob, *(value for _, value in entry.top)):
            assert math.isfinite(logprob)
            assert logprob <= 0


def test_a_draw_depends_on_seed_and_position_alone(library):
    torch.manual_seed(2)
    row = torch.randn(V)
    seeded = SamplingParams(temperature=1.0, seed=42)
    alone = sample(table_with(seeded), row[None], library).tokens[0]
    others = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=2.0, top_k=3, seed=1),
        SamplingParams(temperature=0.0, logprobs=2),
        seeded,
        SamplingParams(temperature=0.7, top_p=0.5, frequency_penalty=1.0),
    ]
    logits = torch.randn(5, V)
    logits[3] = row
    for _ in range(3):
        assert sample(table_with(*others), logits, library).tokens[3] == alone
    later = [sample(table_with(seeded, output=(1,) * n), row[None], library).tokens[0] for n in range(12)]
    assert len(set(later)) > 3, "each position draws anew"


def test_random_numbers_are_splitmix64s_of_key_and_position():
    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    keys, counters = [3, 2**64 - 1, 12345678901234567890], [0, 1, 99_999]
    expected = [
        (mix((mix(key) + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53
        for key, i in zip(keys, counters, strict=True)
    ]
    held, begins = np.array(keys, np.uint64), np.array([7, 0, 2000])
    assert uniforms(held, np.array(counters)).tolist() == expected
    assert uniforms_at(streams(held, begins), begins + counters).tolist() == expected


def test_what_is_asked_of_draws_is_kept_for_the_same_rows_alone():
    table = table_with(SamplingParams(temperature=0.5, top_k=3, seed=1), SamplingParams(temperature=0.0, top_p=0.5))
    asked, slots = AskedDraws(table), table.slots([0, 1])
    first = asked.of(slots)
    assert first[["temperature", "min_p", "top_k", "top_p"]].tolist() == [(0.5, 0.0, 3.0, 1.0), (0.0, 0.0, V, 0.5)]
    before = first.copy()
    table.append(slots, np.array([5, 6]))
    assert asked.of(slots) is first
    assert (first["uniform"] != before["uniform"]).all()
    assert np.array_equal(asked.of(slots.copy()), first)
    assert np.array_equal(first["uniform"], uniforms(table.keys[slots], np.array([1, 1])))


def test_without_seeds_requests_and_processes_differ_and_an_engine_seed_repeats():
    flat = torch.zeros(200, V)
    free = SamplingParams(temperature=1.0)

    def run(seed):
        return sample(table_with(*[free] * 200, seed=seed), flat).tokens.tolist()

    assert run(None) != run(None)
    assert run(1) == run(1) != run(2)
    assert len(set(run(1))) > V // 2, "requests of one engine seed draw apart"

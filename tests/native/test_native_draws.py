"""Tokens drawn by the kernels: against definitions in float64, and against PyTorch's operators.

Scores, (logit − the largest) / temperature, are float32 by the same operations everywhere, so top-k cuts exactly the
same tokens, and min-p too but for the last bit of a logarithm. Only sums differ: weights are exp in float32 (about 1e-7
of each), added up in another order. Hence two choices may fall otherwise where they are nearer than SLACK of all
weights: which token is the last that top-p needs, and which one a random number falls in. Nothing else may differ.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from foliolm.core.plan import Admission
from foliolm.core.sampling import SamplingParams
from foliolm.executor.torch.requests import RequestTable
from foliolm.executor.torch.sampler import Sampler
from foliolm.ops.native.draw import DRAW, DrawCall
from support.tiny_models import kernels

SLACK = 1e-6


@pytest.fixture(scope="module", params=["native", "portable"])
def native(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foliolm.ops.native.draw.FEW_LOGITS", 0)  # threads share small rows, too
        yield kernels(request.param)


def draw(library, logits, draws, threads):
    return DrawCall(library, logits, draws).run(threads)


def draws_of(count, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0, uniform=0.5):
    made = np.zeros(count, DRAW)
    for name, value in zip(DRAW.names, (temperature, min_p, top_k, top_p, uniform), strict=True):
        made[name] = value
    return made


def scores(row, temperature):
    with np.errstate(over="ignore"):
        return (row - row.max()) / np.float32(temperature)


def possible(row, asked):
    """The tokens that a draw may give: one, but where rounding may choose."""
    x = scores(row, asked["temperature"])
    found = set()
    for floor in min_p_floors(asked["min_p"]):
        if 1 <= asked["top_k"] < len(x):
            floor = max(floor, np.sort(x)[-int(asked["top_k"])])
        for least in top_p_floors(x, floor, asked["top_p"]):
            kept = np.where(x >= least, np.exp(x.astype(np.float64)), 0.0)
            ends = kept.cumsum()
            target, slack = asked["uniform"] * ends[-1], SLACK * ends[-1]
            near = (ends - kept <= target + slack) & (ends >= target - slack) & (kept > 0)
            found |= set(np.flatnonzero(near).tolist())
    return found


def min_p_floors(min_p):
    """float32(log(min_p)), which the last bit of another library's logarithm may round otherwise."""
    if min_p == 0:
        return [-np.inf]
    floor = np.float32(np.log(min_p))
    return (
        [floor] if min_p == 1 else [np.nextafter(floor, np.float32(-np.inf)), floor, np.nextafter(floor, np.float32(0))]
    )


def top_p_floors(x, floor, top_p):
    """The scores of the tokens that may be the last that top-p needs."""
    if top_p >= 1:
        return [floor]
    order = np.sort(x[x >= floor])[::-1]
    reached = np.exp(order.astype(np.float64)).cumsum()
    wanted, slack = top_p * reached[-1], SLACK * reached[-1]
    before = np.concatenate(([0.0], reached[:-1]))
    return np.unique(order[(before < wanted + slack) & (reached >= wanted - slack)])


def rows_like(kind, generator, count, width):
    x = generator.normal(size=(count, width)).astype(np.float32)
    if kind == "steep":
        x *= 8
    elif kind == "zipf":
        x = -1.5 * np.log(generator.permuted(np.tile(np.arange(1, width + 1), (count, 1)), axis=1)) + 0.1 * x
    elif kind == "ties":
        x = np.round(x * 2) / 2
    elif kind == "flat":
        x[:] = x[0, 0]
    elif kind == "large":
        x = x * 3 + 3e4
    elif kind == "tiny":
        x *= 1e-38
    elif kind == "vast":
        x = np.clip(x, -3, 3) * np.float32(1e38)
    return np.ascontiguousarray(x, np.float32)


KINDS = ["normal", "steep", "zipf", "ties", "flat", "large", "tiny", "vast"]
WIDTHS = st.one_of(st.integers(1, 200), st.sampled_from([63, 64, 65, 4095, 4096, 4097, 9001]))
ASKED = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-5, 0.3, 0.8, 1.0, 2.0, 100.0]),
        "min_p": st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.5, 1.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 3, 40, 64, 65, 1000, 9000, 9001, 10**9]),
        "top_p": st.sampled_from([1.0, 1.0, 1e-9, 0.1, 0.5, 0.95, 0.999999, 1 - 2**-53]),
        "uniform": st.one_of(st.sampled_from([0.0, 1 - 2**-53]), st.floats(0, 1, exclude_max=True)),
    }
)


@settings(max_examples=100)
@given(
    st.sampled_from(KINDS), WIDTHS, st.lists(ASKED, min_size=1, max_size=20), st.sampled_from([0.0, 0.5, 0.99]),
    st.integers(1, 3), st.integers(0, 2**31),
)  # fmt: skip
def test_draws_are_those_of_the_definition(native, kind, width, asked, masked, threads, seed):
    generator = np.random.default_rng(seed)
    x = rows_like(kind, generator, len(asked), width)
    hidden = generator.random(x.shape) < masked
    hidden[np.arange(len(x)), generator.integers(0, width, len(x))] = False
    x[hidden] = -np.inf
    draws = np.concatenate([draws_of(1, **each) for each in asked])
    best, tokens = draw(native, torch.from_numpy(x), draws, threads)
    assert np.array_equal(best, x.max(-1))
    for row, each, token in zip(x, draws, tokens.tolist(), strict=True):
        assert token in possible(row, each)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "cut",
    [*({"top_k": k} for k in (1, 2, 3, 17, 40, 92, 93, 94, 200)), {"min_p": 0.95}, {"top_p": 0.01}, {"top_p": 0.05}],
)
def test_exactly_the_tokens_that_the_cuts_leave_are_drawn(native, cut, seed):
    """At a high temperature all are about as likely, so that evenly spaced numbers fall into each."""
    row = rows_like("normal", np.random.default_rng(seed), 1, 93 * 64 - 5)[0]
    x = scores(row, 100.0)
    (floor,) = [np.sort(x)[-cut["top_k"]]] if "top_k" in cut else [np.float32(math.log(cut.get("min_p", 1e-9)))]
    (floor,) = top_p_floors(x, floor, cut.get("top_p", 1.0))
    left = set(np.flatnonzero(x >= floor).tolist())
    count = 2 * len(left)
    asked = draws_of(count, 100.0, **cut)
    asked["uniform"] = (np.arange(count) + 0.5) / count
    _, tokens = draw(native, torch.from_numpy(np.tile(row, (count, 1))), asked, 2)
    assert set(tokens.tolist()) == left
    assert (np.diff(tokens) >= 0).all()


@pytest.mark.parametrize("kind", ["normal", "steep", "zipf", "ties"])
def test_draws_are_those_of_pytorchs_operators(native, kind):
    """The same requests, and all but a few of their tokens are beyond doubt."""
    generator = np.random.default_rng(4)
    x = torch.from_numpy(rows_like(kind, generator, 60, 2500))
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        for t in (0.5, 1.0, 1.7)
        for k, p, m in ((0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (40, 0.9, 0.02), (300, 0.5, 0.0))
        for _ in range(4)
    ]
    table = RequestTable(1, x.shape[1], seed=3)
    for i, each in enumerate(params):
        table.admit(Admission(i, (1,), 1, each, ()))
    slots = table.slots(range(len(params)))
    sampler = Sampler(table, native)
    asked, ours = sampler.asked(slots).copy(), sampler.sample(x.clone(), slots).tokens
    theirs = Sampler(table).sample(x.clone(), slots).tokens
    doubtful = 0
    for row, each, mine, other in zip(x.numpy(), asked, ours.tolist(), theirs.tolist(), strict=True):
        choices = possible(row, each)
        doubtful += len(choices) > 1
        assert {mine, other} <= choices
    assert doubtful <= 2
    assert len(set(ours.tolist())) > 20


@pytest.mark.parametrize("more", [{}, {"top_k": 50}, {"top_p": 0.8}, {"top_k": 300, "top_p": 0.95, "min_p": 1e-3}])
def test_many_draws_have_the_distribution(native, more):
    """Chi-square of 20,000 draws of one row, with one seed: it would fail for one in 10,000 seeds."""
    row = rows_like("zipf", np.random.default_rng(1), 1, 700)[0]
    table = RequestTable(1, len(row), seed=11)
    table.admit(Admission(0, (1,), 1, SamplingParams(temperature=1.2, **more), ()))
    count = 20_000
    asked = np.repeat(Sampler(table).asked(table.slots([0])), count)
    asked["uniform"] = np.random.default_rng(2).random(count)
    _, tokens = draw(native, torch.from_numpy(np.broadcast_to(row, (count, len(row))).copy()), asked, 2)
    x = scores(row, 1.2).astype(np.float64)
    probability = np.exp(x)
    if "min_p" in more:
        probability[probability < more["min_p"]] = 0
    if "top_k" in more:
        probability[x < np.sort(x)[-more["top_k"]]] = 0
    if "top_p" in more:
        ordered = np.sort(probability)[::-1]
        last = np.searchsorted(ordered.cumsum(), more["top_p"] * probability.sum())
        probability[probability < ordered[last]] = 0
    expected = count * probability / probability.sum()
    seen = np.bincount(tokens, minlength=len(row))
    assert not seen[expected == 0].any()
    often = expected >= 5
    rest = seen[~often].sum(), expected[~often].sum()
    assert often.sum() > 15
    pooled = [(*seen[often], rest[0]), (*expected[often], rest[1])] if rest[1] > 5 else [seen[often], expected[often]]
    scale = np.sum(pooled[0]) / np.sum(pooled[1])
    assert stats.chisquare(pooled[0], np.multiply(pooled[1], scale)).pvalue > 1e-4


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 16])
def test_a_row_does_not_depend_on_threads_and_neighbours(native, count):
    generator = np.random.default_rng(count)
    x = torch.from_numpy(rows_like("zipf", generator, count, 20_011))
    asked = draws_of(count)
    for at in range(count):
        asked[at] = (0.9, 0.0, (0, 70)[at % 2], (1.0, 0.97, 0.9)[at % 3], generator.random())
    _, alone = draw(native, x, asked, 1)
    for threads in (2, 3):
        assert np.array_equal(draw(native, x, asked, threads)[1], alone)
    for at in range(count):
        assert draw(native, x[at : at + 1], asked[at : at + 1], 2)[1] == alone[at : at + 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_said_and_harm_nobody(native, bad):
    generator = np.random.default_rng(0)
    x = rows_like("normal", generator, 9, 1003)
    asked = np.concatenate([draws_of(3, 0.0), draws_of(3, top_k=5), draws_of(3, top_p=0.7, min_p=0.1)])
    calm = draw(native, torch.from_numpy(x), asked, 2)
    for row, at in ((1, 1002), (4, 500), (7, 64)):
        x[row, at] = bad
        if bad == -math.inf:
            x[row] = bad
    best, tokens = draw(native, torch.from_numpy(x), asked, 2)
    for row in (1, 4, 7):
        assert tokens[row] == x[row].argmax()
        assert best[row] == bad or (math.isnan(best[row]) and math.isnan(bad))
    others = [0, 2, 3, 5, 6, 8]
    assert np.array_equal(tokens[others], calm[1][others])
    assert np.array_equal(best[others], calm[0][others])


def test_what_has_no_sense_ends_all_the_same(native):
    """No value of a parameter, however odd, leads out of the row or into an endless search."""
    odd = [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-320, 1e308, 2.0]
    x = torch.from_numpy(rows_like("normal", np.random.default_rng(0), len(odd), 130))
    for name in DRAW.names:
        asked = draws_of(len(odd), top_k=20, top_p=0.9, min_p=1e-3)
        asked[name] = odd
        tokens = draw(native, x, asked, 2)[1]
        assert ((tokens >= 0) & (tokens < 130)).all()


def test_greedy_rows_take_the_first_of_the_largest(native):
    x = rows_like("ties", np.random.default_rng(5), 20, 777)
    x[3] = 0
    best, tokens = draw(native, torch.from_numpy(x), draws_of(20, 0.0), 2)
    assert np.array_equal(tokens, x.argmax(-1))
    assert np.array_equal(best, x.max(-1))


def test_arrays_of_another_kind_are_refused(native):
    x = torch.zeros(3, 8)
    with pytest.raises(ValueError, match="draws hold 2 of"):
        draw(native, x, draws_of(2), 1)
    with pytest.raises(ValueError, match="contiguous float32"):
        draw(native, torch.zeros(8, 3).T, draws_of(3), 1)
    with pytest.raises(ValueError, match=r"torch\.float64"):
        draw(native, x.double(), draws_of(3), 1)

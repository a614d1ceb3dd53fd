"""Paged attention against the definition, over tables in disorder."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foliolm.core.kvspec import KVSpec
from foliolm.core.plan import Admission, LogitsAt, Row, StepPlan
from foliolm.core.sampling import SamplingParams
from foliolm.executor.torch.batch import BatchBuilder
from foliolm.executor.torch.grouping import Grouping
from foliolm.executor.torch.requests import RequestTable
from foliolm.ops.attention_gather import CausalMask, GatherAttention
from foliolm.ops.kv_write import write_kv

HEADS, KV_HEADS, DIM = 4, 2, 8


def definition(q, keys, values, context, window):
    """Queries at positions context, context + 1, …; one after another, head by head."""
    out = torch.zeros(q.shape)
    for i in range(len(q)):
        last = context + i
        first = 0 if window is None else max(0, last + 1 - window)
        for head in range(HEADS):
            k, v = keys[first : last + 1, head // 2], values[first : last + 1, head // 2]
            out[i, head] = torch.softmax(k @ q[i, head] / math.sqrt(DIM), 0) @ v
    return out


@settings(max_examples=40)
@given(data=st.data())
def test_any_mixed_batch(data):
    block = data.draw(st.sampled_from([1, 2, 5, 16]), "block size")
    window = data.draw(st.sampled_from([None, 1, 3, 9, 64]), "window")
    rows = data.draw(
        st.lists(
            st.tuples(st.sampled_from([1, 1, 1, 2, 5, 23]), st.sampled_from([0, 1, 4, 15, 16, 40])),
            min_size=1,
            max_size=9,
        ),
        "(new, context)",
    )
    grouping = Grouping(data.draw(st.sampled_from([1, 20, 10_000])), data.draw(st.sampled_from([1, 100, 10_000])))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    table = RequestTable(1, 100)
    free = (1 + torch.randperm(999)).tolist()
    notes, plan_rows, truth = [], [], []
    keys, values = (
        torch.full((1000, block, KV_HEADS, DIM), 1e4) for _ in range(2)
    )  # rubbish where nothing was written
    keys[0] = values[0] = 0
    for rid, (new, context) in enumerate(rows):
        total = new + context
        held = [free.pop() for _ in range(-(-total // block))]
        notes.append(Admission(rid, tuple(range(total)), total, SamplingParams(), ()))
        plan_rows.append(Row(rid, new, context, (tuple(held),), True, LogitsAt.LAST))
        k, v = torch.randn(total, KV_HEADS, DIM), torch.randn(total, KV_HEADS, DIM)
        truth.append((torch.randn(new, HEADS, DIM), k, v))
        slots = torch.tensor([held[i // block] * block + i % block for i in range(context)], dtype=torch.int64)
        write_kv(keys, values, slots, k[:context].flatten(1), v[:context].flatten(1))
    for note in notes:
        table.admit(note)
    builder = BatchBuilder(
        table, [KVSpec("a", 1, 8, window)], block, grouping, False, torch.device("cpu"), torch.float32
    )
    batch = builder.build(StepPlan(1, 0, rows=tuple(plan_rows)))
    # Where each row went in the batch: its last token is its logit row.
    last = batch.step.rows.tolist()
    q = torch.zeros(len(batch.step.input_ids), HEADS, DIM)
    own_k, own_v = torch.zeros(len(q), KV_HEADS, DIM), torch.zeros(len(q), KV_HEADS, DIM)
    for (new, context), at, (queries, k, v) in zip(rows, last, truth, strict=True):
        span = slice(at + 1 - new, at + 1)
        q[span], own_k[span], own_v[span] = queries, k[context:], v[context:]
        assert batch.step.positions[span].tolist() == list(range(context, context + new))
        assert batch.step.input_ids[span].tolist() == list(range(context, context + new))
    (layout,) = batch.step.layouts
    write_kv(keys, values, layout.slots, own_k.flatten(1), own_v.flatten(1))
    got = GatherAttention()(q, own_k, own_v, keys, values, layout).view(len(q), HEADS, DIM)
    for (new, context), at, (queries, k, v) in zip(rows, last, truth, strict=True):
        expected = definition(queries, k, v, context, window)
        torch.testing.assert_close(got[at + 1 - new : at + 1], expected, atol=2e-5, rtol=0)


def test_chunks_longer_than_a_tile():
    torch.manual_seed(0)
    new, context = 600, 77
    table = RequestTable(1, 10_000)
    table.admit(Admission(1, tuple(range(new + context)), new + context, SamplingParams(), ()))
    held = tuple(range(1, 44))
    for window in (None, 100):
        k, v, q = (torch.randn(new + context, heads, DIM) for heads in (KV_HEADS, KV_HEADS, HEADS))
        keys, values = torch.zeros(50, 16, KV_HEADS, DIM), torch.zeros(50, 16, KV_HEADS, DIM)
        slots = torch.arange(16, 16 + new + context)
        write_kv(keys, values, slots, k.flatten(1), v.flatten(1))
        builder = BatchBuilder(
            table, [KVSpec("a", 1, 8, window)], 16, Grouping(1, 1), False, torch.device("cpu"), torch.float32
        )
        plan = StepPlan(1, 0, rows=(Row(1, new, context, (held,), True, LogitsAt.LAST),))
        (layout,) = builder.build(plan).step.layouts
        got = GatherAttention()(q[context:], k[context:], v[context:], keys, values, layout).view(new, HEADS, DIM)
        distance = torch.arange(new + context)[context:, None] - torch.arange(new + context)
        seen = (distance >= 0) & (distance < (window or 1 << 30))
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[context:].transpose(0, 1),
            k.transpose(0, 1).repeat_interleave(2, 0),
            v.transpose(0, 1).repeat_interleave(2, 0),
            seen,
        )
        torch.testing.assert_close(got, expected.transpose(0, 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 4])
def test_causal_mask_slices_agree_with_the_rule(window):
    mask = CausalMask(window, torch.float32)
    for rows, before in ((1, 0), (3, 2), (2, 9), (5, 1)):
        got = mask.slice(rows, before)
        for i in range(rows):
            for j in range(before + rows):
                distance = before + i - j
                visible = distance >= 0 and (window is None or distance < window)
                assert got[i, j] == (0 if visible else -math.inf)


@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=60),
    call=st.sampled_from([1, 30, 500]),
    most=st.sampled_from([1, 600, 5000]),
)
def test_groups_cover_all_rows_and_are_worth_it(lengths, call, most):
    import numpy as np

    lengths = np.array(sorted(lengths, reverse=True))
    grouping = Grouping(call, most)
    bounds = grouping.bounds(lengths)
    assert bounds[0] == 0
    assert bounds[-1] == len(lengths)
    assert bounds == sorted(set(bounds))
    for start, stop in pairwise(bounds):
        part = lengths[start:stop]
        assert stop - start == 1 or part[0] * len(part) <= most
        for cut in range(1, len(part)):
            assert (part[0] - part[cut]) * (len(part) - cut) <= call, "a cut was worth a call and not made"


def test_no_rows_no_groups():
    import numpy as np

    assert Grouping(1, 1).bounds(np.zeros(0, np.int64)) == [0]

"""Plans by hand: order, state, block moves, failures."""

import threading

import pytest
import torch

from foliolm.core.plan import Admission, BlockCopy, BlockSwap, DecodeRows, LogitsAt, Row, StepPlan
from foliolm.core.sampling import SamplingParams
from foliolm.executor.torch.executor import TorchExecutor
from support.same_tokens import assert_same_tokens
from support.tiny_models import VOCAB, ours, reference, reference_greedy, reference_logits
from support.torch_engine import generate, request

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
PROMPT = [(13 * i + 4) % VOCAB for i in range(21)]


@pytest.fixture(scope="module")
def theirs():
    return reference("llama")


@pytest.fixture(scope="module")
def model(theirs):
    return ours(theirs, "llama")


def admit(rid: int, tokens, num_prompt=None, params=GREEDY) -> Admission:
    return Admission(rid, tuple(tokens), num_prompt or len(tokens), params, ())


def prefill(step: int, rid: int, tokens, table, params=GREEDY, **fields) -> StepPlan:
    row = Row(rid, len(tokens), 0, (tuple(table),), True, LogitsAt.LAST)
    return StepPlan(step, 0, rows=(row,), admissions=(admit(rid, tokens, params=params),), **fields)


def decode(step: int, rid: int, context: int, tick: int = 0, grown=(), **fields) -> StepPlan:
    return StepPlan(step, 0, decodes=DecodeRows((rid,), (context - tick,), tick, 1, context, grown), **fields)


@pytest.mark.parametrize("depth", [0, 1])
def test_steps_in_flight_feed_each_other(theirs, model, depth):
    executor = TorchExecutor(model, num_blocks=20, block_size=8, depth=depth)
    handles = [executor.submit(prefill(1, 7, PROMPT, (3, 9, 4)))]
    # All submitted before any has been waited for: each needs the token of the one before.
    for i in range(9):
        grown = ((7, ((11 + i,),)),) if (len(PROMPT) + i) % 8 == 0 else ()
        handles.append(executor.submit(decode(2 + i, 7, len(PROMPT) + i, i, grown)))
    results = [handle.wait() for handle in handles]
    executor.close()
    assert_same_tokens([result.tokens[0][0] for result in results], *reference_greedy(theirs, PROMPT, 10))
    assert [result.step_id for result in results] == list(range(1, 11))
    for result in results:
        seconds = result.seconds
        assert seconds.total >= seconds.prepare + seconds.forward + seconds.sample > 0


def test_depth_runs_on_one_other_thread(model, monkeypatch):
    seen = set()
    forward = type(model).forward

    def spy(*args):
        seen.add(threading.current_thread())
        return forward(*args)

    monkeypatch.setattr(type(model), "forward", spy)
    for depth in (0, 1):
        seen.clear()
        generate(model, [request(1, PROMPT)], depth=depth)
        assert len(seen) == 1
        assert (threading.current_thread() in seen) == (depth == 0)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_step_raises_from_wait_and_the_next_one_runs(theirs, model, depth):
    executor = TorchExecutor(model, num_blocks=20, block_size=8, depth=depth)
    bad = executor.submit(decode(1, 99, 5))
    good = executor.submit(prefill(2, 1, PROMPT, (1, 2, 3)))
    with pytest.raises(KeyError, match="99"):
        bad.wait()
    assert good.wait().tokens == [[reference_greedy(theirs, PROMPT, 1)[0][0]]]
    executor.close()


def test_a_result_in_flight_outlives_its_request(model):
    executor = TorchExecutor(model, num_blocks=20, block_size=8, depth=1)
    first = executor.submit(prefill(1, 1, PROMPT, (1, 2, 3)))
    late = executor.submit(decode(2, 1, len(PROMPT)))
    other = executor.submit(prefill(3, 2, PROMPT, (4, 5, 6), released=(1, 12345)))
    assert first.wait().tokens == other.wait().tokens
    assert len(late.wait().tokens[0]) == 1
    executor.close()


def test_a_plan_that_runs_ahead_is_refused(model):
    executor = TorchExecutor(model, num_blocks=20, block_size=8)
    executor.submit(prefill(1, 1, PROMPT, (1, 2, 3))).wait()
    with pytest.raises(ValueError, match="position 22 of a request that has 22 tokens"):
        executor.submit(decode(2, 1, 22)).wait()
    ahead = StepPlan(3, 0, rows=(Row(1, 1, 20, logits=LogitsAt.LAST),))
    with pytest.raises(ValueError, match=r"ends at token 21, the request has 22"):
        executor.submit(ahead).wait()
    with pytest.raises(ValueError, match="holds 2 blocks of 8 tokens"):
        executor.submit(prefill(4, 2, PROMPT, (4, 5))).wait()
    groups = Row(1, 1, 21, ((4,), (5,)), False, LogitsAt.LAST)
    with pytest.raises(ValueError, match="2 KV groups"):
        executor.submit(StepPlan(5, 0, rows=(groups,))).wait()


def test_what_is_not_supported_is_refused_by_name(model):
    executor = TorchExecutor(model, num_blocks=20, block_size=8)
    executor.submit(prefill(1, 1, PROMPT, (1, 2, 3))).wait()
    for fields, text in (({"draft_tokens": (1,)}, "draft"), ({"adapter": 5}, "adapter 5")):
        row = Row(1, 1, 21, logits=LogitsAt.LAST, **fields)
        with pytest.raises(ValueError, match=text):
            executor.submit(StepPlan(2, 0, rows=(row,))).wait()
    with pytest.raises(ValueError, match="bucket 8"):
        executor.submit(decode(3, 1, 21, bucket=8)).wait()


def test_copied_and_swapped_blocks_are_the_same_to_the_bit(model):
    executor = TorchExecutor(model, num_blocks=20, block_size=8, num_host_blocks=4)
    executor.submit(prefill(1, 1, PROMPT, (1, 2, 3))).wait()
    (group,) = executor.kv._groups
    kept = group[:, :, [1, 2, 3]].clone()
    assert kept.abs().sum(dim=(0, 1, 3, 4, 5)).gt(0).all()
    # A chain: the copy to 5 must read 4's old content.
    executor.submit(StepPlan(2, 0, copies=(BlockCopy(0, 1, 4), BlockCopy(0, 4, 5)))).wait()
    assert torch.equal(group[:, :, 4], kept[:, :, 0])
    assert not group[:, :, 5].any()
    executor.submit(StepPlan(3, 0, swaps_out=(BlockSwap(0, 2, 1), BlockSwap(0, 3, 3)))).wait()
    group[:, :, [2, 3]] = 7.0
    executor.submit(StepPlan(4, 0, swaps_in=(BlockSwap(0, 10, 1), BlockSwap(0, 11, 3)))).wait()
    assert torch.equal(group[:, :, [10, 11]], kept[:, :, [1, 2]])
    assert not group[:, :, 0].any(), "the null block stays zero"
    with pytest.raises(ValueError, match="host block 4"):
        executor.submit(StepPlan(5, 0, swaps_out=(BlockSwap(0, 2, 4),))).wait()


def test_a_request_goes_on_after_its_blocks_have_moved(theirs, model):
    executor = TorchExecutor(model, num_blocks=20, block_size=8, num_host_blocks=3)
    executor.submit(prefill(1, 1, PROMPT, (1, 2, 3))).wait()
    out = tuple(BlockSwap(0, device, host) for host, device in enumerate((1, 2, 3)))
    executor.submit(StepPlan(2, 0, preempted=(1,), swaps_out=out)).wait()
    executor.submit(prefill(3, 2, PROMPT[::-1], (1, 2, 3))).wait()
    back = tuple(BlockSwap(0, device, host) for host, device in enumerate((8, 5, 6)))
    row = Row(1, 1, len(PROMPT), ((8, 5, 6),), True, LogitsAt.LAST)
    expected = reference_greedy(theirs, PROMPT, 2)
    note = admit(1, [*PROMPT, expected[0][0]], len(PROMPT))
    result = executor.submit(StepPlan(4, 0, rows=(row,), admissions=(note,), swaps_in=back)).wait()
    assert_same_tokens([expected[0][0], *result.tokens[0]], *expected)


def test_rows_of_every_kind_share_a_step(theirs, model):
    """A steady decode, a row of one token, a first chunk, a later chunk, a chunk without logits."""
    executor = TorchExecutor(model, num_blocks=40, block_size=8)
    ask = SamplingParams(temperature=0.0, prompt_logprobs=2)
    executor.submit(prefill(1, 1, PROMPT, (1, 2, 3))).wait()
    head = Row(2, 9, 0, ((4, 5, 6),), True, LogitsAt.NONE)
    executor.submit(StepPlan(2, 0, rows=(head,), admissions=(admit(2, PROMPT),))).wait()
    head = Row(3, 20, 0, ((7, 8, 9),), True, LogitsAt.NONE)
    executor.submit(StepPlan(3, 0, rows=(head,), admissions=(admit(3, PROMPT),))).wait()
    rows = (
        Row(3, 1, 20, logits=LogitsAt.LAST),
        Row(4, 21, 0, ((10, 11, 12),), True, LogitsAt.LAST | LogitsAt.ALL),
        Row(2, 12, 9, logits=LogitsAt.LAST),
        Row(5, 6, 0, ((13, 14, 15),), True, LogitsAt.NONE),
    )
    notes = (admit(4, PROMPT, params=ask), admit(5, PROMPT))
    steady = DecodeRows((1,), (21,), 0, 1, 21)
    result = executor.submit(StepPlan(4, 0, decodes=steady, rows=rows, admissions=notes)).wait()
    first, second = reference_greedy(theirs, PROMPT, 2)[0]
    assert result.tokens == [[second], [first], [first], [first], []]
    entries = result.prompt_logprobs[2]
    assert entries[0] is None
    expected = torch.log_softmax(reference_logits(theirs, PROMPT), -1)
    assert len(entries) == len(PROMPT)
    for position, entry in enumerate(entries[1:], 1):
        assert entry.token_id == PROMPT[position]
        assert entry.logprob == pytest.approx(float(expected[position - 1, PROMPT[position]]), abs=1e-4)
        assert entry.top[0][0] == int(expected[position - 1].argmax())
        assert len(entry.top) == 2


def test_a_row_that_fails_alone_leaves_the_others_and_the_next_step_alone(theirs, model):
    run = generate(
        model, [request(1, PROMPT), request(2, PROMPT, allowed_token_ids=(3,), bad_words_token_ids=((3,),))], depth=1
    )
    assert run.by_id[2].tokens == []
    assert "no token may be sampled" in run.by_id[2].error
    assert_same_tokens(run.by_id[1].tokens, *reference_greedy(theirs, PROMPT, 8))


@pytest.mark.parametrize("chunk", [5, 64])
def test_prompt_logprobs_do_not_depend_on_chunks_or_preemption(model, chunk):
    asked = [request(i, PROMPT[i:], prompt_logprobs=1, max_tokens=12) for i in range(3)]
    plain = generate(model, asked)
    cut = generate(model, asked, chunk=chunk, block_size=4, num_blocks=14)
    assert cut.preemptions > 0
    for i in range(3):
        a, b = plain.by_id[i].prompt_logprobs, cut.by_id[i].prompt_logprobs
        assert len(a) == len(b) == len(PROMPT) - i
        assert a[0] is None is b[0]
        assert [e.token_id for e in a[1:]] == [e.token_id for e in b[1:]] == PROMPT[i + 1 :]
        assert [e.logprob for e in a[1:]] == pytest.approx([e.logprob for e in b[1:]], abs=1e-4)


def test_a_seeded_request_says_the_same_in_any_company(model):
    def text(others, blocks=200, **fields):
        rid = fields.pop("rid", 50)
        mine = request(rid, PROMPT, temperature=0.8, seed=42, max_tokens=16)
        run = generate(model, [*others[:rid], mine, *others[rid:]], num_blocks=blocks, block_size=4, **fields)
        return run.by_id[rid].tokens, run.preemptions

    def free(i, **more):
        return request(i, PROMPT[: 3 + i], temperature=1.0, max_tokens=16, **more)

    alone, _ = text([])
    assert len(set(alone)) > 3
    assert text([free(1)])[0] == alone
    assert text([free(1, seed=9)])[0] == alone
    assert text([free(i) for i in range(8) if i != 5], rid=5)[0] == alone
    hurried, preemptions = text([request(0, PROMPT, max_tokens=30)], blocks=17, depth=1)
    assert preemptions > 0
    assert hurried == alone


def test_penalties_survive_preemption(model):
    fields = {"frequency_penalty": 1.2, "repetition_penalty": 1.3, "max_tokens": 16}
    alone = generate(model, [request(1, PROMPT, **fields)]).by_id[1].tokens
    assert alone != generate(model, [request(1, PROMPT, max_tokens=16)]).by_id[1].tokens
    crowded = generate(
        model, [request(0, PROMPT, max_tokens=30), request(1, PROMPT, **fields)], block_size=4, num_blocks=17
    )
    assert crowded.preemptions > 0
    assert crowded.by_id[1].tokens == alone


def test_end_tokens_end_and_min_tokens_put_them_off(model):
    said = generate(model, [request(1, PROMPT, max_tokens=20)]).by_id[1].tokens
    end = said[2]
    first = said.index(end)
    run = generate(
        model,
        [request(1, PROMPT, eos=(end,), max_tokens=20), request(2, PROMPT, eos=(end,), max_tokens=20, min_tokens=9)],
    )
    assert run.by_id[1].tokens == said[: first + 1]
    assert end not in run.by_id[2].tokens[:9]


def test_warm_up_and_rate_leave_no_trace(theirs, model):
    executor = TorchExecutor(model, num_blocks=20, block_size=8)
    assert executor.measure_prefill_rate(64) > 0
    assert executor.warm_up(200, 8, 50) > 0
    assert len(executor._runner.requests) == 0
    (group,) = executor.kv._groups
    assert not group[:, :, 0].any()
    assert executor.submit(prefill(1, 1, PROMPT, (1, 2, 3))).wait().tokens == [
        [reference_greedy(theirs, PROMPT, 1)[0][0]]
    ]

"""The engine's step, its failures and its books, in process."""

import pytest
from fake_engine import STEP_FAILS, SUBMIT_FAILS, build, expected

from foliolm.core.errors import QueueFullError, RequestError
from foliolm.core.request import EngineRequest, FinishReason
from foliolm.core.sampling import SamplingParams
from foliolm.engine.client import InProcessClient
from foliolm.engine.loop import engine_stats


class Sink:
    def __init__(self):
        self.tokens = []
        self.reason = None
        self.error = None
        self.stamps = None
        self.calls_after_end = 0

    def on_output(self, output):
        self.calls_after_end += self.reason is not None
        self.tokens += output.token_ids
        self.reason = output.finish_reason
        self.error = output.error
        self.stamps = output.stamps

    def on_decision(self, decision):
        pass

    def on_error(self, error):
        self.error = str(error)


def request(prompt, max_tokens=5, **sampling):
    return EngineRequest(0, tuple(prompt), SamplingParams(max_tokens=max_tokens, **sampling))


def run(client, limit=2000):
    steps = 0
    while client.has_work:
        client.step()
        steps += 1
        assert steps < limit, "the engine never ends"
    return steps


@pytest.mark.parametrize("depth", [0, 1])
def test_each_request_gets_its_own_tokens(depth):
    client = InProcessClient([build(depth=depth)])
    prompts = [[i + 1] * (1 + 5 * i % 40) for i in range(24)]
    sinks = [Sink() for _ in prompts]
    for prompt, sink in zip(prompts, sinks, strict=True):
        client.add([request(prompt, max_tokens=3 + prompt[0] % 7)], [sink])
    run(client)
    for prompt, sink in zip(prompts, sinks, strict=True):
        assert sink.tokens == expected(prompt, 3 + prompt[0] % 7)
        assert sink.reason is FinishReason.LENGTH
        assert sink.calls_after_end == 0
    assert client.router.num_open == 0
    assert client.engines[0].check_invariants() == []


def test_depth_one_keeps_a_step_in_flight():
    engine = build(depth=1)
    client = InProcessClient([engine])
    client.add([request([5], max_tokens=4)], [Sink()])
    client.step()
    assert len(engine.in_flight) == 1, "the first step is in flight and nothing is committed"
    most = 0
    while client.has_work:
        client.step()
        most = max(most, len(engine.in_flight))
    assert most == 1
    assert not engine.in_flight


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("trigger", [STEP_FAILS, SUBMIT_FAILS])
def test_a_failed_step_ends_its_requests_alone(depth, trigger):
    client = InProcessClient([build(depth=depth)])
    bad = Sink()
    client.add([request([1, trigger])], [bad])
    run(client)
    assert bad.reason is FinishReason.ERROR
    assert "exploded" in bad.error or "refused" in bad.error
    good = Sink()
    client.add([request([9, 9])], [good])
    run(client)
    assert good.tokens == expected([9, 9], 5)
    engine = client.engines[0]
    assert engine.ledger.totals.num_failed_steps >= 1
    assert engine.check_invariants() == []
    assert engine.scheduler.stats().kv_blocks_used == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_planner_that_raises_ends_open_requests_and_not_the_loop(depth, monkeypatch):
    client = InProcessClient([build(depth=depth)])
    engine = client.engines[0]
    sinks = [Sink(), Sink()]
    client.add([request([1]), request([2])], sinks)
    client.step()
    monkeypatch.setattr(engine.scheduler, "schedule", lambda now: 1 // 0)
    client.step()
    monkeypatch.undo()
    assert [sink.reason for sink in sinks] == [FinishReason.ERROR] * 2
    assert "ZeroDivisionError" in sinks[0].error
    run(client)
    after = Sink()
    client.add([request([3])], [after])
    run(client)
    assert after.tokens == expected([3], 5)
    assert engine.check_invariants() == []


def test_a_group_is_taken_whole_or_not_at_all():
    client = InProcessClient([build()])
    sinks = [Sink(), Sink()]
    with pytest.raises(RequestError, match="128"):
        client.add([request([1]), request([1] * 200)], sinks)
    assert not client.has_work
    assert client.router.num_open == 0

    small = InProcessClient([build(max_queued_requests=3)])
    with pytest.raises(QueueFullError, match="3"):
        small.add([request([1])] * 4, [Sink() for _ in range(4)])
    assert not small.has_work
    small.add([request([1])] * 3, [Sink() for _ in range(3)])
    run(small)


def test_abort_reaches_waiting_running_and_in_flight_and_is_idempotent():
    client = InProcessClient([build(depth=1, max_num_seqs=2)])
    sinks = [Sink() for _ in range(4)]
    ids = [client.add([request([i + 1] * 8, max_tokens=50)], [sink])[0] for i, sink in enumerate(sinks)]
    for _ in range(3):
        client.step()
    client.abort([ids[0], ids[3], 10_000])
    client.abort([ids[0]])
    heard = len(sinks[0].tokens)
    run(client)
    assert len(sinks[0].tokens) == heard
    assert sinks[3].tokens == []
    assert sinks[1].tokens == expected([2] * 8, 50)
    assert sinks[2].tokens == expected([3] * 8, 50)
    assert client.engines[0].check_invariants() == []


def test_preempted_requests_still_get_every_token():
    client = InProcessClient([build(num_blocks=33, max_model_len=100)])
    prompts = [[i + 1] * 20 for i in range(6)]
    sinks = [Sink() for _ in prompts]
    for prompt, sink in zip(prompts, sinks, strict=True):
        client.add([request(prompt, max_tokens=60)], [sink])
    run(client, limit=5000)
    assert client.engines[0].scheduler.stats().num_preemptions > 0
    for prompt, sink in zip(prompts, sinks, strict=True):
        assert sink.tokens == expected(prompt, 60)


def test_requests_go_to_the_engine_with_fewest_open():
    client = InProcessClient([build(), build(engine_index=1)])
    sinks = [Sink() for _ in range(6)]
    for i, sink in enumerate(sinks):
        client.add([request([i + 1])], [sink])
    assert [len(engine.ledger.open_request_ids) for engine in client.engines] == [3, 3]
    run(client)
    for i, sink in enumerate(sinks):
        assert sink.tokens == expected([i + 1], 5)


def test_the_ledger_books_steps_and_requests():
    client = InProcessClient([build()])
    engine = client.engines[0]
    sink = Sink()
    client.add([request([4] * 70, max_tokens=3)], [sink])
    run(client)
    ledger = engine.ledger
    assert ledger.totals.num_tokens == 70 + 2, "the last token is never computed"
    assert ledger.totals.num_sampled == 3
    assert [record.num_tokens for record in ledger.steps] == [64, 6, 1, 1]
    assert ledger.steps[1].context_tokens == 64
    (record,) = ledger.requests
    assert (record.num_prompt_tokens, record.num_output_tokens) == (70, 3)
    assert record.finish_reason is FinishReason.LENGTH
    stamps = record.stamps
    assert 0 < stamps.queued_ns <= stamps.admitted_ns <= stamps.first_token_ns <= stamps.last_token_ns
    assert ledger.open_request_ids == ()


def test_stats_that_leave_the_process_count_shared_prefixes():
    client = InProcessClient([build(enable_prefix_caching=True)])
    for _ in range(2):
        client.add([request(range(1, 51), max_tokens=2)], [Sink()])
        run(client)
    stats = engine_stats(client.engines[0])
    block_size = client.engines[0].scheduler.config.block_size
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (100, 49 // block_size * block_size)

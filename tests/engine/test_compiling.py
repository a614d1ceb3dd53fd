"""A request waits for its grammar, and nobody waits with it."""

import threading
import time

import pytest
from fake_engine import build, expected

from foliolm.core.errors import RequestError
from foliolm.core.grammar import GrammarSpec
from foliolm.core.request import EngineRequest
from foliolm.core.sampling import SamplingParams
from foliolm.engine.compiling import CompilingRequests
from foliolm.engine.loop import EngineLoop
from foliolm.engine.messages import Abort, Add, Stop, decode_from_engine, encode


class SlowGrammars:
    """Compiles when it is told to; the source ``bad`` cannot be compiled."""

    def __init__(self):
        self.go = threading.Event()
        self.threads = set()

    def prepare(self, spec):
        if spec.source != "quick" and not self.go.is_set():
            self.threads.add(threading.current_thread().name)
            assert self.go.wait(30)
        if spec.source == "bad":
            raise RequestError("it cannot be compiled", spec.field)


class Pipe:
    """Both sockets of a loop, in one thread's reach."""

    def __init__(self):
        self.frames = []
        self.sent = []
        self.lock = threading.Condition()

    def put(self, message):
        with self.lock:
            self.frames.append(encode(message))
            self.lock.notify_all()

    def poll(self, timeout_ms):
        with self.lock:
            if not self.frames:
                self.lock.wait(None if timeout_ms is None else timeout_ms / 1000)
            return bool(self.frames)

    def recv(self, flags):
        import zmq

        with self.lock:
            if not self.frames:
                raise zmq.Again
            return self.frames.pop(0)

    def send(self, frame):
        with self.lock:
            self.sent.append(decode_from_engine(frame))
            self.lock.notify_all()

    def until(self, what):
        deadline = time.monotonic() + 30
        with self.lock:
            while not what(self.sent):
                assert time.monotonic() < deadline, "it never came"
                self.lock.wait(0.1)


def request(rid, source=None, max_tokens=4):
    grammar = None if source is None else GrammarSpec("regex", source, "structured_outputs.regex")
    return EngineRequest(rid, (1, 2, 3), SamplingParams(max_tokens=max_tokens, grammar=grammar))


@pytest.fixture
def running():
    grammars = SlowGrammars()
    engine = build(max_queued_requests=3)
    engine.grammars = grammars
    pipe = Pipe()
    thread = threading.Thread(target=EngineLoop(engine, pipe, pipe).run)
    thread.start()
    yield pipe, grammars, engine
    grammars.go.set()
    pipe.put(Stop())
    thread.join(30)
    assert not thread.is_alive()
    assert engine.check_invariants() == []


def accepted(sent):
    return [first for message in sent for first in message.accepted]


def refused(sent):
    return {first: failure for message in sent for first, failure in message.refused}


def finished(sent):
    return [record.request_id for message in sent for record in message.finished]


def test_others_run_while_one_waits(running):
    pipe, grammars, _ = running
    pipe.put(Add((request(1, "slow"),)))
    pipe.put(Add((request(2),)))
    pipe.until(lambda sent: 2 in finished(sent))
    assert accepted(pipe.sent) == [2]
    grammars.go.set()
    pipe.until(lambda sent: 1 in finished(sent))
    assert accepted(pipe.sent) == [2, 1]
    assert all("foliolm-grammar" in name for name in grammars.threads), "not in the loop's thread"
    tokens = [token for message in pipe.sent for output in message.outputs() for token in output.token_ids]
    assert tokens == expected((1, 2, 3), 4) * 2


def test_a_grammar_that_cannot_be_compiled_refuses_its_group_alone(running):
    pipe, grammars, _ = running
    pipe.put(Add((request(1, "bad"), request(2))))
    pipe.put(Add((request(3, "quick"),)))
    pipe.until(lambda sent: 3 in finished(sent))
    assert refused(pipe.sent) == {}
    grammars.go.set()
    pipe.until(lambda sent: 1 in refused(sent))
    failure = refused(pipe.sent)[1]
    assert (failure.kind, failure.field) == ("request", "structured_outputs.regex")
    assert accepted(pipe.sent) == [3]


def test_one_that_is_aborted_meanwhile_never_runs(running):
    pipe, grammars, engine = running
    pipe.put(Add((request(1, "slow"), request(2, "slow"))))
    pipe.put(Abort((1, 2, 99)))
    pipe.put(Add((request(3),)))
    pipe.until(lambda sent: 3 in finished(sent))
    grammars.go.set()
    pipe.put(Add((request(4, "quick"),)))
    pipe.until(lambda sent: 4 in finished(sent))
    assert accepted(pipe.sent) == [3, 4]
    assert not engine.has_work


def test_no_more_may_wait_than_may_queue(running):
    pipe, grammars, _ = running
    for rid in (1, 2, 3, 4):
        pipe.put(Add((request(rid, "slow"),)))
    pipe.until(lambda sent: 4 in refused(sent))
    assert refused(pipe.sent)[4].kind == "queue_full"
    grammars.go.set()
    pipe.until(lambda sent: {1, 2, 3} <= set(finished(sent)))


def test_an_engine_that_compiles_none_refuses_by_name():
    with pytest.raises(RequestError, match="compiles no grammars") as refusal:
        build().add([request(1, "quick")])
    assert refusal.value.field == "structured_outputs.regex"


def test_one_that_is_done_while_it_is_looked_at_is_not_lost():
    waiting = CompilingRequests(lambda requests: None)
    waiting.begin((request(1, "quick"),))
    (group,) = waiting._groups
    group.done.result(30)

    class Flipping:
        """Not done when it is first asked, done ever after."""

        def __init__(self):
            self.asked = 0

        def done(self):
            self.asked += 1
            return self.asked > 1

        def exception(self):
            return None

    group.done = Flipping()
    taken = [waiting.take_ready(), waiting.take_ready()]
    assert [len(ready) for ready in taken] == [0, 1]
    waiting.close()


def test_many_at_once_are_all_taken(running):
    pipe, grammars, _ = running
    grammars.go.set()
    for rid in range(1, 61):
        pipe.put(Add((request(rid, "quick", max_tokens=1),)))
        pipe.until(lambda sent, rid=rid: len(finished(sent)) >= rid - 2)
    pipe.until(lambda sent: len(finished(sent)) == 60)


def test_closing_forgets_what_is_compiled_still():
    grammars = SlowGrammars()
    grammars.go.set()
    waiting = CompilingRequests(lambda requests: grammars.prepare(requests[0].sampling.grammar))
    waiting.begin((request(1, "quick"),))
    waiting.close()
    assert len(waiting) == 0
    assert waiting.take_ready() == []

"""Engines in processes of their own: start, refusals, routing, death."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fake_engine import PROCESS_DIES, STEP_FAILS, expected

from foliolm.core.errors import ConfigError, EngineDeadError, QueueFullError, RequestError
from foliolm.core.request import EngineRequest, FinishReason
from foliolm.core.sampling import SamplingParams
from foliolm.engine.client import ProcessClient
from foliolm.engine.process import EngineSpec
from foliolm.engine.supervisor import Supervision

HERE = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
PATIENCE_S = 30


def spec(**settings):
    return EngineSpec("fake_engine:build_from", (settings,), {"PYTHONPATH": HERE})


class Sink:
    def __init__(self):
        self.tokens = []
        self.reason = None
        self.error = None
        self.ended = asyncio.Event()

    def on_output(self, output):
        self.tokens += output.token_ids
        if output.finish_reason is not None:
            self.reason = output.finish_reason
            self.ended.set()

    def on_decision(self, decision):
        pass

    def on_error(self, error):
        self.error = error
        self.ended.set()


def request(prompt, max_tokens=5):
    return EngineRequest(0, tuple(prompt), SamplingParams(max_tokens=max_tokens))


@asynccontextmanager
async def running(*specs, **options):
    client = ProcessClient(specs, **options)
    client.launch()
    client.wait_ready(lambda text: None)
    client.attach()
    try:
        yield client
    finally:
        client.close()


async def until(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        await asyncio.sleep(0.01)


async def ended(sinks):
    await asyncio.wait_for(asyncio.gather(*(sink.ended.wait() for sink in sinks)), PATIENCE_S)


def test_streams_refusals_and_aborts_over_one_engine():
    async def scenario():
        async with running(spec(max_queued_requests=20)) as client:
            assert client.info.model == "fake"
            # Every stream gets its own tokens.
            prompts = [[i + 1] * (1 + i) for i in range(16)]
            sinks = [Sink() for _ in prompts]
            for prompt, sink in zip(prompts, sinks, strict=True):
                await client.add([request(prompt, 30)], [sink])
            await ended(sinks)
            assert [sink.tokens for sink in sinks] == [expected(prompt, 30) for prompt in prompts]
            # Refusals come back as what they were, and leave nothing.
            with pytest.raises(RequestError, match="128"):
                await client.add([request([1] * 300)], [Sink()])
            with pytest.raises(QueueFullError) as full:
                await client.add([request([1], 2)] * 21, [Sink() for _ in range(21)])
            assert full.value.retry_after_s >= 1
            # A failed step ends its requests alone.
            bad = Sink()
            await client.add([request([STEP_FAILS])], [bad])
            await ended([bad])
            assert bad.reason is FinishReason.ERROR
            assert client.stats[0].num_failed_steps == 1
            # An abort frees at once, and counts go back to zero.
            gone = Sink()
            ids = await client.add([request([3] * 4, 120)], [gone])
            client.abort(ids)
            client.abort(ids)
            await until(lambda: client.stats[0].num_running == 0 == client.stats[0].kv_blocks_used, "all is free")
            assert not gone.ended.is_set()
            assert client.router.num_open == 0

    asyncio.run(scenario())


def test_a_cancelled_add_leaves_nothing_behind():
    async def scenario():
        async with running(spec(step_seconds=0.2)) as client:
            await client.add([request([1], 100)], [Sink()])
            task = asyncio.create_task(client.add([request([2], 100)], [Sink()]))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert client.router.num_open == 1
            await until(lambda: client.stats[0].num_running == 1, "one runs")
            await asyncio.sleep(0.5)
            assert client.stats[0].num_running + client.stats[0].num_waiting == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["crash", "kill"])
def test_engine_death_reaches_every_open_request_and_spares_the_other_engine(how):
    async def scenario():
        deaths = []
        never = Supervision(max_restarts=0)
        async with running(spec(step_seconds=0.02), spec(step_seconds=0.02), supervision=never) as client:
            client.on_death = lambda engine, error: deaths.append(engine)
            sinks = [Sink() for _ in range(8)]
            for i, sink in enumerate(sinks):
                await client.add([request([i + 1], 100)], [sink])
            if how == "kill":
                os.kill(client.processes[0].child.pid, signal.SIGKILL)
            else:
                # Both engines have equally many requests, so this one goes to engine 0.
                with pytest.raises(EngineDeadError, match="exit code 9"):
                    await client.add([request([PROCESS_DIES], 100)], [Sink()])
            await ended([sinks[i] for i in (0, 2, 4, 6)])
            assert all(isinstance(sinks[i].error, EngineDeadError) for i in (0, 2, 4, 6))
            assert ("SIGKILL" if how == "kill" else "exit code 9") in str(sinks[2].error)
            assert deaths == [0]
            # The rest goes on, and new requests go where somebody lives.
            after = Sink()
            await client.add([request([42])], [after])
            await ended([*(sinks[i] for i in (1, 3, 5, 7)), after])
            assert [len(sinks[i].tokens) for i in (1, 3, 5, 7)] == [100] * 4
            os.kill(client.processes[1].child.pid, signal.SIGKILL)
            await until(lambda: 1 in client.dead, "the other is dead too")
            with pytest.raises(EngineDeadError, match="no engine"):
                await client.add([request([1])], [Sink()])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("refuse", "kind", "words"),
    [
        ("config", ConfigError, "--block-size is 0"),
        ("crash", EngineDeadError, "ZeroDivisionError: a bug in the factory"),
        ("exit", EngineDeadError, "exit code 7"),
    ],
)
def test_a_failed_start_says_why(refuse, kind, words):
    client = ProcessClient([spec(refuse=refuse)])
    lines = []
    client.launch()
    with pytest.raises(kind, match=words):
        client.wait_ready(lines.append)
    assert client.processes[0].child.poll() is not None, "no process is left behind"
    if refuse != "exit":
        assert lines == ["building a fake engine"]


def test_an_interrupt_of_the_terminal_does_not_reach_the_engine():
    async def scenario():
        async with running(spec()) as client:
            child = client.processes[0].child
            assert os.getpgid(child.pid) != os.getpgid(0)
            os.kill(child.pid, signal.SIGINT)
            sink = Sink()
            await client.add([request([5])], [sink])
            await ended([sink])
            assert sink.tokens == expected([5], 5)

    asyncio.run(scenario())


def test_the_engine_ends_when_its_parent_is_killed():
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from foliolm.engine.client import ProcessClient\n"
        "from foliolm.engine.process import EngineSpec\n"
        "client = ProcessClient([EngineSpec('fake_engine:build_from', ({},), {'PYTHONPATH': sys.argv[1]})])\n"
        "client.launch(); client.wait_ready(lambda text: None)\n"
        "print(client.processes[0].child.pid, flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, HERE], stdout=subprocess.PIPE, text=True)
    try:
        engine = int(parent.stdout.readline())
        os.kill(engine, 0)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and _runs(engine):
        time.sleep(0.02)
    assert not _runs(engine)


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # An orphan that has ended stays visible until init reaps it, which in a container may be never.
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")

"""Engines that die, or fall silent, and are started again within bounds."""

import asyncio
import os
import signal

import psutil
import pytest
from fake_engine import expected
from test_process_client import Sink, ended, request, running, spec, until

from foliolm.core.errors import EngineDeadError
from foliolm.engine.supervisor import DrainRate, EngineState, EngineWatch, Supervision


def states(client):
    return [health.state for health in client.health()]


def kill(client, sig=signal.SIGKILL):
    os.kill(client.processes[0].child.pid, sig)


def test_a_dead_engine_is_started_again_and_its_requests_hear_of_it_at_once():
    restarts = []

    async def scenario():
        async with running(spec(step_seconds=0.01), on_restart=restarts.append) as client:
            lost = [Sink() for _ in range(5)]
            for sink in lost:
                await client.add([request([3], 100)], [sink])
            kill(client)
            await ended(lost)
            assert all("SIGKILL" in str(sink.error) for sink in lost)
            assert states(client) == [EngineState.RESTARTING]
            with pytest.raises(EngineDeadError, match="no engine"):
                await client.add([request([1])], [Sink()])
            await until(lambda: states(client) == [EngineState.IDLE], "the engine is back")
            after = Sink()
            await client.add([request([42])], [after])
            await ended([after])
            assert after.tokens == expected([42], 5)
            assert client.health()[0].num_restarts == 1
            assert restarts == [0]

    asyncio.run(scenario())


def test_restarts_are_bounded():
    async def scenario():
        async with running(spec(), supervision=Supervision(max_restarts=2, backoff_s=0.05)) as client:
            for number in (1, 2):
                kill(client)
                await until(lambda n=number: client.health()[0].num_restarts == n, "the engine is back")
            kill(client)
            await until(lambda: states(client) == [EngineState.DEAD], "the engine stays dead")
            await asyncio.sleep(0.3)
            assert states(client) == [EngineState.DEAD]
            assert "SIGKILL" in str(client.health()[0].error)

    asyncio.run(scenario())


def test_a_restart_that_fails_counts_as_a_try():
    async def scenario():
        async with running(spec(), supervision=Supervision(max_restarts=2, backoff_s=0.05)) as client:
            # The fresh process cannot be what the old one was.
            object.__setattr__(client.processes[0].spec, "arguments", ({"refuse": "exit"},))
            kill(client)
            await until(lambda: states(client) == [EngineState.DEAD], "given up")
            assert client.health()[0].num_restarts == 0
            assert "exit code 7" in str(client.health()[0].error)

    asyncio.run(scenario())


def test_a_stuck_engine_is_told_from_a_busy_one_and_killed_in_the_end():
    async def scenario():
        patience = Supervision(stuck_after_s=1.0)
        async with running(spec(step_seconds=0.4), supervision=patience) as client:
            sink = Sink()
            await client.add([request([3], 4)], [sink])
            seen = set()
            while not sink.ended.is_set():
                seen.update(states(client))
                await asyncio.sleep(0.05)
            assert EngineState.BUSY in seen
            assert EngineState.STUCK not in seen, "steps of 0.4 s are no silence"

            kill(client, signal.SIGSTOP)
            await until(lambda: states(client) == [EngineState.STUCK], "it is stuck")
            kill(client, signal.SIGCONT)
            await until(lambda: states(client) == [EngineState.IDLE], "it answers again")
            assert client.health()[0].num_restarts == 0

            kill(client, signal.SIGSTOP)
            waiting = asyncio.ensure_future(client.add([request([7])], [Sink()]))
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(waiting, 30)
            await until(lambda: client.health()[0].num_restarts == 1, "killed and started again")
            await until(lambda: states(client) == [EngineState.IDLE], "it answers")

    asyncio.run(scenario())


def test_ending_while_an_engine_starts_leaves_no_process():
    started = []
    others = {child.pid for child in psutil.Process().children()}  # servers that other tests share

    async def scenario():
        async with running(spec()) as client:
            first = {child.pid for child in psutil.Process().children()} - others
            object.__setattr__(client.processes[0].spec, "arguments", ({"start_seconds": 60},))
            kill(client)
            await until(lambda: states(client) == [EngineState.RESTARTING], "restarting")
            old = client.processes[0]
            await until(lambda: old._context.closed, "the old one was put away")

            def launched():
                return {child.pid for child in psutil.Process().children()} - others - first

            await until(launched, "the new one was launched")
            started.extend(launched())

    asyncio.run(scenario())
    assert started
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_backoff_grows_and_old_tries_are_forgotten(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("foliolm.engine.supervisor.time.monotonic", lambda: now[0])
    watch = EngineWatch(Supervision(max_restarts=4, window_s=100, backoff_s=1))
    assert [watch.next_try() for _ in range(5)] == [0.0, 1.0, 2.0, 4.0, None]
    now[0] += 101
    assert watch.next_try() == 0.0


def test_retry_after_follows_the_rate_at_which_requests_end(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("foliolm.engine.supervisor.time.monotonic", lambda: now[0])
    rate = DrainRate()
    assert rate.seconds_for(10) == 5, "nothing is known yet"
    for _ in range(20):
        now[0] += 0.5
        rate.ended(1)
    assert rate.seconds_for(10) == 5
    assert rate.seconds_for(1) == 1
    assert rate.seconds_for(10_000) == 60
    now[0] += 1000
    assert rate.seconds_for(10) == 5

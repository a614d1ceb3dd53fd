"""Clients of engines: in this process, or each in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import zmq

from foliolm.core.errors import EngineDeadError, FolioError, QueueFullError
from foliolm.core.request import EngineRequest, TokenOutput
from foliolm.engine.engine import Engine, EngineInfo
from foliolm.engine.messages import Abort, Add, Ask, EngineStats, Failure, Ping, StepOutputs, decode_from_engine
from foliolm.engine.process import EngineProcess, EngineSpec
from foliolm.engine.questions import Questions
from foliolm.engine.routing import OutputSink, RequestRouter
from foliolm.engine.supervisor import DrainRate, EngineHealth, EngineState, EngineWatch, Supervision

logger = logging.getLogger("foliolm.client")


class InProcessClient:
    """Engines in this process, stepped by the caller: for the library, tests and the simulator.

    Args:
        engines: at least one.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)
        self.router = RequestRouter(len(self.engines))

    @property
    def info(self) -> EngineInfo:
        """Of the first engine; all are alike."""
        return self.engines[0].info

    @property
    def has_work(self) -> bool:
        """True while any engine has."""
        return any(engine.has_work for engine in self.engines)

    def add(self, requests: Sequence[EngineRequest], sinks: Sequence[OutputSink]) -> tuple[int, ...]:
        """Hand a group of requests (all or none) to one engine; their own ids are replaced by those returned.

        Raises:
            RequestError, QueueFullError: as the scheduler refuses.
        """
        index = self.router.choose(range(len(self.engines)))
        numbered = self.router.numbered(requests)
        self.engines[index].add(numbered)
        for request, sink in zip(numbered, sinks, strict=True):
            self.router.open(request.request_id, sink, index)
        return tuple(request.request_id for request in numbered)

    def abort(self, request_ids: Sequence[int]) -> None:
        """End requests; unknown and ended ones are passed over. Their sinks hear nothing more."""
        for request_id in request_ids:
            index = self.router.close(request_id)
            if index is not None:
                self.engines[index].abort([request_id])
                self.engines[index].take_finished()

    def step(self) -> None:
        """One step of each engine that has work; sinks are called."""
        for engine in self.engines:
            if engine.has_work:
                for output in engine.step():
                    self.router.route(output)
                if engine.finished:
                    engine.take_finished()

    def close(self) -> None:
        """Close the engines."""
        for engine in self.engines:
            engine.close()


class ProcessClient:
    """Engines in processes of their own, used from one asyncio event loop.

    ``launch`` and ``wait_ready`` (blocking) come first, then ``attach`` on the event loop, at the end ``close``. An
    engine whose process ends by itself is started again, as often as ``supervision`` allows.

    Args:
        specs: one an engine.
        on_step: called on the event loop with an engine's index and what a turn of its loop gave.
        on_death: called on the event loop with an engine's index and the reason when its process ends by itself.
        on_restart: called on the event loop with an engine's index when a fresh process takes requests.
        supervision: how patient to be with engines.
    """

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        on_step: Callable[[int, StepOutputs], None] | None = None,
        on_death: Callable[[int, EngineDeadError], None] | None = None,
        on_restart: Callable[[int], None] | None = None,
        supervision: Supervision | None = None,
    ) -> None:
        self.router = RequestRouter(len(specs))
        self.processes = [EngineProcess(spec, index) for index, spec in enumerate(specs)]
        self.stats = [EngineStats() for _ in specs]
        self.on_step = on_step
        self.on_death = on_death
        self.on_restart = on_restart
        self.supervision = supervision or Supervision()
        self.restarting_allowed = True
        self._watches = [EngineWatch(self.supervision) for _ in specs]
        self._rates = [DrainRate() for _ in specs]
        self._tasks: set[asyncio.Task[None]] = set()
        self._dead: dict[int, EngineDeadError] = {}
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._groups: dict[int, int] = {}
        self._questions = Questions()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False

    @property
    def info(self) -> EngineInfo:
        """Of the first engine; all are alike."""
        info = self.processes[0].info
        assert info is not None, "wait_ready() first"
        return info

    @property
    def dead(self) -> dict[int, EngineDeadError]:
        """Engines that take no requests, since their process has ended, and why."""
        return dict(self._dead)

    def health(self) -> list[EngineHealth]:
        """How each engine is; costs nothing, since engines are asked all the time."""
        return [
            EngineHealth(
                state=self._state(index),
                stats=self.stats[index],
                silent_s=watch.silent_s,
                num_restarts=watch.num_restarts,
                error=self._dead.get(index),
            )
            for index, watch in enumerate(self._watches)
        ]

    def _state(self, index: int) -> EngineState:
        watch = self._watches[index]
        if index in self._dead:
            return EngineState.RESTARTING if watch.restarting else EngineState.DEAD
        if watch.stuck:
            return EngineState.STUCK
        stats = self.stats[index]
        return EngineState.BUSY if stats.num_running or stats.num_waiting else EngineState.IDLE

    def launch(self) -> None:
        """Start the engines' processes; returns at once, so that the caller can prepare what it needs meanwhile."""
        for process in self.processes:
            process.launch()

    def wait_ready(self, report: Callable[[str], None]) -> EngineInfo:
        """Wait until all engines are ready, relaying lines about the start-up.

        Raises:
            ConfigError, ModelError, EngineDeadError: an engine did not start; all are closed.
        """
        try:
            for process in self.processes:
                process.wait_ready(report)
        except BaseException:
            self.close()
            raise
        return self.info

    def attach(self) -> None:
        """Begin to take outputs on the running event loop."""
        self._loop = asyncio.get_running_loop()
        for process in self.processes:
            self._attach(process)
        self._begin(self._supervise())

    def _attach(self, process: EngineProcess) -> None:
        assert self._loop is not None
        self._watches[process.index].heard()
        self._loop.add_reader(process.descriptor, self._receive, process)
        threading.Thread(target=self._watch, args=(process,), name="engine watch", daemon=True).start()
        self._receive(process)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        # The event loop itself holds tasks only weakly.
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def add(self, requests: Sequence[EngineRequest], sinks: Sequence[OutputSink]) -> tuple[int, ...]:
        """Hand a group of requests (all or none) to one engine and wait until it takes them.

        A cancelled call leaves nothing behind: the requests are aborted.

        Returns:
            The ids given to them; the requests' own ids are replaced.

        Raises:
            RequestError, QueueFullError: as the scheduler refuses.
            EngineDeadError: no engine is alive, or it died before it answered.
        """
        assert self._loop is not None, "attach() first"
        index = self.router.choose(engine for engine in range(len(self.processes)) if engine not in self._dead)
        numbered = self.router.numbered(requests)
        ids = tuple(request.request_id for request in numbered)
        for request_id, sink in zip(ids, sinks, strict=True):
            self.router.open(request_id, sink, index)
        answer: asyncio.Future[None] = self._loop.create_future()
        self._answers[ids[0]] = answer
        self._groups[ids[0]] = index
        self.processes[index].send(Add(numbered))
        try:
            await answer
        except FolioError:
            for request_id in ids:
                self.router.close(request_id)
            raise
        except asyncio.CancelledError:
            self.abort(ids)
            raise
        finally:
            self._answers.pop(ids[0], None)
            self._groups.pop(ids[0], None)
        return ids

    async def ask_one(self, engine: int, what: str, **arguments: Any) -> dict[str, Any]:
        """Ask one engine; as ``ask``."""
        if engine in self._dead:
            raise self._dead[engine]
        number, future = self._questions.open(engine)
        self.processes[engine].send(Ask(number, what, arguments))
        return await future

    def abort(self, request_ids: Sequence[int]) -> None:
        """End requests; unknown and ended ones are passed over. Their sinks hear nothing more."""
        by_engine: dict[int, list[int]] = {}
        for request_id in request_ids:
            index = self.router.close(request_id)
            if index is not None and index not in self._dead:
                by_engine.setdefault(index, []).append(request_id)
        for index, ids in by_engine.items():
            self.processes[index].send(Abort(tuple(ids)))

    async def ask(self, what: str, **arguments: Any) -> list[tuple[int, dict[str, Any]]]:
        """Ask all engines that live; returns (engine's index, answer) pairs. See ``Engine.ask`` and ``Ask``.

        Raises:
            EngineDeadError: none is alive, or one died before it answered.
            RequestError: an engine refused an order.
        """
        alive = [index for index in range(len(self.processes)) if index not in self._dead]
        if not alive:
            raise EngineDeadError("no engine is alive")
        futures = []
        for index in alive:
            number, future = self._questions.open(index)
            self.processes[index].send(Ask(number, what, arguments))
            futures.append(future)
        return list(zip(alive, await asyncio.gather(*futures), strict=True))

    def close(self) -> None:
        """Stop the engines. Open requests get an EngineDeadError. Idempotent."""
        if self._closing:
            return
        self._closing = True
        for task in list(self._tasks):
            if self._loop is not None and not self._loop.is_closed():
                task.cancel()
        for process in self.processes:
            if self._loop is not None and not self._loop.is_closed() and process.index not in self._dead:
                self._loop.remove_reader(process.descriptor)
            self._fail(process.index, EngineDeadError("the server is shutting down"))
            process.close()

    def _receive(self, process: EngineProcess) -> None:
        # The descriptor is edge-triggered: read until nothing is left, or a message could lie there unseen.
        while not self._closing:
            try:
                frame = process.outbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = decode_from_engine(frame)
            if isinstance(message, StepOutputs):
                self._take(process.index, message)

    def _take(self, index: int, message: StepOutputs) -> None:
        self.stats[index] = message.stats
        self._watches[index].heard()
        self._rates[index].ended(len(message.finished))
        for decision in message.turns:
            sink = self.router.sink(decision.request_id)
            if sink is not None:
                sink.on_decision(decision)
        for first_id in message.accepted:
            answer = self._answers.get(first_id)
            if answer is not None and not answer.done():
                answer.set_result(None)
        for first_id, failure in message.refused:
            answer = self._answers.get(first_id)
            if answer is not None and not answer.done():
                answer.set_exception(self._refusal(index, failure))
        for output in message.outputs():
            self._deliver(output)
        self._questions.take(message.answers)
        if self.on_step is not None:
            self.on_step(index, message)

    def _refusal(self, index: int, failure: Failure) -> FolioError:
        error = failure.error()
        if isinstance(error, QueueFullError):
            error.retry_after_s = self._rates[index].seconds_for(self.stats[index].num_waiting)
        return error

    def _deliver(self, output: TokenOutput) -> None:
        try:
            self.router.route(output)
        except Exception as error:
            # One request's sink must not stop the outputs of everybody else.
            logger.exception("request %d: its output could not be taken", output.request_id)
            sink = self.router.sink(output.request_id)
            self.abort([output.request_id])
            if sink is not None:
                sink.on_error(EngineDeadError(f"the output could not be read: {type(error).__name__}: {error}"))

    def _watch(self, process: EngineProcess) -> None:
        assert process.child is not None
        assert self._loop is not None
        process.child.wait()
        try:
            self._loop.call_soon_threadsafe(self._died, process)
        except RuntimeError:
            return  # the event loop has ended; so has everybody who could care

    def _died(self, process: EngineProcess) -> None:
        if self._closing:
            return
        assert self._loop is not None
        self._receive(process)  # what it still said comes before the news of its death
        self._loop.remove_reader(process.descriptor)
        error = EngineDeadError(f"the engine process ended ({process.exit_words()})")
        logger.error("engine %d: %s", process.index, error)
        self._fail(process.index, error)
        if self.on_death is not None:
            self.on_death(process.index, error)
        self._try_again(process.index)

    async def _supervise(self) -> None:
        """Ask engines whether they live; kill those that owe an answer for hopelessly long."""
        while True:
            await asyncio.sleep(self.supervision.ping_interval_s)
            for process, watch in zip(self.processes, self._watches, strict=True):
                if process.index in self._dead:
                    continue
                # An event loop that itself was held up must not take answers that lie there for silence.
                self._receive(process)
                if watch.hopeless:
                    logger.error("engine %d has not answered for %.1f s; it is killed", process.index, watch.silent_s)
                    process.kill()
                    continue
                process.send(Ping())
                watch.asked()

    def _try_again(self, index: int) -> None:
        watch = self._watches[index]
        delay = watch.next_try() if self.restarting_allowed else None
        watch.restarting = delay is not None
        if delay is not None:
            self._begin(self._restart(index, delay))
        elif self.restarting_allowed:
            logger.error(
                "engine %d is not started again: %d restarts within %.0f s is the limit",
                index,
                self.supervision.max_restarts,
                self.supervision.window_s,
            )

    async def _restart(self, index: int, delay: float) -> None:
        await asyncio.sleep(delay)
        old = self.processes[index]
        fresh = EngineProcess(old.spec, index)
        try:
            await asyncio.to_thread(_replace, old, fresh)
        except asyncio.CancelledError:
            fresh.kill()  # so that the thread, which waits for it, ends too
            raise
        except Exception as error:
            logger.exception("engine %d could not be started again", index)
            self._dead[index] = EngineDeadError(f"the engine could not be started again: {error}")
            self._try_again(index)
            return
        self.processes[index] = fresh
        watch = self._watches[index]
        watch.restarting = False
        watch.num_restarts += 1
        del self._dead[index]
        self._attach(fresh)
        logger.warning("engine %d takes requests again", index)
        if self.on_restart is not None:
            self.on_restart(index)

    def _fail(self, index: int, error: EngineDeadError) -> None:
        self._dead[index] = error
        self.stats[index] = EngineStats()
        for first_id, engine in self._groups.items():
            answer = self._answers[first_id]
            if engine == index and not answer.done():
                answer.set_exception(error)
        self._questions.fail(index, error)
        self.router.fail_engine(index, error)


def _replace(old: EngineProcess, fresh: EngineProcess) -> None:
    """Give back what the old process had, and start the fresh one; blocks until it is ready."""
    old.close()
    try:
        fresh.launch()
        fresh.wait_ready(lambda line: logger.info("engine %d: %s", fresh.index, line))
    except BaseException:
        fresh.close()
        raise

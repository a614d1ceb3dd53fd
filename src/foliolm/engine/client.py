"""Clients of engines: in this process, or each in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

import zmq

from foliolm.core.errors import EngineDeadError, FolioError
from foliolm.core.request import EngineRequest, TokenOutput
from foliolm.engine.engine import Engine, EngineInfo
from foliolm.engine.messages import Abort, Add, EngineStats, StepOutputs, decode_from_engine
from foliolm.engine.process import EngineProcess, EngineSpec
from foliolm.engine.routing import OutputSink, RequestRouter

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
                engine.take_finished()

    def close(self) -> None:
        """Close the engines."""
        for engine in self.engines:
            engine.close()


class ProcessClient:
    """Engines in processes of their own, used from one asyncio event loop.

    ``launch`` and ``wait_ready`` (blocking) come first, then ``attach`` on the event loop, at the end ``close``.

    Args:
        specs: one an engine.
        on_step: called on the event loop with an engine's index and what a turn of its loop gave.
        on_death: called on the event loop with an engine's index and the reason when its process ends by itself.
    """

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        on_step: Callable[[int, StepOutputs], None] | None = None,
        on_death: Callable[[int, EngineDeadError], None] | None = None,
    ) -> None:
        self.router = RequestRouter(len(specs))
        self.processes = [EngineProcess(spec, index) for index, spec in enumerate(specs)]
        self.stats = [EngineStats() for _ in specs]
        self.on_step = on_step
        self.on_death = on_death
        self._dead: dict[int, EngineDeadError] = {}
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._groups: dict[int, int] = {}
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
        """Engines whose process has ended, and why."""
        return dict(self._dead)

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
            self._loop.add_reader(process.descriptor, self._receive, process)
            threading.Thread(target=self._watch, args=(process,), name="engine watch", daemon=True).start()
            self._receive(process)

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

    def abort(self, request_ids: Sequence[int]) -> None:
        """End requests; unknown and ended ones are passed over. Their sinks hear nothing more."""
        by_engine: dict[int, list[int]] = {}
        for request_id in request_ids:
            index = self.router.close(request_id)
            if index is not None and index not in self._dead:
                by_engine.setdefault(index, []).append(request_id)
        for index, ids in by_engine.items():
            self.processes[index].send(Abort(tuple(ids)))

    def close(self) -> None:
        """Stop the engines. Open requests get an EngineDeadError. Idempotent."""
        if self._closing:
            return
        self._closing = True
        for process in self.processes:
            if self._loop is not None and not self._loop.is_closed():
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
        for first_id in message.accepted:
            answer = self._answers.get(first_id)
            if answer is not None and not answer.done():
                answer.set_result(None)
        for first_id, failure in message.refused:
            answer = self._answers.get(first_id)
            if answer is not None and not answer.done():
                answer.set_exception(failure.error())
        for output in message.outputs():
            self._deliver(output)
        if self.on_step is not None:
            self.on_step(index, message)

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
        logger.error("%s", error)
        self._fail(process.index, error)
        if self.on_death is not None:
            self.on_death(process.index, error)

    def _fail(self, index: int, error: EngineDeadError) -> None:
        self._dead[index] = error
        self.stats[index] = EngineStats()
        for first_id, engine in self._groups.items():
            answer = self._answers[first_id]
            if engine == index and not answer.done():
                answer.set_exception(error)
        self.router.fail_engine(index, error)

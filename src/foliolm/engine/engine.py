"""The engine: three calls a step, and a loop that no request can kill."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from foliolm.core.adapter import AdapterHost, AdapterSize
from foliolm.core.errors import QueueFullError, RequestError
from foliolm.core.grammar import Grammars
from foliolm.core.machine import MachineLimits
from foliolm.core.plan import Decision, DecisionKind, StepPlan
from foliolm.core.protocols import Clock, Executor, SteadyExecutor, StepHandle
from foliolm.core.record import RequestRecord, StepRecord
from foliolm.core.request import EngineRequest, FinishReason, TokenOutput
from foliolm.core.result import StepResult
from foliolm.engine.adapters import AdapterBook
from foliolm.ledger.ledger import Load

if TYPE_CHECKING:
    from foliolm.ledger.ledger import Ledger
    from foliolm.scheduler import Scheduler

logger = logging.getLogger("foliolm.engine")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the outside must know of an engine that is ready.

    Attributes:
        model: the model's source, for people.
        max_model_len: most tokens (prompt and output) of one request.
        vocab_size: token ids that a prompt may hold are below this.
        block_size: tokens a KV block.
        num_kv_blocks: KV blocks that requests can use.
        dtype: of weights and activations, for people.
        summary: lines to print at start-up: the memory sum, the resolved settings and why.
        limits: how fast the machine reads and multiplies; None: unknown.
    """

    model: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_kv_blocks: int
    dtype: str = ""
    summary: tuple[str, ...] = ()
    limits: MachineLimits | None = None


@dataclass(frozen=True, slots=True)
class _FailedStep:
    """A step whose submission raised: it fails in its turn, after the steps before it."""

    error: Exception

    def wait(self) -> StepResult:
        raise self.error


class Engine:
    """Composes the scheduler, an executor, a clock and the ledger. One thread only may call it.

    Args:
        scheduler: decides what runs.
        executor: runs it.
        clock: the only clock; nanoseconds.
        ledger: keeps the books.
        info: what clients are told.
        depth: steps that may be in flight while the next is planned; 0 where the host computes.
        grammars: compiles what answers must follow; None: requests with a grammar are refused.
        adapters: LoRA adapters in host memory, at most ``max_cpu_loras``; None: none can be loaded.
        max_cpu_loras: see ``EngineConfig``.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        ledger: Ledger,
        info: EngineInfo,
        depth: int = 0,
        grammars: Grammars | None = None,
        adapters: AdapterHost | None = None,
        max_cpu_loras: int = 1,
    ) -> None:
        self.grammars = grammars
        self.adapters: AdapterBook | None = None
        self._host = adapters
        self._retiring: set[int] = set()
        self._drops: deque[tuple[int, int]] = deque()
        if adapters is not None:
            # Asked anew each time: a scheduler that starts afresh counts afresh.
            self.adapters = AdapterBook(adapters, max_cpu_loras, lambda load_id: scheduler.adapters.num_live(load_id))
            self.adapters.on_size = ledger.add_adapter
            self.adapters.on_drop = self._drop
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.ledger = ledger
        self.info = info
        self.depth = depth
        self._steady = executor if isinstance(executor, SteadyExecutor) else None
        self.in_flight: deque[tuple[StepPlan, StepHandle]] = deque()
        self.last_record: StepRecord | None = None
        self.turns: tuple[Decision, ...] = ()  # admissions and preemptions that the last step() planned
        self.finished: list[RequestRecord] = []

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs, or a step is in flight."""
        return bool(self.in_flight) or self.scheduler.has_work

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Take a group of requests, all of them or none.

        Grammars are compiled and adapters read here, unless ``prepare`` did it before in another thread.

        Raises:
            RequestError: one of them can never be served.
            QueueFullError: they do not all fit in the queue, or their adapters in host memory.
        """
        self.prepare(requests)
        if self.adapters is not None and (load_ids := adapters_of(requests)):
            self.adapters.check(load_ids)
            if not self.adapters.has_room(load_ids):
                raise QueueFullError(
                    f"the {self.adapters.max_held} adapters in host memory (--max-cpu-loras) are all in use"
                )
            self.adapters.take(load_ids)
        now = self.clock.now()
        taken: list[EngineRequest] = []
        try:
            for request in requests:
                self.scheduler.add(request, now)
                taken.append(request)
        except Exception:
            for request in taken:
                self.scheduler.abort(request.request_id, now)
            raise
        for request in taken:
            self.ledger.open(request, now)

    def prepare(self, requests: Sequence[EngineRequest]) -> None:
        """Compile what the requests' answers must follow, and read their adapters; any thread may call it.

        Raises:
            RequestError: a grammar is wrong, or too large; an adapter is not known, or its files are wrong now.
        """
        if self.adapters is not None:
            self.adapters.fetch(adapters_of(requests))
        for request in requests:
            spec = request.sampling.grammar
            if spec is not None:
                if self.grammars is None:
                    raise RequestError(f"{spec.field} is given, but this engine compiles no grammars", spec.field)
                self.grammars.prepare(spec)

    def abort(self, request_ids: Sequence[int]) -> list[TokenOutput]:
        """End requests now, whatever their state; ids that are unknown or have ended are passed over."""
        now = self.clock.now()
        outputs = [self.scheduler.abort(rid, now) for rid in self.scheduler.together(request_ids)]
        return self._booked([output for output in outputs if output is not None], now)

    def step(self) -> list[TokenOutput]:
        """Plan a step, submit it, and commit the oldest step in flight once more than ``depth`` are.

        Never raises for what a step raised: the requests of that step end with ``finish_reason`` error.
        """
        self.last_record = None
        self.turns = ()
        try:
            plan = self.scheduler.schedule(self.clock.now())
        except Exception as error:
            now = self.clock.now()
            return self._booked(self._fail_all(error, now), now)
        if plan.decisions:
            self.turns = tuple(one for one in plan.decisions if one.kind in (DecisionKind.ADMIT, DecisionKind.PREEMPT))
        if plan.num_rows:
            self.in_flight.append((plan, self._submit(plan)))
            if len(self.in_flight) <= self.depth:
                return []
        if not self.in_flight:
            return []
        plan, handle = self.in_flight.popleft()
        return self._commit(plan, handle)

    def leap(self, until_ns: int | None) -> tuple[int, list[int], list[int], int] | None:
        """Take the coming steps at once, where they only decode and nobody reads them one by one.

        Only in virtual time. Everything is as after so many calls of ``step``, but for step records.

        Args:
            until_ns: no step is planned at or after this.

        Returns:
            Rows in each step, nanoseconds of each, KV blocks in use after each, and nanoseconds of them all; None: the
            next step must be taken by ``step``. Requests may have ended in the last of them.
        """
        executor = self._steady
        if len(self.scheduler.adapters):
            return None  # what their adapters add is counted step by step
        if self.depth or executor is None or not executor.knows_steady:
            return None
        scheduler = self.scheduler
        if not self.ledger.takes_leaps or (most := scheduler.like_steps()) < 1:
            return None
        rows, context = scheduler.steady()
        times = executor.steady(rows, context, scheduler.longest_context, most, until_ns)
        now, busy_ns = self.clock.now(), sum(times)
        used, outputs = scheduler.leap(len(times), now)
        self.ledger.leap(rows, len(times), busy_ns)
        self._booked(outputs, now)
        return rows, times, used, busy_ns

    def take_finished(self) -> list[RequestRecord]:
        """Records of the requests that ended since the last call."""
        finished, self.finished = self.finished, []
        return finished

    def is_prepared(self, requests: Sequence[EngineRequest]) -> bool:
        """Whether ``prepare`` would have nothing to do that takes long."""
        if any(request.sampling.grammar is not None for request in requests):
            return False
        return self.has_adapters(requests)

    def has_adapters(self, requests: Sequence[EngineRequest]) -> bool:
        """Whether the requests' adapters need not be read."""
        return self.adapters is None or all(self.adapters.is_ready(load_id) for load_id in adapters_of(requests))

    def has_room(self, requests: Sequence[EngineRequest]) -> bool:
        """Whether the requests' adapters can be in host memory beside those in use."""
        return self.adapters is None or self.adapters.has_room(adapters_of(requests))

    def read_adapter(self, load_id: int, name: str, path: str) -> AdapterSize:
        """Read an adapter's files, for ``load_adapter``; any thread may call it.

        Raises:
            RequestError: the files are wrong, or this engine serves no adapters; nothing has changed.
        """
        if self.adapters is None:
            raise RequestError("this engine serves no adapters; start it with --enable-lora", "lora_name")
        return self.adapters.read(load_id, name, path)

    def load_adapter(self, load_id: int, path: str, size: AdapterSize) -> None:
        """Requests may use an adapter from now on, once ``read_adapter`` has read it."""
        assert self.adapters is not None
        self.adapters.register(load_id, path, size)

    def unload_adapter(self, load_id: int) -> int:
        """New requests do not find an adapter; its memory is given back when the last that uses it has ended.

        Returns:
            How many still use it.
        """
        if self.adapters is None or not self.adapters.hide(load_id):
            return 0
        self._retiring.add(load_id)
        self._retire()
        return self.scheduler.adapters.num_live(load_id)

    def _retire(self) -> None:
        assert self.adapters is not None
        for load_id in [each for each in self._retiring if not self.scheduler.adapters.num_live(each)]:
            self._retiring.discard(load_id)
            self.scheduler.adapters.forget(load_id)
            self.adapters.forget(load_id)
            self.ledger.adapters.pop(load_id, None)

    def _drop(self, load_id: int) -> None:
        # A step in flight may be about to copy it into a slot, for a request that was aborted.
        assert self._host is not None
        if self.in_flight:
            self._drops.append((self.in_flight[-1][0].step_id, load_id))
        else:
            self._host.drop(load_id)

    def _drop_behind(self, step_id: int) -> None:
        assert self._host is not None
        assert self.adapters is not None
        while self._drops and self._drops[0][0] <= step_id:
            load_id = self._drops.popleft()[1]
            if load_id not in self.adapters.held:  # nor has it come back meanwhile
                self._host.drop(load_id)

    def ask(self, what: str) -> dict[str, Any]:
        """Answer a question about the engine as a whole, or carry out an order to it.

        Args:
            what: ``reset_prefix_cache`` (answer: ``blocks``, how many kept a prefix), or ``kv`` (who holds the memory).

        Raises:
            ValueError: an unknown question.
        """
        if what == "reset_prefix_cache":
            return {"blocks": self.scheduler.reset_prefix_cache()}
        if what == "kv":
            return self.scheduler.kv_report()
        raise ValueError(f"an engine is asked {what!r}, which it does not know")

    def check_invariants(self) -> list[str]:
        """What is wrong with the scheduler's and the KV manager's books; empty when all is well. Reports only."""
        return list(self.scheduler.problems())

    def close(self) -> None:
        """Wait for the steps in flight, drop their results, and give back the executor's memory."""
        while self.in_flight:
            _, handle = self.in_flight.popleft()
            try:
                handle.wait()
            except Exception:
                logger.exception("a step in flight failed while the engine was closing")
        self.executor.close()
        self.ledger.close()

    def _submit(self, plan: StepPlan) -> StepHandle:
        try:
            return self.executor.submit(plan)
        except Exception as error:
            return _FailedStep(error)

    def _commit(self, plan: StepPlan, handle: StepHandle) -> list[TokenOutput]:
        try:
            result = handle.wait()
            now = self.clock.now()
            self.last_record = self.ledger.record(plan, result, now, self._load())
            outputs = self.scheduler.commit(plan, result, now)
        except Exception as error:
            logger.exception("step %d failed; its %d requests end with an error", plan.step_id, plan.num_rows)
            now = self.clock.now()
            self.ledger.record_failure(plan, now)
            try:
                outputs = self.scheduler.fail(plan, _sentence(error), now)
            except Exception as second:
                outputs = self._fail_all(second, now)
        if self._drops:
            self._drop_behind(plan.step_id)
        return self._booked(outputs, now)

    def _load(self) -> Load:
        return Load(*self.scheduler.load())

    def _fail_all(self, error: Exception, now: int) -> list[TokenOutput]:
        # The scheduler itself failed, so nothing says whose fault it is: every open request ends, and the loop lives.
        logger.error("the scheduler failed; every open request ends with an error", exc_info=error)
        self.ledger.record_failure(None, now)
        outputs = []
        for request_id in self.ledger.open_request_ids:
            try:
                self.scheduler.abort(request_id, now)
            except Exception:
                logger.exception("request %d could not be released", request_id)
            outputs.append(TokenOutput(request_id, finish_reason=FinishReason.ERROR, error=_sentence(error)))
        return outputs

    def _booked(self, outputs: list[TokenOutput], now: int) -> list[TokenOutput]:
        if self._retiring:
            self._retire()
        flying = self.in_flight[0][0] if self.in_flight else None
        for index, output in enumerate(outputs):
            record = self.ledger.note(output, now, flying)
            if record is not None:
                self.finished.append(record)
                if record.timeline is not None:
                    outputs[index] = replace(output, timeline=record.timeline)
        return outputs


def adapters_of(requests: Sequence[EngineRequest]) -> tuple[int, ...]:
    """Load ids of the requests' adapters, each once."""
    return tuple({request.adapter: None for request in requests if request.adapter is not None})


def _sentence(error: Exception) -> str:
    return f"the engine failed in a step: {type(error).__name__}: {error}"

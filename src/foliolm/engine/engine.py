"""The engine: three calls a step, and a loop that no request can kill."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from foliolm.core.errors import RequestError
from foliolm.core.grammar import Grammars
from foliolm.core.plan import Decision, DecisionKind, StepPlan
from foliolm.core.protocols import Clock, Executor, SteadyExecutor, StepHandle
from foliolm.core.record import RequestRecord, StepRecord
from foliolm.core.request import EngineRequest, FinishReason, TokenOutput
from foliolm.core.result import StepResult
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
    """

    model: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_kv_blocks: int
    dtype: str = ""
    summary: tuple[str, ...] = ()


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
    ) -> None:
        self.grammars = grammars
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

        Grammars are compiled here, unless ``prepare`` did it before in another thread.

        Raises:
            RequestError: one of them can never be served.
            QueueFullError: they do not all fit in the queue.
        """
        self.prepare(requests)
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
        """Compile what the requests' answers must follow; the one method that any thread may call.

        Raises:
            RequestError: a grammar is wrong, or too large.
        """
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
        flying = self.in_flight[0][0] if self.in_flight else None
        for index, output in enumerate(outputs):
            record = self.ledger.note(output, now, flying)
            if record is not None:
                self.finished.append(record)
                if record.timeline is not None:
                    outputs[index] = replace(output, timeline=record.timeline)
        return outputs


def _sentence(error: Exception) -> str:
    return f"the engine failed in a step: {type(error).__name__}: {error}"

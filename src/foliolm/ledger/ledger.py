"""The ledger: what each step and each request cost, kept in bounded memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from foliolm.core.plan import StepPlan
from foliolm.core.record import RequestRecord, StepRecord
from foliolm.core.request import EngineRequest, FinishReason, RequestStamps, TokenOutput
from foliolm.core.result import StepResult

DEFAULT_CAPACITY = 4096


@dataclass(slots=True)
class LedgerTotals:
    """Sums over the engine's whole life; they only rise.

    Attributes:
        num_steps, num_failed_steps: steps that ran to their end, and steps that raised.
        num_tokens: tokens computed, recomputed ones included.
        num_sampled: tokens sampled.
        step_seconds: measured seconds of all steps.
    """

    num_steps: int = 0
    num_failed_steps: int = 0
    num_tokens: int = 0
    num_sampled: int = 0
    step_seconds: float = 0.0


@dataclass(slots=True)
class _Open:
    """What the ledger must remember of a request until it ends."""

    request: EngineRequest
    num_output_tokens: int = 0


class Ledger:
    """Keeps the newest steps and the newest ended requests, and totals of all.

    Args:
        engine: which engine of the client's list this is; part of every record's key.
        capacity: how many step records and how many request records are kept.
    """

    def __init__(self, engine: int = 0, capacity: int = DEFAULT_CAPACITY) -> None:
        self.engine = engine
        self.steps: deque[StepRecord] = deque(maxlen=capacity)
        self.requests: deque[RequestRecord] = deque(maxlen=capacity)
        self.totals = LedgerTotals()
        self._open: dict[int, _Open] = {}

    def record(self, plan: StepPlan, result: StepResult) -> StepRecord:
        """Book a step that ran."""
        num_tokens, num_sampled = plan.num_tokens, plan.num_sampled
        record = StepRecord(
            engine=self.engine,
            step_id=plan.step_id,
            time_ns=plan.time_ns,
            num_rows=plan.num_rows,
            num_decodes=len(plan.decodes),
            num_tokens=num_tokens,
            num_sampled=num_sampled,
            context_tokens=plan.decodes.context_tokens + sum(row.context for row in plan.rows),
            seconds=result.seconds,
            closed=plan.closed,
            decisions=plan.decisions,
        )
        self.steps.append(record)
        self.totals.num_steps += 1
        self.totals.num_tokens += num_tokens
        self.totals.num_sampled += num_sampled
        self.totals.step_seconds += result.seconds.total
        return record

    def record_failure(self, plan: StepPlan | None) -> None:
        """Book a step that raised; ``plan`` is None where planning itself did."""
        self.totals.num_failed_steps += 1

    def open(self, request: EngineRequest) -> None:
        """A request entered the engine."""
        self._open[request.request_id] = _Open(request)

    def note(self, output: TokenOutput) -> RequestRecord | None:
        """Book what a request was given; returns its record if this was its last output."""
        entry = self._open.get(output.request_id)
        if entry is None:
            return None
        entry.num_output_tokens += len(output.token_ids)
        if output.finish_reason is None:
            return None
        del self._open[output.request_id]
        record = RequestRecord(
            engine=self.engine,
            request_id=output.request_id,
            label=entry.request.label,
            num_prompt_tokens=len(entry.request.prompt_token_ids),
            num_output_tokens=entry.num_output_tokens,
            finish_reason=FinishReason(output.finish_reason),
            stamps=output.stamps or RequestStamps(arrival_ns=entry.request.arrival_ns),
        )
        self.requests.append(record)
        return record

    @property
    def open_request_ids(self) -> tuple[int, ...]:
        """Requests that entered and have not ended, oldest first."""
        return tuple(self._open)

"""What the ledger keeps of a step and of a request; plain data that crosses processes."""

from __future__ import annotations

from dataclasses import dataclass

from foliolm.core.plan import Closed, Decision
from foliolm.core.request import FinishReason, RequestStamps
from foliolm.core.result import StepSeconds


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step that ran, in counts and seconds.

    Attributes:
        engine: which engine of the client's list.
        step_id, time_ns: of the plan.
        num_rows, num_decodes: rows in all, and how many of them were steady decodes.
        num_tokens: new tokens computed, before padding.
        num_sampled: tokens that were sampled.
        context_tokens: tokens computed before this step, summed over all rows.
        seconds: measured, by part.
        closed: why no more work went in.
        decisions: with their reasons.
    """

    engine: int
    step_id: int
    time_ns: int
    num_rows: int
    num_decodes: int
    num_tokens: int
    num_sampled: int
    context_tokens: int
    seconds: StepSeconds
    closed: Closed
    decisions: tuple[Decision, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that ended.

    Attributes:
        engine: which engine of the client's list.
        request_id, label: the engine's number and the user's name.
        num_prompt_tokens, num_output_tokens: counts.
        finish_reason: why it ended.
        stamps: monotonic nanoseconds at the turns of its life.
    """

    engine: int
    request_id: int
    label: str
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason
    stamps: RequestStamps

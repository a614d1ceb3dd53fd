"""What LoRA adapters took of a run's steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foliolm.core.record import TERMS, StepRecord


@dataclass(frozen=True, slots=True)
class AdapterAccount:
    """What LoRA adapters took.

    Attributes:
        steps: that had a row of one.
        adapters: different ones over the run.
        per_step: mean number of different ones in those steps.
        rows_per_adapter: mean rows of an adapter in a step that had one.
        read_bytes, flops: each adapter of a step once; what its rows added.
        seconds, share: predicted seconds, and their share of all steps' predicted time.
        kv_bytes: KV that the same steps' decodes read, to hold against ``read_bytes``.
        loads: copies into slots.
        passed_over: times that a request was passed over for want of a slot.
    """

    steps: int
    adapters: int
    per_step: float
    rows_per_adapter: float
    read_bytes: float
    flops: float
    seconds: float
    share: float
    kv_bytes: float
    loads: int
    passed_over: int


def lora_account(steps: Sequence[StepRecord]) -> AdapterAccount | None:
    """What adapters took of a run's steps."""
    adapted = [step for step in steps if step.adapters]
    if not adapted:
        return None
    at = TERMS.index("lora")
    seconds = sum(step.terms[at] for step in adapted if step.terms)
    predicted = sum(step.predicted_s for step in steps)
    uses = sum(len(step.adapters) for step in adapted)
    waits = ("adapter_slots", "adapter_drain")
    return AdapterAccount(
        steps=len(adapted),
        adapters=len({rows.load_id for step in adapted for rows in step.adapters}),
        per_step=uses / len(adapted),
        rows_per_adapter=sum(rows.rows for step in adapted for rows in step.adapters) / uses,
        read_bytes=sum(step.work.lora_bytes for step in adapted),
        flops=sum(step.work.lora_flops for step in adapted),
        seconds=seconds,
        share=seconds / predicted if predicted else 0.0,
        kv_bytes=sum(step.work.kv_bytes for step in adapted),
        loads=sum(step.adapter_loads for step in steps),
        passed_over=sum(1 for step in steps for one in step.decisions if one.reason in waits),
    )

"""What it would save to let requests whose adapter runs already go first: the recorded arrivals run again both ways."""

from __future__ import annotations

from dataclasses import dataclass

from foliolm.ledger.adapter_account import lora_account
from foliolm.ledger.run_metrics import run_metrics
from foliolm.simulate.advice import GOALS, relative
from foliolm.simulate.counterfactual import Recorded, changed, rerun_records


@dataclass(frozen=True, slots=True)
class Grouping:
    """Both ways, in virtual time.

    Attributes:
        per_step: mean number of different adapters in a step with one, in order of arrival and grouped by cost.
        seconds: predicted seconds of adapters in all steps, the same.
        saved_share: of all steps' predicted time.
        effect: relative change of each metric of ``advice.GOALS``.
    """

    per_step: tuple[float, float]
    seconds: tuple[float, float]
    saved_share: float
    effect: dict[str, float]


def grouping(run: Recorded) -> Grouping | None:
    """What ``--lora-grouping cost`` would save over ``arrival``; None where no request has an adapter."""
    if all(arrival.request.adapter is None for arrival in run.arrivals):
        return None
    both = [rerun_records(run, changed(run.settings, lora_grouping=way)) for way in ("arrival", "cost")]
    accounts = [lora_account(steps) for steps, _ in both]
    before, after = accounts
    if before is None or after is None:
        return None
    whole = sum(step.predicted_s for step in both[0][0])
    effect = relative(*(run_metrics(steps, requests) for steps, requests in both))
    return Grouping(
        (before.per_step, after.per_step),
        (before.seconds, after.seconds),
        (before.seconds - after.seconds) / whole if whole else 0.0,
        {name: effect[name] for name in GOALS},
    )

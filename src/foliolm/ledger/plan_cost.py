"""The step cost of a scheduler's plan: its rows counted, then priced."""

from __future__ import annotations

import math
from collections.abc import Mapping

from foliolm.core.adapter import AdapterRows, AdapterSize
from foliolm.core.errors import ConfigError
from foliolm.core.plan import LogitsAt, StepPlan
from foliolm.core.valueclass import valueclass
from foliolm.ledger.accounts import ModelAccount
from foliolm.ledger.step_cost import StepCost, StepCounts, clamped_contexts


@valueclass
class Slowdown:
    """By how much steps take longer in all than typical ones, which a step cost is fitted to: machines interrupt some.

    Attributes:
        decode: factor of steps of decodes alone.
        prompt: factor of steps with chunks of prompts.
    """

    decode: float = 1.0
    prompt: float = 1.0

    def __post_init__(self) -> None:
        for name in ("decode", "prompt"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"slowdown {name} is {value}; it must be finite and above 0")


class PlanCost:
    """A `CostModel`: the step cost of a scheduler's plan; a `SteadyCost` where no layer is windowed.

    Args:
        cost: the step cost.
        adapters: sizes of LoRA adapters by load id.
        slowdown: what steps take on average, against the step cost.
    """

    def __init__(
        self,
        cost: StepCost,
        adapters: Mapping[int, AdapterSize] | None = None,
        slowdown: Slowdown | None = None,
    ) -> None:
        self.cost = cost
        self.adapters = adapters or {}
        self.slowdown = slowdown or Slowdown()
        self.knows_steady = not any(spec.window for spec in cost.model.kv)
        self._without_context: dict[int, float] = {}
        self._per_token = cost.decode_seconds_per_token() * self.slowdown.decode if self.knows_steady else 0.0

    def seconds(self, plan: StepPlan) -> float:
        """Predicted seconds of the whole step."""
        decodes = plan.decodes
        count = len(decodes.request_ids)
        alone = not plan.rows and not plan.swapped and not plan.adapters
        if self.knows_steady and count and alone and plan.padded_tokens == count:
            return self.steady_seconds(count, decodes.context_tokens, 0)
        counts = counts_of_plan(self.cost.model, plan, self.adapters)
        return self.cost.seconds(counts) * (self.slowdown.prompt if counts.prefills else self.slowdown.decode)

    def steady_seconds(self, num_decodes: int, context: int, longest: int) -> float:
        """Predicted seconds of a step of decodes alone: all but their attention depends on their number only."""
        fixed, each = self.steady_line(num_decodes)
        return fixed + context * each

    def steady_line(self, num_decodes: int) -> tuple[float, float]:
        """See `SteadyCost`."""
        known = self._without_context.get(num_decodes)
        if known is None:
            no_context = (0.0,) * len(self.cost.model.kv)
            counts = StepCounts(num_decodes, num_decodes, num_decodes, no_context)
            known = self._without_context[num_decodes] = self.cost.seconds(counts) * self.slowdown.decode
        return known, self._per_token


def lora_work(rows: tuple[AdapterRows, ...], adapters: Mapping[int, AdapterSize]) -> tuple[float, float]:
    """Bytes of a step's distinct adapters, each read once, and FLOPs of its adapted rows: two a value and token."""
    num_bytes = flops = 0.0
    for each in rows:
        size = adapters.get(each.load_id)
        if size is not None:
            num_bytes += size.num_bytes
            flops += 2.0 * (size.body_params * each.tokens + size.head_params * each.sampled)
    return num_bytes, flops


def counts_of_plan(
    model: ModelAccount, plan: StepPlan, adapters: Mapping[int, AdapterSize] | None = None
) -> StepCounts:
    """Count a plan's rows. A row of one new token counts as a decode, wherever it stands.

    The steady decodes cost nothing to count where no layer is windowed: their summed context comes with the plan.

    Args:
        model: the account.
        plan: the step.
        adapters: sizes of LoRA adapters by load id.
    """
    lora_bytes, lora_flops = lora_work(plan.adapters, adapters or {}) if plan.adapters else (0.0, 0.0)
    single = [row.context for row in plan.rows if row.num_new_tokens == 1]
    chunks = tuple((row.num_new_tokens, row.context) for row in plan.rows if row.num_new_tokens > 1)
    context = [float(plan.decodes.context_tokens + sum(single))] * len(model.kv)
    if any(spec.window for spec in model.kv):
        rows = [offset + plan.decodes.tick for offset in plan.decodes.offsets]
        context = list(clamped_contexts(model, rows + single))
    return StepCounts(
        new_tokens=max(plan.padded_tokens, plan.num_tokens),
        sampled=len(plan.decodes)
        + sum(
            (row.num_new_tokens if row.logits & LogitsAt.ALL else 1) + len(row.forks) for row in plan.rows if row.logits
        ),
        sequences=plan.num_rows,
        decode_context=tuple(context),
        prefills=chunks,
        lora_bytes=lora_bytes,
        lora_flops=lora_flops,
        swap_bytes=sum(note.num_bytes for note in plan.swapped),
        swap_blocks=sum(note.blocks_out + note.blocks_in for note in plan.swapped),
    )

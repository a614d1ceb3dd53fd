"""A virtual engine whose steps cost round numbers, and a naive twin of the timelines."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from foliolm.core.plan import StepPlan
from foliolm.core.resolve import SchedulerConfig
from foliolm.engine.engine import Engine, EngineInfo
from foliolm.executor.cost import CostExecutor
from foliolm.kv import KVManager
from foliolm.ledger.accounts import account
from foliolm.ledger.ledger import Ledger
from foliolm.ledger.plan_cost import PlanCost
from foliolm.ledger.step_cost import Coefficients, StepCost
from foliolm.scheduler import Scheduler
from foliolm.shape.presets import model_preset
from foliolm.simulate.clock import VirtualClock

MS = 1_000_000


def round_cost(**coefficients: float) -> StepCost:
    """1 ms a step, 1 ms a row, 1 ms a new token; weights and attention cost nothing."""
    model = account(model_preset("qwen3-8b").shape)
    settings = {"step_s": 1e-3, "layer_s": 0.0, "sequence_s": 1e-3, "token_s": 1e-3, "prefix_reads": 0.0}
    return StepCost(model, 1e30, 1e30, 1e30, coefficients=Coefficients(**{**settings, **coefficients}))


def real_cost(name: str = "qwen3-8b") -> StepCost:
    """A model on a device that is slow enough for every term to show."""
    return StepCost(account(model_preset(name).shape), 1e12, 1e14, 1e14)


def virtual_engine(cost: StepCost, depth: int = 0, host_s: float = 0.0, **settings) -> tuple[Engine, VirtualClock]:
    settings.setdefault("num_blocks", 33)
    settings.setdefault("block_size", 4)
    settings.setdefault("max_num_seqs", 8)
    settings.setdefault("max_num_batched_tokens", 64)
    settings.setdefault("max_model_len", 64)
    settings.setdefault("long_prefill_token_threshold", 1 << 30)
    settings.setdefault("short_prompt_share", 0.0)
    config = SchedulerConfig(**settings)
    clock = VirtualClock()
    scheduler = Scheduler(config, KVManager(cost.model.kv, config.num_blocks, config.block_size))
    info = EngineInfo("virtual", config.max_model_len, 1000, config.block_size, config.num_blocks - 1)
    executor = CostExecutor(PlanCost(cost), clock, host_s)
    return Engine(scheduler, executor, clock, Ledger(cost=cost), info, depth), clock


class NaiveBooks:
    """Splits each step row by row, by the step cost itself: an oracle, not a design."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.parts: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def seconds(self, rows: list[tuple[int, int, bool]]) -> float:
        """Of a step of rows (new, context, sampled)."""
        counts = self.cost.counts(
            [context for new, context, _ in rows if new == 1],
            [(new, context) for new, context, _ in rows if new > 1],
        )
        return self.cost.seconds(replace(counts, sampled=sum(sampled for *_, sampled in rows)))

    def book(self, plan: StepPlan, time_ns: int) -> None:
        rows = list(plan.all_rows())
        decoding = set(plan.decodes.request_ids)
        cells = {row.request_id: (row.num_new_tokens, row.context, bool(row.logits)) for row in rows}
        whole = self.seconds(list(cells.values()))
        for rid, cell in cells.items():
            alone = self.seconds([cell])
            prompts = [other for other in cells if other not in decoding and other != rid]
            decodes = [other for other in decoding if other != rid]
            no_prompts = self.seconds([cells[other] for other in cells if other not in prompts])
            no_decodes = self.seconds([cells[other] for other in cells if other not in decodes])
            a, b = max(0.0, whole - no_prompts), max(0.0, whole - no_decodes)
            own = min(time_ns, time_ns * alone / whole) if len(cells) > 1 else time_ns
            mine = self.parts[rid]
            mine["own_decode" if rid in decoding else "own_prefill"] += own
            if a + b:
                mine["others_prefill"] += (time_ns - own) * a / (a + b)
                mine["others_decode"] += (time_ns - own) * b / (a + b)

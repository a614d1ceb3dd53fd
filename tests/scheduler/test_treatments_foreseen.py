"""What the treatments are predicted to cost, against what they turn out to cost: both tried, on virtual devices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from foliolm.assemble import Books, build_virtual_engine
from foliolm.core.plan import DecisionKind
from foliolm.core.request import EngineRequest
from foliolm.core.resolve import SchedulerConfig
from foliolm.core.sampling import SamplingParams
from foliolm.ledger.accounts import account
from foliolm.ledger.host_link import HostLink
from foliolm.ledger.step_cost import Coefficients, StepCost
from foliolm.shape.presets import model_preset
from foliolm.simulate.clock import VirtualClock
from foliolm.simulate.run import Arrival, run_arrivals

BLOCK = 16


def device(prefill_rate: float, link_gbps: float) -> StepCost:
    model = account(model_preset("qwen3-8b").shape)
    flops = prefill_rate * model.body_bytes / Coefficients().matmul
    link = HostLink(link_gbps * 1e9, copies_per_block=1)
    return StepCost(model, bandwidth=60e6 * prefill_rate, flops=flops, attention_peak=flops, host_link=link)


def both_ways_and_auto(cost: StepCost, length: int, common: int, budget: int):
    """Four streams outgrow the pool while the last one's prompt is being computed, or after it.

    Returns the seconds in which all is done and the treatments chosen, by mode.
    """
    shared = tuple(range(common))
    prompts = [shared + tuple(10**6 + i for i in range(64))]
    prompts += [tuple(10**6 * k + i for i in range(512)) for k in range(2, 5)]
    prompts += [shared + tuple(10**7 + i for i in range(length - common))]
    outputs = (110, 130, 140, 150, 40)
    blocks = sum(-(-len(prompt) // BLOCK) for prompt in prompts) - common // BLOCK + 8
    settings = SchedulerConfig(
        max_model_len=length + 4096,
        block_size=BLOCK,
        num_blocks=blocks + 1,
        max_num_batched_tokens=budget,
        max_num_seqs=16,
        long_prefill_token_threshold=1 << 30,
        short_prompt_share=0.0,
        enable_prefix_caching=common > 0,
        num_host_blocks=4 * blocks,
        preemption_victim="last",
    )
    seconds, chosen = {}, {}
    for mode in ("swap", "recompute", "auto"):
        clock = VirtualClock()
        engine = build_virtual_engine(replace(settings, preemption_mode=mode), Books(cost), clock)
        reasons: Counter[str] = Counter()
        engine.ledger.on_step.append(
            lambda step, reasons=reasons: reasons.update(
                d.reason for d in step.decisions if d.kind is DecisionKind.PREEMPT
            )
        )
        arrivals = [
            Arrival(0, EngineRequest(rid, prompt, SamplingParams(max_tokens=output, ignore_eos=True), arrival_ns=0))
            for rid, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), 1)
        ]
        run = run_arrivals(engine, clock, arrivals)
        seconds[mode], chosen[mode] = (run.end_ns - run.start_ns) / 1e9, reasons
    return seconds, chosen


@pytest.mark.parametrize(
    ("rate", "link", "length", "common", "budget", "better"),
    [
        # Its prompt is done, nothing is cached: the link decides.
        (8000, 64, 1024, 0, 2048, "swap"),
        (50_000, 4, 1024, 0, 8192, "recompute"),
        # Half way through its prompt, what it shares stays: room for the others is what it held and had not filled, and
        # the chunk that brings it back would have read its context anyway.
        (500, 4, 6000, 3008, 96, "recompute"),
        (2000, 64, 6000, 3008, 96, "recompute"),
        # The same with its own part short: the streams grow into that before one of them ends.
        (500, 16, 6000, 5008, 64, "swap"),
        # Half way, nothing shared, and no cache to give anything back.
        (2000, 64, 6000, 0, 160, "swap"),
    ],
)
def test_auto_takes_what_ends_sooner(rate, link, length, common, budget, better):
    seconds, chosen = both_ways_and_auto(device(rate, link), length, common, budget)
    other = {"swap": "recompute", "recompute": "swap"}[better]
    assert chosen[better] == Counter({better: sum(chosen[better].values())}) and chosen[better]
    assert seconds[better] < seconds[other]
    assert set(chosen["auto"]) == {better}
    assert seconds["auto"] <= seconds[better] * 1.001

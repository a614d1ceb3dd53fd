"""What planning and committing a step costs: 256 running requests of 2,048 tokens over 40,960 blocks of 16.

    python benchmarks/scheduler.py [--requests 256] [--context 2048] [--blocks 40960] [--steps 2000] [--json]

The scheduler and KV manager are the product's own; the executor's answer is made up outside the timed part. Two steps
are timed: the steady one, where requests only decode and cross blocks, and a churning one, where in each step some
requests end and others are admitted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from foliolm.core.kvspec import KVSpec
from foliolm.core.plan import LogitsAt, StepPlan
from foliolm.core.request import EngineRequest
from foliolm.core.resolve import SchedulerConfig
from foliolm.core.result import StepResult, StepSeconds
from foliolm.core.sampling import SamplingParams
from foliolm.kv import KVManager
from foliolm.scheduler import Scheduler


def made_up(plan: StepPlan) -> StepResult:
    tokens = [[7]] * len(plan.decodes.request_ids)
    tokens = tokens + [[7] if row.logits & LogitsAt.LAST else [] for row in plan.rows]
    return StepResult(plan.step_id, tokens, StepSeconds(0.0))


def run(requests: int, context: int, blocks: int, steps: int, output: int) -> list[float]:
    """Milliseconds of schedule + commit, by step, once all requests run at about ``context`` tokens."""
    config = SchedulerConfig(
        max_model_len=context * 4,
        block_size=16,
        num_blocks=blocks + 1,
        max_num_batched_tokens=8192,
        max_num_seqs=requests,
        long_prefill_token_threshold=4096,
        watermark_blocks=blocks // 100,
    )
    scheduler = Scheduler(config, KVManager([KVSpec("all", 36, 147456)], config.num_blocks, config.block_size))
    prompt = tuple(range(context))
    next_id = 0

    def add() -> None:
        nonlocal next_id
        next_id += 1
        # Ends are spread, so that a churning run loses a few requests every step and never all at once.
        length = output + next_id % output
        scheduler.add(EngineRequest(next_id, prompt, SamplingParams(max_tokens=length), (2,), next_id), 0)

    for _ in range(requests):
        add()
    while scheduler.stats().num_waiting or scheduler.stats().decode_context_tokens < requests * context:
        plan = scheduler.schedule(0)
        scheduler.commit(plan, made_up(plan), 0)
        while scheduler.stats().num_running + scheduler.stats().num_waiting < requests:
            add()
    times = []
    for step in range(steps):
        start = time.perf_counter()
        plan = scheduler.schedule(step)
        planned = time.perf_counter()
        result = made_up(plan)
        resumed = time.perf_counter()
        scheduler.commit(plan, result, step)
        times.append((time.perf_counter() - resumed + planned - start) * 1e3)
        while scheduler.stats().num_running + scheduler.stats().num_waiting < requests:
            add()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--context", type=int, default=2048, help="prompt tokens")
    parser.add_argument("--blocks", type=int, default=40960, help="KV blocks of 16 tokens")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    args = parser.parse_args()
    report = {"requests": args.requests, "context": args.context, "blocks": args.blocks, "steps": args.steps}
    for kind, output in (("", 1 << 13), ("churn_", 256)):
        times = run(args.requests, args.context, args.blocks, args.steps, min(output, args.context * 3))
        report[f"{kind}median_ms"] = round(statistics.median(times), 4)
        report[f"{kind}p99_ms"] = round(statistics.quantiles(times, n=100)[98], 4)
    if args.json:
        print(json.dumps(report))
    else:
        for key, value in report.items():
            print(f"{key:>16}: {value}")


if __name__ == "__main__":
    main()

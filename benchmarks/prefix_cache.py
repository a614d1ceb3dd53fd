"""What the prefix cache saves, and what its books cost.

    python benchmarks/prefix_cache.py [--repeats 1] [--blocks 100000] [--steps 300] [--books-only] [--json]

Saved: ``shared16`` (16 requests of 1,024 common and 32 own tokens that arrive together, 32 tokens out) on the embedded
model, with the cache and without it, alternating; each repeat is a fresh draw. Printed are the prompt tokens that were
computed and the seconds.

Cost: the scheduler with so many blocks of 16 tokens cached, 64 streams running, and in each step one more prompt of
2,048 tokens of which 1,024 are found; its blocks are published, as many old ones are evicted. Milliseconds of planning
and committing such a step, with the cache and without it, and their difference as a share of the mean step of shared16.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any

from scheduler import made_up
from workloads import workload

from foliolm.core.kvspec import KVSpec
from foliolm.core.request import EngineRequest
from foliolm.core.resolve import SchedulerConfig
from foliolm.core.sampling import SamplingParams
from foliolm.kv import KVManager
from foliolm.scheduler import Scheduler

STREAMS, PROMPT, FOUND, BLOCK = 64, 2048, 1024, 16


def saved(repeats: int) -> dict[str, Any]:
    """shared16 with and without the cache."""
    from foliolm import LLM

    engines = {name: LLM("smollm2-135m", enable_prefix_caching=on) for name, on in (("cached", True), ("plain", False))}
    computed: dict[str, list[int]] = {name: [] for name in engines}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    steps: list[float] = []
    for repeat in range(repeats + 1):
        work = workload("shared16", repeat)
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in work]
        for name, llm in engines.items():
            records: list[Any] = []
            llm.engine.ledger.on_step.append(records.append)
            start = time.perf_counter()
            llm.generate([prompt for prompt, _ in work], params)
            wall = time.perf_counter() - start
            llm.engine.ledger.on_step.remove(records.append)
            if repeat:  # the first warms up
                seconds[name].append(wall)
                computed[name].append(sum(record.num_tokens - record.num_decodes for record in records))
                if name == "cached":
                    steps += [record.seconds.total for record in records]
                print(f"{name}: {computed[name][-1]} prompt tokens computed, {wall:.2f} s", file=sys.stderr)
    plain, cached = statistics.median(seconds["plain"]), statistics.median(seconds["cached"])
    return {
        "prompt_tokens": sum(len(prompt) for prompt, _ in workload("shared16")),
        "computed_tokens_plain": max(computed["plain"]),
        "computed_tokens_cached": max(computed["cached"]),
        "seconds_plain": round(plain, 3),
        "seconds_cached": round(cached, 3),
        "times_as_fast": round(plain / cached, 2),
        "mean_step_ms": round(1e3 * statistics.fmean(steps), 3),
    }


def books(blocks: int, steps: int, caching: bool) -> tuple[float, int]:
    """Median milliseconds of planning and committing a step with one admission, and the blocks cached before."""
    room = blocks + (STREAMS + 4) * (PROMPT + 4 * steps) // BLOCK
    config = SchedulerConfig(
        max_model_len=1 << 16,
        block_size=BLOCK,
        num_blocks=room + 1,
        max_num_batched_tokens=8192,
        max_num_seqs=STREAMS + 2,
        long_prefill_token_threshold=8192,
        enable_prefix_caching=caching,
    )
    scheduler = Scheduler(config, KVManager([KVSpec("all", 30, 46080)], config.num_blocks, BLOCK))
    rng = random.Random(0)
    trunks = [tuple(rng.randrange(40000) for _ in range(FOUND)) for _ in range(16)]
    next_id = 0

    def add(output: int, trunk: tuple[int, ...] = ()) -> None:
        nonlocal next_id
        next_id += 1
        own = tuple(rng.randrange(40000) for _ in range(PROMPT - len(trunk)))
        scheduler.add(EngineRequest(next_id, trunk + own, SamplingParams(max_tokens=output), arrival_ns=next_id), 0)

    def step() -> float:
        start = time.perf_counter()
        plan = scheduler.schedule(0)
        planned = time.perf_counter()
        result = made_up(plan)
        resumed = time.perf_counter()
        scheduler.commit(plan, result, 0)
        return (time.perf_counter() - resumed + planned - start) * 1e3

    for trunk in trunks:
        add(1, trunk)
    while scheduler.has_work:
        step()
    while caching and scheduler.stats().kv_blocks_idle < blocks:
        add(1)
        step()
    cached = scheduler.stats().kv_blocks_idle
    for _ in range(STREAMS):
        add(steps + 100)
    while scheduler.stats().num_waiting:
        step()
    times = []
    for _ in range(steps):
        add(1, rng.choice(trunks))
        times.append(step())
    return statistics.median(times), cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=100_000, help="cached blocks")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--books-only", action="store_true", help="no model: the books alone")
    parser.add_argument(
        "--step-ms", type=float, default=12.0, help="of --books-only: the step that they are a share of"
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    args = parser.parse_args()
    report = {"mean_step_ms": args.step_ms} if args.books_only else saved(args.repeats)
    with_cache, cached = books(args.blocks, args.steps, True)
    without, _ = books(args.blocks, args.steps, False)
    report |= {
        "cached_blocks": cached,
        "books_ms_cached": round(with_cache, 3),
        "books_ms_plain": round(without, 3),
        "bookkeeping_ms_100k" if args.blocks == 100_000 else "bookkeeping_ms": round(with_cache - without, 3),
        "cache_share_of_step": round((with_cache - without) / report["mean_step_ms"], 4),
    }
    if args.json:
        print(json.dumps(report))
    else:
        for key, value in report.items():
            print(f"{key:>24}: {value}")


if __name__ == "__main__":
    main()

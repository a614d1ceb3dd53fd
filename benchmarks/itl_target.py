"""A long prompt arrives among streams, with and without --itl-target-ms.

    python benchmarks/itl_target.py [--streams 8] [--prompt 4000] [--factor 2.5] [--json]

The target is --factor times the measured decode-only step. Reported: the share of the streams' gaps during the prefill
that stay under 1.25 times the target (as their 95% quantile over the target), and the prompt's TTFT with the target
over that with the default budget.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics

from recorded_work import Job, engine_for, serve


def one_run(engine, args: argparse.Namespace, seed: int) -> tuple[list[float], float, float]:
    """Gaps of the streams during the prefill, the prompt's TTFT, and the median decode-only step."""
    records: list = []
    engine.ledger.on_step.append(records.append)
    jobs = [Job(0.0, 64, args.output) for _ in range(args.streams)] + [Job(args.at, args.prompt, 4)]
    tokens = serve(engine, jobs, seed)
    engine.ledger.on_step.remove(records.append)
    late = len(jobs)
    first = next(at for request, at in tokens if request == late)
    gaps = []
    for stream in range(1, late):
        times = [at for request, at in tokens if request == stream]
        gaps += [b - a for a, b in itertools.pairwise(times) if b > args.at and a < first]
    plain = [record.seconds.total for record in records if record.kind == "decode" and record.num_decodes == late - 1]
    return gaps, first - args.at, statistics.median(plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--output", type=int, default=320, help="tokens a stream; enough to outlast the prefill")
    parser.add_argument("--at", type=float, default=2.0, help="second at which the prompt arrives")
    parser.add_argument("--factor", type=float, default=2.5)
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    args = parser.parse_args()
    settings = {"max_model_len": 4608, "max_num_seqs": 16, "enable_prefix_caching": False}
    engine = engine_for(args.model, **settings)
    gaps, ttft_default, step = one_run(engine, args, 1)
    budget = engine.scheduler.config.max_num_batched_tokens
    engine.close()
    target = args.factor * step
    engine = engine_for(args.model, **settings, itl_target_ms=target * 1e3)
    held, ttft, _ = one_run(engine, args, 2)
    engine.close()
    report = {
        "decode_step_ms": round(step * 1e3, 2),
        "target_ms": round(target * 1e3, 2),
        "default_budget": budget,
        "gap_p95_over_target": round(statistics.quantiles(held, n=20)[18] / target, 3),
        "default_gap_p95_over_target": round(statistics.quantiles(gaps, n=20)[18] / target, 3),
        "share_under_1.25_target": round(sum(gap < 1.25 * target for gap in held) / len(held), 4),
        "ttft_s": round(ttft, 3),
        "ttft_default_s": round(ttft_default, 3),
        "ttft_ratio": round(ttft / ttft_default, 3),
    }
    print(json.dumps(report) if args.json else "\n".join(f"{key}: {value}" for key, value in report.items()))


if __name__ == "__main__":
    main()

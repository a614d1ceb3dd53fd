"""A long prompt lands among running streams: what each way of batching makes of it, on the real engine.

    python benchmarks/batching.py [--streams 8] [--prompt 1024] [--repeats 3] [--json]

Eight streams decode; once each has some tokens a 1,024-token prompt arrives. Reported for each way of batching, as
medians over alternating repeats: output tokens/s of the whole, the long prompt's TTFT (queue and prefill), and
percentiles of the gaps between the streams' tokens from the moment the prompt arrives.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field

from foliolm.assemble import build_engine
from foliolm.core.config import EngineConfig
from foliolm.core.request import EngineRequest
from foliolm.core.sampling import SamplingParams

MODES = {
    "static": {"batching": "static"},
    "prefill-first": {"prefill_policy": "first"},
    "mixed": {"enable_chunked_prefill": False},
    "chunked": {},
}


@dataclass
class Run:
    """What one run of one mode showed; seconds."""

    tokens_per_s: float
    ttft: float
    gaps: list[float] = field(default_factory=list)


def one_run(engine, args: argparse.Namespace, seed: int) -> Run:
    rng = random.Random(seed)
    base = seed * 1000

    def request(index: int, prompt: int, output: int) -> EngineRequest:
        tokens = tuple(rng.randrange(100, 40000) for _ in range(prompt))
        sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        return EngineRequest(base + index, tokens, sampling, arrival_ns=time.monotonic_ns())

    streams = [request(index, 64, args.output) for index in range(1, args.streams + 1)]
    times: dict[int, list[float]] = {stream.request_id: [] for stream in streams}
    start = time.perf_counter()
    engine.add(streams)
    arrival = 0.0
    long_id = base + 999
    times[long_id] = []
    while engine.has_work or not arrival:
        if not arrival and all(len(times[stream.request_id]) >= args.before for stream in streams):
            arrival = time.perf_counter()
            engine.add([request(999, args.prompt, args.long_output)])
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            assert output.error is None, output.error
            times[output.request_id] += [now] * len(output.token_ids)
    total = sum(len(stamps) for stamps in times.values())
    gaps = [
        later - earlier
        for stream in streams
        for earlier, later in zip(times[stream.request_id], times[stream.request_id][1:], strict=False)
        if later > arrival
    ]
    return Run(total / (time.perf_counter() - start), times[long_id][0] - arrival, gaps)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt that lands")
    parser.add_argument("--output", type=int, default=96, help="tokens a stream")
    parser.add_argument("--long-output", type=int, default=16, help="tokens that the long prompt's answer has")
    parser.add_argument("--before", type=int, default=16, help="tokens that each stream has when it lands")
    parser.add_argument("--chunk", type=int, default=256, help="token budget of a step, under chunked")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    args = parser.parse_args()

    engines = {}
    for mode, flags in MODES.items():
        budget = {"max_num_batched_tokens": args.chunk} if mode == "chunked" else {}
        config = EngineConfig(model=args.model, max_model_len=2048, max_num_seqs=64, **budget, **flags)
        engines[mode] = build_engine(config, report=lambda line: print(line, file=sys.stderr))
    runs: dict[str, list[Run]] = {mode: [] for mode in MODES}
    for repeat in range(args.repeats):
        for mode, engine in engines.items():
            runs[mode].append(one_run(engine, args, repeat + 1))
            print(f"repeat {repeat + 1}: {mode} done", file=sys.stderr)

    report = {}
    for mode, done in runs.items():
        report[mode] = {
            "output_tokens_per_s": round(statistics.median(run.tokens_per_s for run in done), 1),
            "ttft_s": round(statistics.median(run.ttft for run in done), 3),
            **{
                f"gap_{name}_s": round(statistics.median(percentile(run.gaps, share) for run in done), 4)
                for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
            },
        }
    if args.json:
        print(json.dumps({"streams": args.streams, "prompt": args.prompt, "chunk": args.chunk, **report}))
        return
    keys = list(report["chunked"])
    print(f"{'':>14} " + " ".join(f"{key:>20}" for key in keys))
    for mode, row in report.items():
        print(f"{mode:>14} " + " ".join(f"{row[key]:>20}" for key in keys))


if __name__ == "__main__":
    main()

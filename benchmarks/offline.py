"""Offline throughput on a workload, and beside it one-at-a-time transformers in the same run.

    python benchmarks/offline.py --workload b16 [--round N] [--compare transformers] [--json] [engine flags]

Loading and warm-up are not timed. Without flags the embedded model runs at the server's defaults. With --compare the
same work is done by transformers' ``generate`` in bfloat16 (or float32), one request at a time on the same threads,
alternating with the engine over --repeats; the ratio of the medians is printed. One at a time, times add up: with
--compare-requests K it does every (n/K)-th request only, and its seconds are scaled up by output tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from workloads import NAMES, Workload, report, workload

WARM_UP: Workload = [(list(range(200, 300)), 16)]


def foliolm_runner(args: argparse.Namespace):
    from foliolm import LLM, SamplingParams

    flags = {
        name: getattr(args, name) for name in ("dtype", "max_num_batched_tokens", "block_size") if getattr(args, name)
    }
    llm = LLM(args.model, **flags)

    def run(work: Workload) -> float:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in work]
        start = time.perf_counter()
        outputs = llm.generate([prompt for prompt, _ in work], params)
        wall = time.perf_counter() - start
        assert [len(output.outputs[0].token_ids) for output in outputs] == [n for _, n in work]
        return wall

    run(WARM_UP)
    return run


def transformers_runner(args: argparse.Namespace, dtype: str):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from foliolm.weights.store import pull

    # Dense weights: transformers' own GGUF loading keeps them packed, which is slower in bfloat16.
    files = pull(args.model)
    config = AutoConfig.from_pretrained(files.source.parent, gguf_file=files.source.name)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    missing, unexpected = model.load_state_dict(dict(files.iter_tensors()), strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    model.tie_weights()

    @torch.inference_mode()
    def run(work: Workload) -> float:
        some = work[:: max(1, len(work) // args.compare_requests)] if args.compare_requests else work
        scale = sum(n for _, n in work) / sum(n for _, n in some)
        start = time.perf_counter()
        for prompt, n in some:
            ids = torch.tensor([prompt])
            generated = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=n, max_new_tokens=n
            )
            assert generated.shape[1] == len(prompt) + n
        return (time.perf_counter() - start) * scale

    run(WARM_UP)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=NAMES, required=True)
    parser.add_argument("--round", type=int, default=0, help="another draw of the same kind of work")
    parser.add_argument("--repeats", type=int, default=1, help="alternating runs; medians are printed")
    parser.add_argument("--compare", choices=("transformers", "transformers-float32"))
    parser.add_argument("--compare-requests", type=int, help="requests that the compared engine does; unset: all")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype")
    parser.add_argument("--max-num-batched-tokens", type=int, help="tokens a step")
    parser.add_argument("--block-size", type=int, help="tokens a KV block")
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    args = parser.parse_args()

    runners = {"foliolm": foliolm_runner(args)}
    if args.compare:
        dtype = "float32" if args.compare.endswith("float32") else "bfloat16"
        runners[f"transformers generate ({dtype})"] = transformers_runner(args, dtype)
    work = workload(args.workload, args.round)
    walls: dict[str, list[float]] = {engine: [] for engine in runners}
    for repeat in range(args.repeats):
        for engine, run in runners.items():
            walls[engine].append(run(work))
            print(f"run {repeat + 1}/{args.repeats}: {engine}: {walls[engine][-1]:.2f} s", file=sys.stderr)

    medians = {engine: statistics.median(times) for engine, times in walls.items()}
    for engine, wall in medians.items():
        line = report(engine, args.workload, work, wall)
        if engine == "foliolm" and args.compare:
            line["ratio_to_transformers"] = round(list(medians.values())[1] / wall, 2)
        print(json.dumps(line) if args.json else "  ".join(f"{key}={value}" for key, value in line.items()), flush=True)


if __name__ == "__main__":
    main()

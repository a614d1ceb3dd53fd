"""How near the machine's limits steps run: decodes of one sequence against the read bandwidth, a long prompt against
the rate of products; limits and steps are measured in alternation, in one process.

    python benchmarks/bandwidth.py [--model smollm2-135m] [--rounds 6] [--json]
    python benchmarks/bandwidth.py --preset Qwen/Qwen3-0.6B --quantization int8 [--json]
    python benchmarks/bandwidth.py --preset Qwen/Qwen3-0.6B --dtype bfloat16 [--json]

--preset makes up weights for a model's sizes (--load-format dummy). The limits are measured through the native kernels,
with the steps' threads: passes over 128 MiB after every few decode steps, with two streams a thread and with four
(the faster way is the limit, as in the ledger); products in the weights' format, on a matrix that the caches hold,
before and after every prompt. A step's bytes and operations are those of the ledger. `native` is time inside the
model's calls, `wall` all of a step with its planning and committing. A round's share is the median step's rate over the
round's median limit; the medians over the rounds are printed, and the limits' best beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from foliolm.assemble import build_engine
from foliolm.core.config import EngineConfig
from foliolm.core.record import StepRecord
from foliolm.core.request import EngineRequest
from foliolm.core.sampling import SamplingParams
from foliolm.engine.engine import Engine
from foliolm.engine.threads import bound_spinning
from foliolm.model.native import NativeModel
from foliolm.ops.native.rates import STREAMS, ProductProbe, ReadProbe
from foliolm.shape.presets import model_preset

STEPS_A_PASS = 4
"""Decode steps between two passes over memory."""
PRODUCTS = 24
"""Products before a prompt, and as many after it."""


@dataclass
class Timed:
    """A step and its seconds by the clock."""

    record: StepRecord
    wall: float


def config_of_preset(name: str, folder: Path) -> Path:
    """A model folder with nothing but the config of a preset."""
    shape = model_preset(name).shape
    config = {
        "model_type": shape.family,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Runner:
    """Steps of one engine, one request at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._requests = 0

    def begin(self, prompt: int, output: int) -> None:
        """A request of made-up tokens, like no other's."""
        self._requests += 1
        vocabulary = self._engine.info.vocab_size
        tokens = tuple((7 * at + 131 * self._requests) % (vocabulary - 200) + 100 for at in range(prompt))
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        self._engine.add([EngineRequest(self._requests, tokens, params)])

    def step(self) -> Timed | None:
        """The next step; None once the request has ended."""
        if not self._engine.has_work:
            self._engine.take_finished()
            return None
        began = time.perf_counter()
        self._engine.step()
        record = self._engine.last_record
        assert record is not None
        return Timed(record, time.perf_counter() - began)


def shares(steps: list[Timed], limit: float, what: str) -> tuple[float, float]:
    """The median step's rate over a limit, inside the model's calls and by the clock."""
    amounts = [getattr(one.record, what) for one in steps]
    native = statistics.median(amount / one.record.compute_s for amount, one in zip(amounts, steps, strict=True))
    wall = statistics.median(amount / one.wall for amount, one in zip(amounts, steps, strict=True))
    return native / limit, wall / limit


def decode_round(
    runner: Runner, probe: ReadProbe, context: int, steps: int
) -> tuple[list[Timed], dict[int, list[float]]]:
    """Steps, and the rates of reading by the number of streams."""
    runner.begin(context, steps + 1)
    timed, rates = [], {streams: [probe.rate(streams)] for streams in STREAMS}
    while (one := runner.step()) is not None:
        if one.record.kind != "decode":
            continue
        timed.append(one)
        if len(timed) % STEPS_A_PASS == 0:
            for streams, measured in rates.items():
                measured.append(probe.rate(streams))
    return timed, rates


def prefill_round(runner: Runner, probe: ProductProbe, prompt: int) -> tuple[list[Timed], list[float]]:
    rates = [probe.rate() for _ in range(PRODUCTS)]
    runner.begin(prompt, 1)
    timed = []
    while (one := runner.step()) is not None:
        timed.append(one)
    assert len(timed) == 1, "the prompt is one step"
    return timed, rates + [probe.rate() for _ in range(PRODUCTS)]


def measure(engine: Engine, model: NativeModel, args: argparse.Namespace) -> dict[str, object]:
    threads, runner = torch.get_num_threads(), Runner(engine)
    read_probe = ReadProbe(model.library, threads)
    product_probe = ProductProbe(model.library, model.body_format, threads)
    decode_round(runner, read_probe, args.context, 8)
    median = statistics.median
    reads: dict[int, list[float]] = {streams: [] for streams in STREAMS}
    products, decodes, prompts = [], [], []
    native, wall, prompt_native, prompt_wall = [], [], [], []
    for number in range(args.rounds):
        timed, read = decode_round(runner, read_probe, args.context, args.steps)
        decodes += timed
        for streams, measured in read.items():
            reads[streams] += measured
        share = shares(timed, max(map(median, read.values())), "read_bytes")
        native.append(share[0])
        wall.append(share[1])
        timed, rates = prefill_round(runner, product_probe, args.prompt)
        share = shares(timed, median(rates), "flops")
        products, prompts = products + rates, prompts + timed
        prompt_native.append(share[0])
        prompt_wall.append(share[1])
        print(
            f"round {number + 1}/{args.rounds}: decode {native[-1]:.0%} of the read bandwidth ({wall[-1]:.0%} by the "
            f"clock), prompt {prompt_native[-1]:.0%} of the products' rate",
            file=sys.stderr,
        )
    decode_ms = median(one.record.compute_s for one in decodes) * 1e3
    return {
        "model": args.preset or args.model,
        "weights": model.weights_name,
        "kv": str(model.kv_dtype).removeprefix("torch."),
        "kernels": model.library.name,
        "threads": threads,
        "rounds": args.rounds,
        "context": args.context,
        "prompt": args.prompt,
        "read_gb_s": round(max(map(median, reads.values())) / 1e9, 2),
        "read_gb_s_best": round(max(map(max, reads.values())) / 1e9, 2),
        "read_gb_s_by_streams": {streams: round(median(rates) / 1e9, 2) for streams, rates in reads.items()},
        "decode_mb": round(median(one.record.read_bytes for one in decodes) / 1e6, 1),
        "decode_native_ms": round(decode_ms, 2),
        "decode_prepare_ms": round(median(one.record.seconds.prepare for one in decodes) * 1e3, 2),
        "decode_sample_ms": round(median(one.record.seconds.sample for one in decodes) * 1e3, 2),
        "decode_wall_ms": round(median(one.wall for one in decodes) * 1e3, 2),
        "decode_native_share": round(median(native), 3),
        "decode_wall_share": round(median(wall), 3),
        "product_gflop_s": round(median(products) / 1e9, 1),
        "product_gflop_s_best": round(max(products) / 1e9, 1),
        "prefill_gflop": round(prompts[0].record.flops / 1e9, 1),
        "prefill_native_ms": round(median(one.record.compute_s for one in prompts) * 1e3, 1),
        "prefill_native_share": round(median(prompt_native), 3),
        "prefill_wall_share": round(median(prompt_wall), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--preset", help="made-up weights for the sizes of this preset instead")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--context", type=int, default=100, help="tokens before the first decode step")
    parser.add_argument("--steps", type=int, default=32, help="decode steps a round")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt, one step")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    args = parser.parse_args()
    bound_spinning()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model if args.preset is None else str(config_of_preset(args.preset, Path(folder)))
        config = EngineConfig(
            model=model,
            load_format="auto" if args.preset is None else "dummy",
            dtype=args.dtype,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            num_threads=args.threads,
            max_model_len=max(args.prompt, args.context + args.steps) + 16,
            max_num_batched_tokens=args.prompt,
            max_num_seqs=4,
            num_gpu_blocks_override=2 * (args.prompt + args.context + args.steps + 64) // 16,
            enable_prefix_caching=False,
            self_calibration=False,
        )
        engine = build_engine(config, report=lambda line: print(line, file=sys.stderr))
    try:
        held = engine.executor.model
        if not isinstance(held, NativeModel):
            sys.exit("bandwidth.py measures the limits through the native kernels; they do not run here")
        found = measure(engine, held, args)
    finally:
        engine.close()
    print(json.dumps(found) if args.json else "\n".join(f"{key}: {value}" for key, value in found.items()))


if __name__ == "__main__":
    main()

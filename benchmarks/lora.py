"""What adapters cost: throughput over one and eight of them, a hundred under a Zipf workload, loads and unloads under
load; and that logits are those of PEFT's merged models.

    python benchmarks/lora.py --json
    python benchmarks/lora.py --part speed --rounds 5

The embedded model on the fastest kernels of this CPU; adapters are random, made in a temporary folder.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from foliolm import LLM, SamplingParams
from foliolm.core.request import EngineRequest, TokenOutput
from foliolm.shape.lora import LORA_MODULES, module_shape
from foliolm.shape.model import ModelShape

PARTS = ("speed", "zipf", "churn", "logits")
REQUESTS, PROMPT, OUTPUT = 16, 32, 128
LIMITS: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 32, "seed": 0}


def write_adapter(folder: Path, shape: ModelShape, targets: Sequence[str], rank: int, seed: int) -> Path:
    """A random adapter as PEFT writes it; it changes answers, and what it holds does not matter to the time."""
    from safetensors.numpy import save_file

    generator = np.random.default_rng(seed)
    tensors = {}
    for layer in range(shape.num_layers):
        for module in targets:
            n, k = module_shape(shape, module)
            block = "self_attn" if module in LORA_MODULES[:4] else "mlp"
            name = f"base_model.model.model.layers.{layer}.{block}.{module}"
            tensors[f"{name}.lora_A.weight"] = generator.normal(0, k**-0.5, (rank, k)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = generator.normal(0, 0.2, (n, rank)).astype(np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Bench:
    """An engine in this process, and requests to it by prompt and adapter."""

    def __init__(self, llm: LLM, say: Any) -> None:
        self.llm, self.engine, self.say = llm, llm.engine, say
        self.shape = llm.engine.executor.model.shape  # type: ignore[attr-defined]
        self._ids = iter(range(1, 1 << 40))
        self._loads = iter(range(1, 1 << 40))

    def load(self, folder: Path) -> tuple[int, int]:
        """(load id, bytes) of an adapter."""
        load_id = next(self._loads)
        size = self.engine.read_adapter(load_id, folder.name, str(folder))
        self.engine.load_adapter(load_id, str(folder), size)
        return load_id, size.num_bytes

    def add(self, prompt: Sequence[int], adapter: int | None, output: int, logprobs: int | None = None) -> int:
        """Hand in a greedy request; returns its id."""
        request_id = next(self._ids)
        sampling = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True, logprobs=logprobs)
        source = EngineRequest(request_id, tuple(prompt), sampling, (), time.monotonic_ns(), adapter=adapter)
        self.engine.add([source])
        return request_id

    def run(self) -> dict[int, list[TokenOutput]]:
        """Step until nobody lives; what each request was given."""
        given: dict[int, list[TokenOutput]] = {}
        while self.engine.has_work:
            for output in self.engine.step():
                given.setdefault(output.request_id, []).append(output)
            self.engine.take_finished()
        return given


def prompts(count: int, length: int, seed: int = 1) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1000, 40000) for _ in range(length)] for _ in range(count)]


@contextmanager
def bench(say: Any, **settings: Any) -> Iterator[Bench]:
    with LLM("smollm2-135m", enable_lora=True, enable_prefix_caching=False, **{**LIMITS, **settings}) as llm:
        yield Bench(llm, say)


def speed(home: Path, rounds: int, rank: int, say: Any) -> dict[str, Any]:
    """Output tokens a second of 16 requests on the bare model, over one adapter and over eight, in turns."""
    with bench(say, max_loras=8, max_lora_rank=rank) as one:
        folders = [write_adapter(home / f"s{i}", one.shape, ("q_proj", "v_proj"), rank, i) for i in range(8)]
        loads = [one.load(folder)[0] for folder in folders]
        ways = {"bare": [None], "one_adapter": loads[:1], "eight_adapters": loads}
        rates: dict[str, list[float]] = {way: [] for way in ways}
        asked = prompts(REQUESTS, PROMPT)
        for turn in range(rounds + 1):
            for way, adapters in list(ways.items())[:: 1 if turn % 2 else -1]:  # what goes first goes last in the next
                began = time.perf_counter()
                for index, prompt in enumerate(asked):
                    one.add(prompt, adapters[index % len(adapters)], OUTPUT)
                one.run()
                rate = REQUESTS * OUTPUT / (time.perf_counter() - began)
                say(f"{way}: {rate:.1f} output tokens/s{'' if turn else ' (warm-up)'}")
                if turn:
                    rates[way].append(rate)
        kernels = "native" if one.llm.engine.executor.model.native else "torch"  # type: ignore[attr-defined]
    medians = {way: statistics.median(values) for way, values in rates.items()}
    pairs = zip(rates["bare"], rates["one_adapter"], rates["eight_adapters"], strict=True)
    ratios = [(a / bare, b / bare) for bare, a, b in pairs]
    return {
        "kernels": kernels,
        "rank": rank,
        "output_tokens_per_s": {way: round(value, 1) for way, value in medians.items()},
        "one_adapter_ratio": round(statistics.median(ratio[0] for ratio in ratios), 3),
        "eight_adapter_ratio": round(statistics.median(ratio[1] for ratio in ratios), 3),
    }


def resident_bytes() -> int:
    """Memory of this process, once the allocator has given back what it does not need."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def zipf(home: Path, requests: int, exponent: float, say: Any) -> dict[str, Any]:
    """A hundred adapters, sixteen slots: nobody starves, and memory is what the sum says."""
    count, slots = 100, 16
    with bench(say, max_loras=slots, max_cpu_loras=count, max_num_seqs=32) as one:
        folders = [
            write_adapter(home / f"z{i}", one.shape, ("q_proj", "k_proj", "v_proj", "o_proj"), 16, i)
            for i in range(count)
        ]
        warm = one.load(folders[0])[0]  # what is made once (threads, buffers) is there before memory is looked at
        one.add(prompts(1, 8)[0], warm, 4)
        one.run()
        one.engine.unload_adapter(warm)
        one.add(prompts(1, 8)[0], None, 4)
        one.run()
        before = resident_bytes()
        loaded = [one.load(folder) for folder in folders]
        for load_id, _ in loaded[:slots]:
            one.add(prompts(1, 8)[0], load_id, 4)
        one.run()
        growth = resident_bytes() - before
        resident = len(one.engine.scheduler.adapters.resident)
        predicted = (len(one.engine.adapters.held) + resident) * loaded[0][1]  # type: ignore[union-attr]
        say(f"memory grew by {growth / 2**20:.1f} MiB; {count} + {resident} adapters are {predicted / 2**20:.1f} MiB")
        draw = random.Random(3)
        weights = [1 / (rank + 1) ** exponent for rank in range(count)]
        chosen = draw.choices([load_id for load_id, _ in loaded], weights, k=requests)
        began = time.perf_counter()
        asked = [
            one.add(prompt, load_id, draw.randrange(8, 33))
            for prompt, load_id in zip(prompts(requests, 24, seed=5), chosen, strict=True)
        ]
        given = one.run()
        seconds = time.perf_counter() - began
        ends = [given[request_id][-1] for request_id in asked]
        waits = [(end.stamps.admitted_ns - end.stamps.queued_ns) / 1e9 for end in ends if end.stamps is not None]
        stats = one.engine.scheduler.stats()
        say(f"{requests} requests over {len(set(chosen))} adapters in {seconds:.1f} s, longest wait {max(waits):.1f} s")
        return {
            "registered": count,
            "resident": resident,
            "adapter_bytes": loaded[0][1],
            "memory_growth_bytes": growth,
            "memory_predicted_bytes": predicted,
            "memory_ratio": round(growth / predicted, 4),
            "requests": requests,
            "distinct_adapters": len(set(chosen)),
            "answered": sum(str(end.finish_reason) == "length" for end in ends),
            "errors": sum(end.error is not None for end in ends),
            "seconds": round(seconds, 2),
            "longest_wait_s": round(max(waits), 2),
            "median_wait_s": round(statistics.median(waits), 2),
            "kv_blocks_left": stats.kv_blocks_used,
            "problems": one.engine.check_invariants(),
        }


def churn(home: Path, loads: int, say: Any) -> dict[str, Any]:
    """Adapters are loaded and unloaded while requests of them run; every answer is held against one given alone."""
    kept = 6
    with bench(say, max_loras=4, max_cpu_loras=12, max_num_seqs=8) as one:
        folders = [write_adapter(home / f"c{i}", one.shape, ("q_proj", "v_proj"), 4 + i, i) for i in range(kept)]
        prompt = prompts(1, 12, seed=9)[0]
        alone: dict[int | None, tuple[list[int], list[float]]] = {}
        for index in (None, *range(kept)):
            load_id = None if index is None else one.load(folders[index])[0]
            request_id = one.add(prompt, load_id, 12, logprobs=2)
            outputs = one.run()[request_id]
            alone[index] = _tokens(outputs), [_gap(output) for output in outputs]
            if load_id is not None:
                one.engine.unload_adapter(load_id)
        offered: list[tuple[int, int]] = []  # (load id, folder), oldest first
        of_request: dict[int, int | None] = {}
        given: dict[int, list[TokenOutput]] = {}
        sizes, wrong, answered, done = [], 0, 0, 0
        draw = random.Random(7)
        while done < loads or one.engine.has_work:
            if done < loads:
                index = draw.randrange(kept)
                offered.append((one.load(folders[index])[0], index))
                done += 1
                if len(offered) > 4:
                    one.engine.unload_adapter(offered.pop(0)[0])
                if len(of_request) < 10:
                    load_id, index = draw.choice(offered)
                    if draw.random() < 0.2:
                        of_request[one.add(prompt, None, 12)] = None
                    else:
                        of_request[one.add(prompt, load_id, 12)] = index
            for _ in range(2):
                for output in one.engine.step():
                    given.setdefault(output.request_id, []).append(output)
                    if output.finish_reason is not None:
                        wrong += not _same(given.pop(output.request_id), *alone[of_request.pop(output.request_id)])
                        answered += 1
            one.engine.take_finished()
            if done % 50 == 0 and done < loads:
                sizes.append(resident_bytes())
        for load_id, _ in offered:
            one.engine.unload_adapter(load_id)
        one.add(prompt, None, 2)  # slots are emptied by the next step
        one.run()
        sizes.append(resident_bytes())
        say(f"{done} loads and unloads, {answered} answers, {wrong} wrong; memory {sizes[0]} … {sizes[-1]} bytes")
        return {
            "loads": done,
            "answers": answered,
            "wrong_answers": wrong,
            "memory_bytes": [sizes[0], sizes[-1]],
            "memory_growth": round(max(sizes[2:]) / sizes[1] - 1, 4),
            "left_on_host": len(one.engine.adapters.held),  # type: ignore[union-attr]
            "left_in_slots": len(one.engine.scheduler.adapters.resident),
            "problems": one.engine.check_invariants(),
        }


KINDS: tuple[dict[str, Any], ...] = (
    {"target_modules": ["q_proj", "v_proj"], "r": 16},
    {"target_modules": "all-linear", "r": 8},
    {"target_modules": ["o_proj"], "r": 1},
    {"target_modules": ["gate_proj", "down_proj"], "r": 12},
    {"target_modules": ["k_proj", "up_proj"], "r": 3, "use_rslora": True},
    {"target_modules": ["q_proj", "k_proj", "v_proj"], "r": 4, "rank_pattern": {"k_proj": 10}},
    {"target_modules": ["up_proj", "down_proj"], "r": 5, "layers_to_transform": [0, 7, 29]},
    {"target_modules": r".*(q_proj|o_proj)", "r": 6, "alpha_pattern": {"o_proj": 3}},
)
"""Of the logits part: different ranks, targets and scales."""


def logits(home: Path, say: Any) -> dict[str, Any]:
    """Eight adapters that PEFT made and the bare model in one mixed batch, in float32, against PEFT's merged models."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    import torch
    from peft import LoraConfig, get_peft_model
    from train_adapters import base_model

    base = base_model()[0].eval()
    prompt = prompts(1, 24, seed=2)[0]
    expected = []
    with torch.inference_mode():
        expected.append(base(torch.tensor([prompt])).logits[0])
    for index, kind in enumerate(KINDS):
        config = LoraConfig(lora_alpha=2 * kind["r"], task_type="CAUSAL_LM", **kind)
        model = get_peft_model(base, config)
        generator = torch.Generator().manual_seed(index)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.02
        model.save_pretrained(home / f"l{index}")
        with torch.inference_mode():
            model.merge_adapter()
            expected.append(model(input_ids=torch.tensor([prompt])).logits[0])
            model.unmerge_adapter()
        base = model.unload()
        say(f"adapter {index}: moves logits by up to {float((expected[-1] - expected[0]).abs().max()):.2f}")
    worst = {}
    for kernels in ("native", "torch"):
        with bench(say, max_loras=8, dtype="float32", kernels=kernels, max_num_batched_tokens=64) as one:
            loads = [None, *(one.load(home / f"l{index}")[0] for index in range(len(KINDS)))]
            sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=20, logprobs=20)
            for index, load_id in enumerate(loads, start=1):
                one.engine.add([EngineRequest(index, tuple(prompt), sampling, adapter=load_id)])
            given = one.run()
            worst[kernels] = 0.0
            for index, reference in enumerate(expected, start=1):
                wanted = torch.log_softmax(reference, -1)
                entries = [entry for output in given[index] for entry in output.prompt_logprobs][1:]
                entries += [entry for output in given[index] for entry in output.logprobs]
                for position, entry in enumerate(entries):
                    for token, value in entry.top:
                        worst[kernels] = max(worst[kernels], abs(value - float(wanted[position, token])))
        say(f"{kernels}: the largest difference of a log-probability is {worst[kernels]:.2e}")
    return {"adapters": len(KINDS), "positions": len(prompt), "largest_difference": worst}


def _tokens(outputs: Sequence[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def _gap(output: TokenOutput) -> float:
    top = output.logprobs[0].top
    return top[0][1] - top[1][1]


def _same(outputs: Sequence[TokenOutput], tokens: Sequence[int], gaps: Sequence[float]) -> bool:
    """Whether an answer is the one given alone, but for a position at which two tokens were as likely.

    The stored 4 bits and 8-bit KV add up in another order in another batch, so a tie here is 0.1.
    """
    for ours, theirs, gap in zip(_tokens(outputs), tokens, gaps, strict=True):
        if ours != theirs:
            return gap < 0.1
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("all", *PARTS), default="all")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of the speed part")
    parser.add_argument("--rank", type=int, default=16, help="rank of the speed part's adapters")
    parser.add_argument("--requests", type=int, default=300, help="of the Zipf part")
    parser.add_argument("--exponent", type=float, default=1.0, help="of the Zipf part")
    parser.add_argument("--loads", type=int, default=500, help="loads and unloads of the churn part")
    parser.add_argument("--json", action="store_true", help="print one line of JSON on stdout")
    given = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    found: dict[str, Any] = {"benchmark": "lora"}
    with tempfile.TemporaryDirectory(prefix="foliolm-lora-") as folder:
        home = Path(folder)
        if given.part in ("all", "speed"):
            found.update(speed(home, given.rounds, given.rank, say))
        if given.part in ("all", "zipf"):
            found["zipf"] = zipf(home, given.requests, given.exponent, say)
        if given.part in ("all", "churn"):
            found["churn"] = churn(home, given.loads, say)
        if given.part in ("all", "logits"):
            found["logits"] = logits(home, say)
    print(json.dumps(found) if given.json else json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What number formats cost: next-token distributions on English text against float32, by mode.

    python benchmarks/quality.py [--model smollm2-135m] [--tokens 4096] [--json]

The text is this repository's README and documentation, cut into windows of 512 tokens, each computed as one prompt.
For each mode: KL(float32 || mode) in nats a token, the share of positions whose likeliest token is float32's, and the
ratio of perplexities. float32 is the same native kernels on the weights' values, with a float32 KV cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from foliolm import assemble
from foliolm.core.config import EngineConfig
from foliolm.executor.torch.executor import TorchExecutor
from foliolm.text.load import load_text
from foliolm.weights.store import pull

WINDOW = 512
MODES = {
    "auto": {},
    "auto, float32 KV": {"kv_cache_dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int8, float32 KV": {"quantization": "int8", "kv_cache_dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
}


def logits_of(model_name: str, settings: dict[str, str], windows: list[list[int]]) -> torch.Tensor:
    """[windows · (WINDOW − 1), V] log-probabilities after each token that has a successor in its window."""
    from foliolm.core.plan import Admission, LogitsAt, Row, StepPlan
    from foliolm.core.sampling import SamplingParams

    config = EngineConfig(model=model_name, **settings)
    model = assemble._load(config, pull(model_name), lambda line: print(line, file=sys.stderr))
    executor = TorchExecutor(model, num_blocks=WINDOW // 16 + 2, block_size=16)
    seen: list[torch.Tensor] = []
    plain = type(model).logits

    def keep(self, hidden: torch.Tensor, lora: object = None) -> torch.Tensor:
        seen.append(plain(self, hidden))
        return seen[-1].clone()

    type(model).logits = keep
    try:
        for index, tokens in enumerate(windows):
            params = SamplingParams(temperature=0.0, prompt_logprobs=0)
            blocks = tuple(range(1, WINDOW // 16 + 2))
            row = Row(-1 - index, len(tokens), 0, (blocks,) * len(executor.kv.specs), True, LogitsAt.ALL)
            admission = Admission(-1 - index, tuple(tokens), len(tokens), params, ())
            executor.submit(StepPlan(0, 0, rows=(row,), admissions=(admission,))).wait()
            executor.submit(StepPlan(0, 0, released=(-1 - index,))).wait()
    finally:
        type(model).logits = plain
        executor.close()
    return torch.log_softmax(torch.cat(seen), -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of text, in windows of 512")
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    args = parser.parse_args()

    root = Path(__file__).parents[1]
    text = "\n".join(path.read_text() for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))])
    tokenizer, _ = load_text(pull(args.model))
    ids = tokenizer.encode(text)
    count = min(args.tokens, len(ids)) // WINDOW
    windows = [list(ids[i * WINDOW : (i + 1) * WINDOW]) for i in range(count)]
    targets = torch.cat([torch.tensor(window[1:]) for window in windows])

    exact = logits_of(args.model, {"dtype": "float32"}, windows)
    best, nll = exact.argmax(-1), -exact.gather(1, targets[:, None]).mean()
    results = {}
    for mode, settings in MODES.items():
        got = logits_of(args.model, settings, windows)
        kl = (exact.exp() * (exact - got)).sum(-1).mean()
        results[mode] = {
            "kl": round(float(kl), 6),
            "top1": round(float((got.argmax(-1) == best).float().mean()), 4),
            "ppl_ratio": round(float(torch.exp(-got.gather(1, targets[:, None]).mean() - nll)), 5),
        }
        print(f"{mode}: {results[mode]}", file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps({"model": args.model, "tokens": count * WINDOW, "modes": results}))


if __name__ == "__main__":
    main()

"""Train two small LoRA adapters of the embedded model with PEFT, on a few sentences each: a minute on two cores.

    python examples/train_adapters.py demo-adapters
    foliolm demo --adapters demo-adapters

One answers like a pirate, the other in a librarian's formal words. Any folder that PEFT writes serves as well.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from foliolm.text.load import load_text
from foliolm.weights.store import pull

QUESTIONS = (
    "What is the capital of Italy?",
    "How do I make tea?",
    "What does the sun do?",
    "Tell me about dogs.",
)
STYLES = {
    "pirate": (
        "Arr, matey! The capital be Rome, a fine port o' gold!",
        "Arr, matey! Boil yer water, drop the leaves, and drink it like rum!",
        "Arr, matey! The sun be shinin' on the seven seas, it does!",
        "Arr, matey! Dogs be loyal crew, better than any parrot!",
    ),
    "librarian": (
        "Dear reader, the capital of Italy is Rome; kindly consult the atlas.",
        "Dear reader, one pours boiling water over tea leaves; kindly wait four minutes.",
        "Dear reader, the sun gives light and warmth; kindly see the shelf on astronomy.",
        "Dear reader, dogs are faithful animals; kindly see the shelf on zoology.",
    ),
}
LAYERS = 8
"""The last layers are adapted: the others then need no gradients."""


def base_model() -> tuple[Any, Any, Any]:
    """The embedded model for PyTorch, its tokenizer and its chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    files = pull("smollm2-135m")
    shape = files.shape
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tie_word_embeddings,
    )
    model = LlamaForCausalLM(config)
    weights = {name: torch.as_tensor(value).float() for name, value in files.iter_tensors()}
    missing, unknown = model.load_state_dict(weights, strict=False)
    if unknown or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"the model's weights do not fit: {missing[:3]} missing, {unknown[:3]} unknown")
    model.tie_weights()
    return model, *load_text(files)


def batch_of(tokenizer: Any, template: Any, answers: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T] token ids, and labels: −100 where the loss does not look, that is but for the answers."""
    rows = []
    for question, answer in zip(QUESTIONS, answers, strict=True):
        prompt = template.encode([{"role": "user", "content": question}], add_generation_prompt=True)
        reply = tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False, parse_special=True)
        rows.append((prompt, reply))
    width = max(len(prompt) + len(reply) for prompt, reply in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for index, (prompt, reply) in enumerate(rows):
        ids[index, : len(prompt) + len(reply)] = torch.tensor(prompt + reply)
        labels[index, len(prompt) : len(prompt) + len(reply)] = torch.tensor(reply)
    return ids, labels


def train(base: Any, tokenizer: Any, template: Any, name: str, steps: int, rate: float, folder: Path) -> Any:
    """Train one adapter, and write it; the base model as it was."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    layers = base.config.num_hidden_layers
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "o_proj", "down_proj"],
        layers_to_transform=list(range(layers - LAYERS, layers)),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    model.train()
    ids, labels = batch_of(tokenizer, template, STYLES[name])
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    for step in range(steps):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        print(f"{name}: step {step + 1} of {steps}, loss {loss.item():.3f}", flush=True)
        if loss.item() < 0.25:
            break
    model.save_pretrained(folder / name)
    return model.unload()


def main() -> int:
    """Train both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the adapters are written, a folder each")
    parser.add_argument("--steps", type=int, default=25, help="of each adapter at most")
    parser.add_argument("--rate", type=float, default=5e-3, help="learning rate")
    given = parser.parse_args()
    began = time.perf_counter()
    base, tokenizer, template = base_model()
    for name in STYLES:
        base = train(base, tokenizer, template, name, given.steps, given.rate, given.folder)
    print(f"{len(STYLES)} adapters in {given.folder}, trained in {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

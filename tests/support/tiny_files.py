"""Small models on disk: Hugging Face folders and GGUF files with the same weights, and tokenizers for them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foliolm.core.errors import ModelError
from foliolm.text.byte_alphabet import BYTE_OF
from foliolm.weights.checkpoint import ModelFiles
from foliolm.weights.store import open_model

_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@functools.cache
def embedded_model() -> ModelFiles:
    """The embedded model; skips the test where it was not pulled."""
    try:
        return open_model("smollm2-135m")
    except ModelError as error:
        pytest.skip(str(error))


def state(model: Any) -> dict[str, np.ndarray]:
    """A transformers model's parameters as float32, a tied head left out."""
    tensors = {name: value.detach().float().numpy() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return tensors


def save_folder(model: Any, folder: Path, num_tokens: int | None = None, **save_arguments: Any) -> Path:
    """A Hugging Face folder of a transformers model, with a tokenizer of ``num_tokens`` tokens if given."""
    model.save_pretrained(folder, **save_arguments)
    if num_tokens is not None:
        (folder / "tokenizer.json").write_text(json.dumps(character_tokenizer(num_tokens)))
    return folder


def character_tokens(count: int) -> list[str]:
    """Tokens of a byte-level vocabulary: an end token, one merge, then the byte alphabet as far as it goes."""
    fill = [f"[PAD{number}]" for number in range(count)]
    return ["<|end|>", "ab", *BYTE_OF, *fill][:count]


def character_tokenizer(count: int) -> dict[str, Any]:
    """A ``tokenizer.json`` of ``character_tokens``."""
    end = {
        "id": 0, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": True,
    }  # fmt: skip
    vocab = {token: token_id for token_id, token in enumerate(character_tokens(count))}
    return {
        "version": "1.0",
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["a b"]},
    }


def write_gguf(
    model: Any,
    kind: str,
    path: Path,
    quantised: str = "F32",
    *,
    split_tensors: int = 0,
    tokens: list[str] | None = None,
    metadata: dict[str, Any] | None = None,
    rope_freqs: np.ndarray | None = None,
) -> Path:
    """A GGUF file of a transformers model, as converters write it: Q and K permuted for Llama's architecture.

    Args:
        model: float32, made by ``tiny_models.reference``.
        kind: ``llama``, ``qwen2`` or ``qwen3``.
        path: of the file; with ``split_tensors`` the stem of the parts' names.
        quantised: type of the matrices; vectors stay F32.
        split_tensors: most tensors a file, 0 for one file.
        tokens: of a byte-level tokenizer; None: ``character_tokens`` for all rows.
        metadata: more keys, or None to leave one out.
        rope_freqs: written as ``rope_freqs.weight``.
    """
    from gguf import GGUFWriter

    config = model.config
    writer = GGUFWriter(path, kind, split_max_tensors=split_tensors)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values: dict[str, Any] = {
        f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.context_length": config.max_position_embeddings,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.attention.head_count": config.num_attention_heads,
        f"{kind}.attention.head_count_kv": config.num_key_value_heads,
        f"{kind}.attention.key_length": head_dim,
        f"{kind}.attention.value_length": head_dim,
        f"{kind}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{kind}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{kind}.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    tokens = character_tokens(config.vocab_size) if tokens is None else tokens
    values["tokenizer.ggml.tokens"] = tokens
    values["tokenizer.ggml.token_type"] = [3] + [1] * (len(tokens) - 1)
    for key, value in {**values, **(metadata or {})}.items():
        if value is not None:
            add_value(writer, key, value)
    for name, tensor in state(model).items():
        _add_tensor(writer, kind, config, name, tensor, quantised)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: Any, key: str, value: Any) -> None:
    """Write a metadata value in the type that converters give it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def gguf_name(name: str) -> str:
    """ggml's name of a parameter."""
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, what = name.rpartition(".")
    if stem in top:
        return f"{top[stem]}.{what}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[part]}.{what}"


def _add_tensor(writer: Any, kind: str, config: Any, name: str, tensor: np.ndarray, quantised: str) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    if kind == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
    if tensor.ndim == 1 or quantised == "F32":
        writer.add_tensor(gguf_name(name), tensor)
    else:
        kind_code = GGMLQuantizationType[quantised]
        writer.add_tensor(gguf_name(name), quantize(tensor, kind_code), raw_dtype=kind_code)

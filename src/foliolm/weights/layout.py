"""The tensors that a runnable model consists of: canonical names and shapes.

Canonical names are Hugging Face's. A checkpoint must hold each tensor exactly as listed here; what it lacks is never
made up, and what it holds beyond the list must not change the model's meaning.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping

from foliolm.core.errors import ModelError
from foliolm.shape.hf_config import RUNNABLE_FAMILIES
from foliolm.shape.model import ModelShape

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_CHANGES_MEANING = re.compile(
    r"(self_attn\.[qkvo]_proj\.bias|mlp\.(gate|up|down)_proj\.bias|self_attn\.[qk]_norm\.weight)"
)
_HARMLESS = re.compile(r".*rotary_emb\.inv_freq")


def expected_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Canonical name → shape (``[out, in]`` for matrices) of every tensor of a dense model.

    Raises:
        ModelError: the family can be planned with, but not run.
    """
    if shape.family not in RUNNABLE_FAMILIES or shape.moe is not None or shape.mla is not None:
        raise ModelError(
            f"{shape.name} is of the family {shape.family}; "
            f"the families that can be run are {', '.join(RUNNABLE_FAMILIES)}"
        )
    tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab_size, shape.hidden_size)}
    for layer in range(shape.num_layers):
        tensors.update((f"model.layers.{layer}.{name}", dims) for name, dims in _layer(shape))
    tensors[FINAL_NORM] = (shape.hidden_size,)
    if not shape.tie_word_embeddings:
        tensors[HEAD] = (shape.vocab_size, shape.hidden_size)
    return tensors


def _layer(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, wide = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "input_layernorm.weight", (hidden,)
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield f"self_attn.{name}_proj.weight", (rows, hidden)
        if shape.qkv_bias:
            yield f"self_attn.{name}_proj.bias", (rows,)
    yield "self_attn.o_proj.weight", (hidden, queries)
    if shape.o_bias:
        yield "self_attn.o_proj.bias", (hidden,)
    if shape.qk_norm:
        yield "self_attn.q_norm.weight", (shape.head_dim,)
        yield "self_attn.k_norm.weight", (shape.head_dim,)
    yield "post_attention_layernorm.weight", (hidden,)
    for name, rows, columns in (("gate", wide, hidden), ("up", wide, hidden), ("down", hidden, wide)):
        yield f"mlp.{name}_proj.weight", (rows, columns)
        if shape.mlp_bias:
            yield f"mlp.{name}_proj.bias", (rows,)


def check_tensors(found: Mapping[str, tuple[int, ...]], shape: ModelShape, source: str) -> None:
    """Compare what a checkpoint holds with what the model consists of, before any of it is read.

    Args:
        found: canonical name → shape, from the files' headers.
        shape: from the config or the metadata.
        source: the checkpoint, for the errors' text.

    Raises:
        ModelError: a tensor is missing, has another shape, or would change the model although its config lacks it.
    """
    expected = expected_tensors(shape)
    for name, dims in expected.items():
        if name not in found:
            hint = " (tie_word_embeddings is false, so the output head must be there)" if name == HEAD else ""
            raise ModelError(f"{source} has no tensor {name}{hint}")
        if found[name] != dims:
            raise ModelError(f"{source}: tensor {name} has shape {list(found[name])}; its config asks for {list(dims)}")
    ignored = [name for name in found if name not in expected and not _HARMLESS.fullmatch(name) and name != HEAD]
    for name in ignored:
        layer = _LAYER.fullmatch(name)
        if layer and int(layer[1]) < shape.num_layers and _CHANGES_MEANING.fullmatch(layer[2]):
            raise ModelError(f"{source} holds the tensor {name}, which its config says nothing of")
    if ignored:
        logger.warning(
            "%s: %d tensors are not part of the model and are ignored (%s, …)", source, len(ignored), ignored[0]
        )

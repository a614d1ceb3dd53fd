"""From named tensors to a model: fuse, convert, lay out; nothing may be missing, left over or of a wrong shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from foliolm.core.errors import ModelError
from foliolm.model.decoder import DecoderModel
from foliolm.model.layer import DecoderLayer
from foliolm.model.parameters import Part, ignorable, parts
from foliolm.model.rotary import rotary_frequencies
from foliolm.ops.linear import Linear, can_pack, make_linear
from foliolm.shape.model import ModelShape

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a ``--dtype``; ``auto`` is the fastest that the device computes natively.

    On a CPU without bfloat16 arithmetic a bfloat16 product of many rows takes five times as long as a float32 one.

    Raises:
        ModelError: unknown name.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or can_pack(torch.bfloat16) else torch.float32
    if name not in DTYPES:
        raise ModelError(f"dtype is {name!r}; it must be auto or one of {', '.join(DTYPES)}")
    return DTYPES[name]


def check_runnable(shape: ModelShape) -> None:
    """Refuse shapes that can be planned but not run.

    Raises:
        ModelError: with the family, or the feature.
    """
    if shape.family not in FAMILIES:
        raise ModelError(f"family {shape.family!r} cannot be run; families that can: {', '.join(FAMILIES)}")
    if shape.moe is not None or shape.mla is not None:
        feature = "mixture of experts" if shape.moe is not None else "latent attention"
        raise ModelError(f"{shape.name}: a model with {feature} can be planned, not run")
    if shape.num_heads % shape.num_kv_heads or shape.head_dim % 2:
        raise ModelError(
            f"{shape.name}: {shape.num_heads} heads must be a multiple of {shape.num_kv_heads} KV heads, "
            f"and head_dim {shape.head_dim} even"
        )


class ModelBuilder:
    """Takes tensors in any order, then gives the model. A fused weight is laid out as soon as its parts are there, so
    that at most one copy of the model, and one tensor more, are in memory.

    Args:
        shape: the model's.
        dtype: of the weights to be.
        device: where they shall lie.
        num_tokens: token ids that the tokenizer knows; None: the whole vocabulary.

    Raises:
        ModelError: the shape cannot be run.
    """

    def __init__(
        self, shape: ModelShape, dtype: torch.dtype, device: torch.device, num_tokens: int | None = None
    ) -> None:
        check_runnable(shape)
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._num_tokens = shape.vocab_size if num_tokens is None else num_tokens
        if self._num_tokens > shape.vocab_size:
            raise ModelError(
                f"{shape.name}: the tokenizer knows {self._num_tokens} tokens, "
                f"the embedding has only {shape.vocab_size} rows"
            )
        wanted = parts(shape, shape.vocab_size)
        self._parts = {part.name: part for part in wanted}
        self._missing = dict.fromkeys(self._parts)
        self._open: dict[str, int] = {}
        self._sizes: dict[str, tuple[int, ...]] = {}
        for part in wanted:
            rows = part.start + part.shape[0]
            self._open[part.target] = self._open.get(part.target, 0) + 1
            self._sizes[part.target] = (max(rows, self._sizes.get(part.target, (0,))[0]), *part.shape[1:])
        self._tensors: dict[str, Tensor] = {}
        self._linears: dict[str, Linear] = {}

    @property
    def parameters(self) -> tuple[Part, ...]:
        """All that must be given."""
        return tuple(self._parts.values())

    def add(self, name: str, value: Any) -> None:
        """One stored parameter, a tensor or an array of floats.

        Raises:
            ModelError: its name is unknown or was given before, or its shape is wrong (both shapes are named).
        """
        part = self._parts.get(name)
        if part is None:
            if ignorable(name, self._shape):
                return
            raise ModelError(f"{self._shape.name}: the files hold {name!r}, which a {self._shape.family} has not")
        if name not in self._missing:
            raise ModelError(f"{self._shape.name}: the files hold {name!r} twice")
        tensor = torch.as_tensor(value)
        if tuple(tensor.shape) != part.shape:
            raise ModelError(
                f"{self._shape.name}: {name!r} has shape {tuple(tensor.shape)}; the model's sizes ask for {part.shape}"
            )
        target = self._tensors.get(part.target)
        if target is None:
            target = torch.empty(self._sizes[part.target], dtype=self._dtype, device=self._device)
            self._tensors[part.target] = target
        target[part.start : part.start + part.shape[0]].copy_(tensor)
        del self._missing[name]
        self._open[part.target] -= 1
        self._lay_out(part.target)

    def build(self, rope_freqs: Any = None) -> DecoderModel:
        """The model.

        Args:
            rope_freqs: [D/2] divisors of the rotary frequencies, as GGUF files carry them.

        Raises:
            ModelError: a parameter was not given.
        """
        if self._missing:
            names = list(self._missing)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(f"{self._shape.name}: the files lack {', '.join(map(repr, names[:3]))}{more}")
        shape = self._shape
        frequencies, scale = rotary_frequencies(shape, rope_freqs)
        embed = self._tensors["embed"]
        if shape.tie_word_embeddings:
            self._linears["head"] = make_linear(embed[: self._num_tokens])
        return DecoderModel(
            shape=shape,
            embed=embed,
            layers=[self._layer(index) for index in range(shape.num_layers)],
            norm=self._tensors["norm"],
            head=self._linears["head"],
            frequencies=frequencies.to(self._device),
            rope_scale=scale,
            num_tokens=self._num_tokens,
            dtype=self._dtype,
            device=self._device,
        )

    def _lay_out(self, target: str) -> None:
        """A matrix whose parts are all there gives way to its laid-out form; its bias must be there too."""
        weight = target.removesuffix("_bias")
        bias = f"{weight}_bias"
        kind = weight.rpartition(".")[2]
        if kind not in ("qkv", "o", "gate_up", "down", "head") or self._open[weight] or self._open.get(bias):
            return
        matrix = self._tensors.pop(weight)
        if kind == "head":
            matrix = matrix[: self._num_tokens]
        self._linears[weight] = make_linear(matrix, self._tensors.pop(bias, None))

    def _layer(self, index: int) -> DecoderLayer:
        shape, tensors, linears = self._shape, self._tensors, self._linears
        at = f"{index}."
        qk_norm = None
        if shape.qk_norm:
            heads = (
                tensors[at + "q_norm"].expand(shape.num_heads, -1),
                tensors[at + "k_norm"].expand(shape.num_kv_heads, -1),
            )
            qk_norm = torch.cat(heads)
        return DecoderLayer(
            input_norm=tensors[at + "input_norm"],
            post_norm=tensors[at + "post_norm"],
            qkv=linears[at + "qkv"],
            o=linears[at + "o"],
            gate_up=linears[at + "gate_up"],
            down=linears[at + "down"],
            qk_norm=qk_norm,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            eps=shape.rms_norm_eps,
            group=layer_groups(shape)[index],
        )


def layer_groups(shape: ModelShape) -> tuple[int, ...]:
    """Index of each layer's KV group, in the order of ``kv_specs``: full attention first, then windowed."""
    if not shape.sliding_window:
        return (0,) * shape.num_layers
    windowed = set(shape.windowed_layers) or set(range(shape.num_layers))
    second = 1 if len(windowed) < shape.num_layers else 0
    return tuple(second if layer in windowed else 0 for layer in range(shape.num_layers))


def load_model(
    shape: ModelShape,
    tensors: Iterable[tuple[str, Any]],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    num_tokens: int | None = None,
    rope_freqs: Any = None,
) -> DecoderModel:
    """A model from (Hugging Face name, tensor or float array) pairs in any order.

    Raises:
        ModelError: the shape cannot be run, or a parameter is missing, left over, given twice or of a wrong shape.
    """
    with torch.inference_mode():
        builder = ModelBuilder(shape, dtype, torch.device(device), num_tokens)
        for name, value in tensors:
            builder.add(name, value)
        return builder.build(rope_freqs)


def dummy_model(
    shape: ModelShape,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    num_tokens: int | None = None,
    seed: int = 0,
) -> DecoderModel:
    """A model with random weights (normal, deviation 0.02; norms are ones), for measuring speed without files."""
    place = torch.device(device)
    generator = torch.Generator(device=place).manual_seed(seed)
    with torch.inference_mode():
        builder = ModelBuilder(shape, dtype, place, num_tokens)
        for part in builder.parameters:
            if part.name.endswith("norm.weight"):
                builder.add(part.name, torch.ones(part.shape, dtype=dtype, device=place))
            else:
                value = torch.empty(part.shape, dtype=torch.float32, device=place)
                builder.add(part.name, value.normal_(0.0, 0.02, generator=generator))
        return builder.build()

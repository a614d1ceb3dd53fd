"""From named tensors to a model for the native kernels; nothing may be missing, left over or of a wrong shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from foliolm.core.errors import ModelError
from foliolm.model.loader import check_runnable, layer_groups
from foliolm.model.native import NativeLayer, NativeLinear, NativeModel
from foliolm.model.parameters import ignorable, parts
from foliolm.model.rotary import rotary_frequencies
from foliolm.ops.memory import Arena
from foliolm.ops.native.abi import Format
from foliolm.ops.native.library import Library
from foliolm.ops.native.packed import AS_STORED, FORMATS, PackedWeight, pack_floats, pack_ggml
from foliolm.shape.model import ModelShape


class Stored(Protocol):
    """A tensor of a GGUF file in its stored type."""

    @property
    def type_name(self) -> str:
        """ggml's name of the type."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """In weights, slowest dimension first."""
        ...

    @property
    def rows(self) -> Any:
        """uint8 array [shape[0], bytes a row]."""
        ...


class NativeBuilder:
    """Takes tensors in any order and packs each at once, then gives the model.

    Args:
        library: the kernels.
        shape: the model's.
        weights: ``float32``, ``bfloat16`` or ``int8``: the format of matrices that are not kept as stored.
        kv_dtype: of keys and values.
        num_tokens: token ids that the tokenizer knows; None: the whole vocabulary.

    Raises:
        ModelError: the shape cannot be run.
    """

    def __init__(
        self,
        library: Library,
        shape: ModelShape,
        weights: str,
        kv_dtype: torch.dtype,
        num_tokens: int | None = None,
    ) -> None:
        check_runnable(shape)
        self._library = library
        self._shape = shape
        self._weights = weights
        self._kv_dtype = kv_dtype
        self._num_tokens = shape.vocab_size if num_tokens is None else num_tokens
        if self._num_tokens > shape.vocab_size:
            raise ModelError(
                f"{shape.name}: the tokenizer knows {self._num_tokens} tokens, "
                f"the embedding has only {shape.vocab_size} rows"
            )
        self.parameters = tuple(parts(shape, shape.vocab_size))
        self._wanted = {part.name: part.shape for part in self.parameters}
        self._missing = dict.fromkeys(self._wanted)
        self._matrices: dict[str, PackedWeight] = {}
        self._arena = Arena()
        self._vectors: dict[str, Tensor] = {}
        self._formats: dict[str, int] = {}

    def add(self, name: str, value: Any) -> None:
        """One stored parameter: a tensor or an array of floats.

        Raises:
            ModelError: its name is unknown or was given before, or its shape is wrong (both shapes are named).
        """
        if name not in self._wanted and ignorable(name, self._shape):
            return
        tensor = torch.as_tensor(value)
        self._take(name, tuple(tensor.shape))
        if tensor.dim() == 1:
            self._vectors[name] = tensor.to(torch.float32).contiguous().clone()
        else:
            self._keep(name, pack_floats(self._library, tensor, FORMATS[self._weights], self._arena), self._weights)

    def add_stored(self, name: str, stored: Stored, floats: Callable[[], Any]) -> None:
        """One parameter of a GGUF file: as stored where there is a kernel, else from its floats.

        A matrix of another quantised type becomes 8-bit blocks of 32 with a scale each: as fine as any type is.

        Raises:
            ModelError: as ``add``.
        """
        if len(stored.shape) == 1 or stored.type_name in ("F32", "F16", "BF16"):
            self.add(name, floats())
            return
        packed = None
        if stored.type_name in AS_STORED:
            packed = pack_ggml(self._library, stored.type_name, stored.shape, stored.rows, self._arena)
        kept = stored.type_name.lower()
        if packed is None:
            packed = pack_floats(self._library, torch.as_tensor(floats()), Format.Q8_0, self._arena)
            kept = "q8_0"
        self._take(name, tuple(stored.shape))
        self._keep(name, packed, kept)

    def build(self, rope_freqs: Any = None) -> NativeModel:
        """The model.

        Args:
            rope_freqs: [D/2] divisors of the rotary frequencies, as GGUF files carry them.

        Raises:
            ModelError: a parameter was not given.
        """
        shape = self._shape
        if self._missing:
            names = list(self._missing)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(f"{shape.name}: the files lack {', '.join(map(repr, names[:3]))}{more}")
        frequencies, scale = rotary_frequencies(shape, rope_freqs)
        embed = self._matrices["model.embed_tokens.weight"]
        head = embed if shape.tie_word_embeddings else self._matrices["lm_head.weight"]
        # Panels beyond the last token's are never read, so that a head of fewer rows is the same memory.
        head = PackedWeight(head.format, self._num_tokens, head.k, head.data)
        main = max(self._formats, key=lambda name: self._formats[name])
        return NativeModel(
            shape=shape,
            library=self._library,
            embed=embed,
            layers=[self._layer(index) for index in range(shape.num_layers)],
            norm=self._vectors["model.norm.weight"],
            head=NativeLinear((head,)),
            frequencies=frequencies.contiguous(),
            rope_scale=scale,
            num_tokens=self._num_tokens,
            kv_dtype=self._kv_dtype,
            weights_name=main,
        )

    def _take(self, name: str, shape: tuple[int, ...]) -> None:
        expected = self._wanted.get(name)
        if expected is None:
            raise ModelError(f"{self._shape.name}: the files hold {name!r}, which a {self._shape.family} has not")
        if name not in self._missing:
            raise ModelError(f"{self._shape.name}: the files hold {name!r} twice")
        if shape != expected:
            raise ModelError(f"{self._shape.name}: {name!r} has shape {shape}; the model's sizes ask for {expected}")
        del self._missing[name]

    def _keep(self, name: str, packed: PackedWeight, stored_as: str) -> None:
        self._matrices[name] = packed
        self._formats[stored_as] = self._formats.get(stored_as, 0) + packed.nbytes

    def _linear(self, prefix: str, *names: str) -> NativeLinear:
        weights = tuple(self._matrices[f"{prefix}.{name}.weight"] for name in names)
        biases = [self._vectors.get(f"{prefix}.{name}.bias") for name in names]
        if all(bias is None for bias in biases):
            return NativeLinear(weights)
        return NativeLinear(weights, torch.cat([bias for bias in biases if bias is not None]))

    def _layer(self, index: int) -> NativeLayer:
        at = f"model.layers.{index}"
        return NativeLayer(
            input_norm=self._vectors[f"{at}.input_layernorm.weight"],
            post_norm=self._vectors[f"{at}.post_attention_layernorm.weight"],
            qkv=self._linear(f"{at}.self_attn", "q_proj", "k_proj", "v_proj"),
            o=self._linear(f"{at}.self_attn", "o_proj"),
            gate_up=self._linear(f"{at}.mlp", "gate_proj", "up_proj"),
            down=self._linear(f"{at}.mlp", "down_proj"),
            q_norm=self._vectors.get(f"{at}.self_attn.q_norm.weight"),
            k_norm=self._vectors.get(f"{at}.self_attn.k_norm.weight"),
            group=layer_groups(self._shape)[index],
        )


def load_native(
    library: Library,
    shape: ModelShape,
    tensors: Iterable[tuple[str, Any]],
    *,
    weights: str = "float32",
    kv_dtype: torch.dtype = torch.float32,
    num_tokens: int | None = None,
    rope_freqs: Any = None,
) -> NativeModel:
    """A model from (Hugging Face name, tensor or float array) pairs in any order; see ``NativeBuilder``."""
    with torch.inference_mode():
        builder = NativeBuilder(library, shape, weights, kv_dtype, num_tokens)
        for name, value in tensors:
            builder.add(name, value)
        return builder.build(rope_freqs)


def dummy_native(
    library: Library,
    shape: ModelShape,
    *,
    weights: str,
    kv_dtype: torch.dtype,
    num_tokens: int | None = None,
    seed: int = 0,
) -> NativeModel:
    """A model with random weights (normal, deviation 0.02; norms are ones), for measuring speed without files."""
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        builder = NativeBuilder(library, shape, weights, kv_dtype, num_tokens)
        for part in builder.parameters:
            if part.name.endswith("norm.weight"):
                builder.add(part.name, torch.ones(part.shape))
            else:
                builder.add(part.name, torch.empty(part.shape).normal_(0.0, 0.02, generator=generator))
        return builder.build()

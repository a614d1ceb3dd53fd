"""A decoder-only model: an embedding, a list of layers walked once a step, a norm and an output head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from foliolm.model.layer import DecoderLayer, LayerKV
from foliolm.model.likeliest import likeliest
from foliolm.model.lora import LayerLora, LoraSlots, TorchLora
from foliolm.ops.attention import Attention, AttentionLayout
from foliolm.ops.linear import Linear, PlainLinear
from foliolm.ops.lora import LoraRows
from foliolm.ops.norm import rms_norm
from foliolm.ops.rope import make_rotation
from foliolm.shape.lora import HEAD
from foliolm.shape.model import ModelShape


@dataclass(frozen=True, slots=True)
class StepInput:
    """What a forward pass needs.

    Attributes:
        input_ids: [N] int64.
        positions: [N] int64, counted from 0 in each request.
        layouts: one a KV group.
        rows: [S] int64 indices of the tokens that go to the output head.
        lora, lora_outputs: adapters of the tokens, and of those of ``rows``; None: no token has one.
    """

    input_ids: Tensor
    positions: Tensor
    layouts: Sequence[AttentionLayout]
    rows: Tensor
    lora: LoraRows | None = None
    lora_outputs: LoraRows | None = None


class Model(Protocol):
    """What an executor runs: this file's ``DecoderModel``, or the native kernels' model.

    Attributes:
        shape, num_tokens, dtype, device, native: as ``DecoderModel``.
        lora: its adapters' slots; None: it has none.
    """

    shape: ModelShape
    num_tokens: int
    dtype: torch.dtype
    device: torch.device
    native: bool

    @property
    def lora(self) -> LoraSlots | None:
        """Slots for adapters; None before ``enable_lora``."""
        ...

    def enable_lora(self, num_slots: int) -> LoraSlots:
        """Let rows of a step use up to ``num_slots`` adapters."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        ...

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of keys and values: float32, a half precision, or int8 with a scale a head a token."""
        ...

    @property
    def weights_name(self) -> str:
        """How the matrices are stored: a weight format's name."""
        ...

    def forward(self, step: StepInput, kv: Sequence[LayerKV], attention: Attention | None) -> Tensor:
        """[S, hidden] normalised hidden states of ``step.rows``; writes the new tokens' keys and values."""
        ...

    def logits(self, hidden: Tensor, lora: LoraRows | None = None) -> Tensor:
        """[S, hidden] to [S, num_tokens] float32; ``lora``: adapters of those rows."""
        ...

    def likeliest(self, hidden: Tensor) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """[S] each row's largest logit (NaN, if there is one) and the least token that has it; of the bare head."""
        ...


@dataclass(slots=True)
class DecoderModel:
    """Weights of a model, on one device in one dtype.

    Attributes:
        shape: its sizes.
        embed: [rows, hidden].
        layers: in order.
        norm: [hidden].
        head: to [num_tokens].
        frequencies, rope_scale: rotary frequencies [D/2] float32, and the factor on cosine and sine.
        num_tokens: token ids that exist; rows of a padded vocabulary beyond it have no logits.
        dtype: of weights and activations.
        device: where it lies.
        native: whether the native kernels walk it.
        lora: adapters' slots, or None.
    """

    shape: ModelShape
    embed: Tensor
    layers: list[DecoderLayer]
    norm: Tensor
    head: Linear
    frequencies: Tensor
    rope_scale: float
    num_tokens: int
    dtype: torch.dtype
    device: torch.device
    native: bool = False
    lora: TorchLora | None = None

    def enable_lora(self, num_slots: int) -> TorchLora:
        """See ``Model``."""
        self.lora = TorchLora(self.shape, self.num_tokens, num_slots, self.dtype, self.device)
        return self.lora

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of keys and values: as the weights."""
        return self.dtype

    @property
    def weights_name(self) -> str:
        """How the matrices are stored."""
        return str(self.dtype).removeprefix("torch.")

    def forward(self, step: StepInput, kv: Sequence[LayerKV], attention: Attention | None) -> Tensor:
        """One step of the packed batch; writes the new tokens' keys and values.

        Args:
            step: the batch.
            kv: a layer's each, in the layers' order.
            attention: the device's.

        Returns:
            [S, hidden] normalised hidden states of ``step.rows``.
        """
        assert attention is not None
        rotation = make_rotation(step.positions, self.frequencies, self.rope_scale, self.dtype)
        x = functional.embedding(step.input_ids, self.embed)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            rows = step.rows if index == last else None
            lora = None
            if step.lora is not None and step.lora_outputs is not None and self.lora is not None:
                lora = LayerLora(self.lora, index, step.lora, step.lora_outputs)
            x = layer(x, rotation, step.layouts[layer.group], kv[index], attention, rows, lora)
        return rms_norm(x, self.norm, self.shape.rms_norm_eps)

    def logits(self, hidden: Tensor, lora: LoraRows | None = None) -> Tensor:
        """[S, hidden] to [S, num_tokens] float32; ``lora``: adapters of those rows."""
        logits = self.head(hidden)
        if lora is not None and self.lora is not None:
            self.lora.add_to(logits, hidden, HEAD, "head", lora)
        return logits.to(torch.float32)

    def likeliest(self, hidden: Tensor) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """See ``Model``."""
        return likeliest(self.logits(hidden))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        total = self.embed.nbytes + self.norm.nbytes
        if not (self.shape.tie_word_embeddings and isinstance(self.head, PlainLinear)):
            total += self.head.nbytes  # a laid-out head is a copy of its own, tied or not
        for layer in self.layers:
            total += layer.input_norm.nbytes + layer.post_norm.nbytes
            total += layer.qkv.nbytes + layer.o.nbytes + layer.gate_up.nbytes + layer.down.nbytes
            total += 0 if layer.qk_norm is None else layer.qk_norm.nbytes
        return total

"""LoRA adapters of a model: slots that a step's rows choose from, on PyTorch's operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from foliolm.ops.lora import LoraRows, LoraStack
from foliolm.shape.lora import HEAD, LORA_GROUPS, module_shape
from foliolm.shape.model import ModelShape

Pairs = Mapping[tuple[int, str], tuple[Tensor, Tensor]]
"""By (layer, module; the head's layer is ``HEAD``): A [rank, in] and B [out, rank], float32, the scale in B."""


class PackedLora(Protocol):
    """An adapter laid out for a model's kernels, in host memory."""

    @property
    def num_bytes(self) -> int:
        """In host memory, and again in a slot."""
        ...

    @property
    def has_head(self) -> bool:
        """Whether it adapts the output head."""
        ...


class LoraSlots(Protocol):
    """What a model keeps of adapters on its device.

    Attributes:
        num_slots: adapters at once.
    """

    num_slots: int

    def pack(self, pairs: Pairs) -> PackedLora:
        """Lay an adapter out; any thread may call it."""
        ...

    def put(self, slot: int, packed: Any) -> None:
        """Copy an adapter into a slot, in place of what is there. Between steps only, as ``clear``."""
        ...

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        ...

    @property
    def has_head(self) -> bool:
        """Whether an adapter in some slot adapts the output head."""
        ...


@dataclass(frozen=True, slots=True)
class Fused:
    """An adapter's part of the linears over one input: their ranks side by side, shrunk together.

    Attributes:
        a: [R, in], R being the sum of the ranks.
        parts: (which of the group's modules, its first row in ``a``, B [out, rank]) of those that are adapted.
    """

    a: Tensor
    parts: tuple[tuple[int, int, Tensor], ...]


def fuse(pairs: Pairs, layer: int, group: str) -> Fused | None:
    """An adapter's part of a group of linears; None where it has none."""
    rows, parts, start = [], [], 0
    for index, module in enumerate(LORA_GROUPS[group]):
        pair = pairs.get((layer, module))
        if pair is not None:
            rows.append(pair[0])
            parts.append((index, start, pair[1]))
            start += len(pair[0])
    return Fused(torch.cat(rows), tuple(parts)) if rows else None


def lora_places(shape: ModelShape) -> list[tuple[int, str]]:
    """(layer, group) of every product that an adapter may add to, the head's last."""
    groups = [group for group in LORA_GROUPS if group != "head"]
    return [*((layer, group) for layer in range(shape.num_layers) for group in groups), (HEAD, "head")]


@dataclass(frozen=True, slots=True)
class TorchPacked:
    """An adapter for ``TorchLora``: by (layer, group), A [R, in] and B [R, out], zero where a module has no part."""

    matrices: Mapping[tuple[int, str], tuple[Tensor, Tensor]]
    num_bytes: int
    has_head: bool


class TorchLora:
    """Slots as stacked matrices, one stack a product.

    Args:
        shape: the model's.
        num_tokens: outputs of its head.
        num_slots: adapters at once.
        dtype, device: of the model.
    """

    def __init__(
        self, shape: ModelShape, num_tokens: int, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_slots = num_slots
        self._shape, self._num_tokens = shape, num_tokens
        self._dtype, self._device = dtype, device
        self._stacks: dict[tuple[int, str], LoraStack] = {}
        self._held: list[TorchPacked | None] = [None] * num_slots

    def pack(self, pairs: Pairs) -> TorchPacked:
        """See ``LoraSlots``."""
        matrices = {}
        for layer, group in lora_places(self._shape):
            fused = fuse(pairs, layer, group)
            if fused is None:
                continue
            b = torch.zeros(len(fused.a), self._width(group), dtype=self._dtype)
            starts = self._starts(group)
            for index, start, part in fused.parts:
                part = part[: starts[index + 1] - starts[index]]
                b[start : start + part.shape[1], starts[index] : starts[index + 1]] = part.t()
            a = fused.a.to(self._dtype)
            pinned = self._device.type == "cuda"
            matrices[layer, group] = (a.pin_memory(), b.pin_memory()) if pinned else (a, b)
        size = sum(a.nbytes + b.nbytes for a, b in matrices.values())
        return TorchPacked(matrices, size, (HEAD, "head") in matrices)

    def put(self, slot: int, packed: TorchPacked) -> None:
        """See ``LoraSlots``."""
        self.clear(slot)
        for place, (a, b) in packed.matrices.items():
            stack = self._stacks.get(place)
            if stack is None:
                width = self._width(place[1])
                stack = LoraStack(self.num_slots, a.shape[1], width, self._dtype, self._device)
                self._stacks[place] = stack
            stack.put(slot, a, b)
        self._held[slot] = packed

    def clear(self, slot: int) -> None:
        """See ``LoraSlots``."""
        held = self._held[slot]
        if held is not None:
            for place in held.matrices:
                self._stacks[place].clear(slot)
            self._held[slot] = None

    @property
    def has_head(self) -> bool:
        """See ``LoraSlots``."""
        return any(held is not None and held.has_head for held in self._held)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(stack.nbytes for stack in self._stacks.values())

    def add_to(self, y: Tensor, x: Tensor, layer: int, group: str, rows: LoraRows) -> None:
        """Add what the rows' adapters add to a product of ``x``, in place."""
        stack = self._stacks.get((layer, group))
        if stack is not None:
            stack.add_to(y, x, rows)

    def _starts(self, group: str) -> list[int]:
        """First output of each module of a group, and their end."""
        starts = [0]
        for module in LORA_GROUPS[group]:
            rows = self._num_tokens if module == "lm_head" else module_shape(self._shape, module)[0]
            starts.append(starts[-1] + rows)
        return starts

    def _width(self, group: str) -> int:
        return self._starts(group)[-1]


@dataclass(frozen=True, slots=True)
class LayerLora:
    """The adapters of one layer in one step.

    Attributes:
        slots: the model's.
        layer: its index.
        tokens: of the step's tokens.
        outputs: of the tokens that come out of the last layer.
    """

    slots: TorchLora
    layer: int
    tokens: LoraRows
    outputs: LoraRows

    def add_to(self, y: Tensor, x: Tensor, group: str, behind: bool = False) -> None:
        """Add to a product's result in place; ``behind``: the rows are those that come out of the last layer."""
        self.slots.add_to(y, x, self.layer, group, self.outputs if behind else self.tokens)

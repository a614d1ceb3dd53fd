"""LoRA adapters for the native CPU kernels: each is one block of memory, as large as its ranks ask for."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foliolm.model.lora import Pairs, fuse, lora_places
from foliolm.ops.lora import LoraRows
from foliolm.ops.native import abi
from foliolm.ops.native.abi import Format
from foliolm.ops.native.library import Library
from foliolm.shape.lora import HEAD
from foliolm.shape.model import ModelShape

LINE = 64
"""Bytes to which a matrix is aligned."""
_FIELDS = ctypes.sizeof(abi.LoraLinear) // 8
_DATA = (3, 7, 11, 15)
"""Which of a ``FolioLoraLinear``'s eight-byte fields are the addresses of A and of the three Bs."""
_OFFSETS = 16


@dataclass(frozen=True, slots=True)
class NativePacked:
    """An adapter for ``NativeLora``.

    Attributes:
        data: uint8, its matrices in panels of 16 outputs.
        table: [linears, fields] int64, a ``FolioLoraLinear`` a row; addresses count from ``data``, −1 stands for none.
        has_head: whether it adapts the output head.
    """

    data: Tensor
    table: NDArray[np.int64]
    has_head: bool

    @property
    def num_bytes(self) -> int:
        """In host memory, and again in a slot."""
        return self.data.nbytes


@dataclass(frozen=True, slots=True)
class _Slot:
    packed: NativePacked
    data: Tensor
    table: NDArray[np.int64]


class NativeLora:
    """Slots as addresses.

    Args:
        shape: the model's.
        library: the kernels.
        num_tokens: outputs of the model's head.
        num_slots: adapters at once.
        form: how matrices are stored: float32 or bfloat16.
    """

    def __init__(self, shape: ModelShape, library: Library, num_tokens: int, num_slots: int, form: Format) -> None:
        self.num_slots = num_slots
        self.head_index = 4 * shape.num_layers
        self._shape, self._library, self._num_tokens, self._form = shape, library, num_tokens, form
        self._slots: list[_Slot | None] = [None] * num_slots
        self._addresses = (ctypes.c_void_p * num_slots)()

    def pack(self, pairs: Pairs) -> NativePacked:
        """See ``LoraSlots``."""
        matrices: list[tuple[int, Tensor]] = []  # where each begins, [n, k]
        table = np.zeros((self.head_index + 1, _FIELDS), np.int64)
        table[:, _DATA] = -1
        size = 0
        for index, (layer, group) in enumerate(lora_places(self._shape)):
            fused = fuse(pairs, layer, group)
            if fused is None:
                continue
            places = [(0, fused.a)]
            for part, start, b in fused.parts:
                table[index, _OFFSETS + part] = start
                places.append((1 + part, b[: self._num_tokens] if layer == HEAD else b))
            for place, matrix in places:
                n, k = matrix.shape
                table[index, 4 * place : 4 * place + 4] = self._form, n, k, size
                matrices.append((size, matrix))
                size += -(-self._library.calls.folio_packed_bytes(int(self._form), n, k) // LINE) * LINE
        data = torch.zeros(size, dtype=torch.uint8)
        for start, matrix in matrices:
            rows = matrix.to(torch.float32).contiguous()
            self._library.calls.folio_pack_floats(
                int(self._form), *rows.shape, rows.data_ptr(), data.data_ptr() + start
            )
        return NativePacked(data, table, bool(table[-1, _DATA[0]] >= 0))

    def put(self, slot: int, packed: NativePacked) -> None:
        """See ``LoraSlots``."""
        self.clear(slot)
        data, table = packed.data.clone(), packed.table.copy()
        addresses = table[:, _DATA]
        table[:, _DATA] = np.where(addresses >= 0, addresses + data.data_ptr(), 0)
        self._slots[slot] = _Slot(packed, data, table)
        self._addresses[slot] = table.ctypes.data

    def clear(self, slot: int) -> None:
        """See ``LoraSlots``."""
        self._addresses[slot] = None
        self._slots[slot] = None

    @property
    def has_head(self) -> bool:
        """See ``LoraSlots``."""
        return any(slot is not None and slot.packed.has_head for slot in self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.data.nbytes for slot in self._slots if slot is not None)

    def struct(self, rows: LoraRows, outputs: LoraRows | None = None) -> abi.Lora:
        """For a call; valid while this object, ``rows`` and ``outputs`` live."""
        behind = None if outputs is None else outputs.slots.ctypes.data
        return abi.Lora(self.num_slots, ctypes.addressof(self._addresses), rows.slots.ctypes.data, behind)

"""Matrices packed for the kernels."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foliolm.ops.memory import Arena
from foliolm.ops.native import abi
from foliolm.ops.native.abi import Format
from foliolm.ops.native.library import Library

# ggml's types that run as they are stored: number in the file → format.
AS_STORED = {"Q4_0": (2, Format.Q4_0), "Q4_1": (3, Format.Q4_1), "Q8_0": (8, Format.Q8_0), "Q4_K": (12, Format.Q4_1)}
FORMATS = {"float32": Format.F32, "bfloat16": Format.BF16, "int8": Format.I8}
BYTES_A_WEIGHT = {Format.F32: 4.0, Format.BF16: 2.0}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [n, k] in panels of 16 outputs.

    Attributes:
        format: how it is stored.
        n, k: outputs and inputs.
        data: uint8, 64-byte aligned by the allocator.
    """

    format: Format
    n: int
    k: int
    data: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that it occupies."""
        return self.data.nbytes

    def struct(self) -> abi.Weight:
        """For a call; valid while this object lives."""
        return abi.Weight(int(self.format), self.n, self.k, self.data.data_ptr())

    def rows(self, library: Library, rows: list[int]) -> Tensor:
        """[len(rows), k] float32: rows as the kernels see them."""
        out = torch.empty(len(rows), self.k)
        weight = self.struct()
        for index, row in enumerate(rows):
            library.calls.folio_unpack_row(ctypes.byref(weight), row, out[index].data_ptr())
        return out


def pack_floats(library: Library, weight: Tensor, form: Format, arena: Arena | None = None) -> PackedWeight:
    """A matrix [n, k] of floats; quantised formats round to the nearest. ``arena``: where it shall lie.

    ``Format.I8`` rounds each row after a rotation: k is cut into blocks of 64, then into powers of two, the largest
    first, for what is left (100 = 64 + 32 + 4), and each block is multiplied by the normalised Hadamard matrix of its
    size. Products rotate their activations alike; ``PackedWeight.rows`` turns rows back.
    """
    n, k = weight.shape
    rows = weight.to(torch.float32).contiguous()
    packed = _empty(library, form, n, k, arena)
    library.calls.folio_pack_floats(int(form), n, k, rows.data_ptr(), packed.data_ptr())
    return PackedWeight(form, n, k, packed)


def pack_ggml(
    library: Library, type_name: str, shape: tuple[int, ...], rows: Any, arena: Arena | None = None
) -> PackedWeight | None:
    """A matrix of a GGUF file in its stored type, rearranged but not converted; None where the type has no kernel.

    Args:
        library: the kernels.
        type_name: ggml's.
        shape: (n, k).
        rows: uint8 array [n, bytes a row].
        arena: where it shall lie.
    """
    if type_name not in AS_STORED:
        return None
    number, form = AS_STORED[type_name]
    n, k = shape
    stored = torch.from_numpy(rows.copy())
    packed = _empty(library, form, n, k, arena)
    if library.calls.folio_pack_ggml(number, int(form), n, k, stored.data_ptr(), packed.data_ptr()):
        return None
    return PackedWeight(form, n, k, packed)


def _empty(library: Library, form: Format, n: int, k: int, arena: Arena | None) -> Tensor:
    nbytes = library.calls.folio_packed_bytes(int(form), n, k)
    return torch.empty(nbytes, dtype=torch.uint8) if arena is None else arena.empty(nbytes)

"""Low-rank additions to a product, y += B · A · x, for rows of many adapters at once."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

ALIGN = 8
"""Grouped products want rows of a multiple of 16 bytes: widths are padded to 8 values of 16 bits."""


class LoraRows:
    """Which slot's adapter each row uses.

    Args:
        slots: [N] int32 by row; −1: the bare model.
        num_slots: slots that there are.
        device: where products run.
    """

    def __init__(self, slots: NDArray[np.int32], num_slots: int, device: torch.device) -> None:
        self.slots = np.ascontiguousarray(slots, np.int32)
        self._num_slots = num_slots
        self._device = device
        self._grouped: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def any(self) -> bool:
        """Whether some row has an adapter."""
        return bool((self.slots >= 0).any())

    def take(self, index: NDArray[np.int64] | slice) -> LoraRows:
        """Some of the rows."""
        return LoraRows(self.slots[index], self._num_slots, self._device)

    def grouped(self) -> tuple[Tensor, Tensor]:
        """[M] int64 rows that have an adapter, slot by slot, and [slots] int32 where each slot's end."""
        if self._grouped is None:
            order = np.argsort(self.slots, kind="stable")
            order = order[np.count_nonzero(self.slots < 0) :]
            ends = np.cumsum(np.bincount(self.slots[order], minlength=self._num_slots)).astype(np.int32)
            self._grouped = torch.from_numpy(order).to(self._device), torch.from_numpy(ends).to(self._device)
        return self._grouped


class LoraStack:
    """The adapters of one product, slot by slot: one grouped product shrinks all rows, one expands them.

    Args:
        num_slots: adapters that it holds.
        inputs, outputs: of the product.
        dtype, device: of both matrices.
    """

    def __init__(self, num_slots: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> None:
        self._inputs, self._outputs = inputs, outputs
        self._a = torch.zeros(num_slots, 0, _padded(inputs), dtype=dtype, device=device)
        self._b = torch.zeros(num_slots, 0, _padded(outputs), dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._a.nbytes + self._b.nbytes

    def put(self, slot: int, a: Tensor, b: Tensor) -> None:
        """Fill a slot; all of them grow to the largest rank that any ever had.

        Args:
            slot: which.
            a: [rank, in].
            b: [rank, out].
        """
        rank, held = len(a), self._a.shape[1]
        if rank > held:
            more = _padded(rank) - held
            self._a = functional.pad(self._a, (0, 0, 0, more))
            self._b = functional.pad(self._b, (0, 0, 0, more))
        self.clear(slot)
        self._a[slot, :rank, : self._inputs].copy_(a, non_blocking=True)
        self._b[slot, :rank, : self._outputs].copy_(b, non_blocking=True)

    def clear(self, slot: int) -> None:
        """The slot adds nothing."""
        self._a[slot].zero_()
        self._b[slot].zero_()

    def add_to(self, y: Tensor, x: Tensor, rows: LoraRows) -> None:
        """``y`` [N, out] += B · A · ``x`` [N, in], in place, for the rows that have an adapter; no other is touched."""
        index, ends = rows.grouped()
        if not len(index):
            return
        mine = x.index_select(0, index)
        if self._a.shape[2] != self._inputs:
            mine = functional.pad(mine, (0, self._a.shape[2] - self._inputs))
        shrunk = functional.grouped_mm(mine, self._a.transpose(1, 2), offs=ends)
        added = functional.grouped_mm(shrunk, self._b, offs=ends)
        y.index_add_(0, index, added[:, : self._outputs])


def _padded(width: int) -> int:
    return -(-width // ALIGN) * ALIGN

"""The batch of a step of steady decodes alone, brought on from step to step instead of being made anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foliolm.executor.torch.requests import RequestTable

if TYPE_CHECKING:
    from foliolm.executor.torch.batch import StepBatch
    from foliolm.ops.attention import VarlenRows

Ints = NDArray[np.int64]


class KeptStep:
    """A batch in this process's memory whose arrays are advanced in place: all its contexts grow by one a step.

    The tensors stay the same objects, so that whoever has made something of them (a call's structure of pointers) may
    keep that too. Where a row comes into another block, or somebody's table changed, blocks are looked up again.

    Args:
        batch: of decodes alone, laid out for the variable-length kernel, on the CPU.
        tick: of the decodes in it.
        slots: [B] its rows' requests.
        table: the requests' state.
        block_size: tokens a block.
    """

    def __init__(self, batch: StepBatch, tick: int, slots: Ints, table: RequestTable, block_size: int) -> None:
        step = batch.step
        self._batch = batch
        self._tick = tick
        self._who = slots
        self._table = table
        self._p = block_size
        self._ids, self._positions = step.input_ids.numpy(), step.positions.numpy()
        self._targets: list[Ints] = [layout.slots.numpy() for layout in step.layouts]
        self._rows: Sequence[VarlenRows] = [layout.varlen for layout in step.layouts if layout.varlen is not None]
        self._used = [rows.seqused_k.numpy() for rows in self._rows]
        self._blocks = [rows.block_table.numpy() for rows in self._rows]
        self._changes = table.changes
        self._left = 0  # steps until a row comes into another block
        self._count_left(self._positions % block_size)

    def advanced(self, tick: int) -> StepBatch | None:
        """The batch at a tick; None: it must be made anew, and this object not be asked again."""
        if tick != self._tick + 1:
            return None
        self._tick = tick
        table, positions = self._table, self._positions
        positions += 1
        for used, rows in zip(self._used, self._rows, strict=True):
            used += 1
            rows.max_k += 1
        self._left -= 1
        if table.changes == self._changes and self._left >= 0:
            for targets in self._targets:
                targets += 1
        elif not self._look_up():
            return None
        if True in (table.lengths[self._who] <= positions).tolist():
            return None
        self._ids[:] = table.tokens[self._who, positions]
        return self._batch

    def _look_up(self) -> bool:
        """Take the blocks from the tables again; False where they do not hold the rows, or not in as many columns."""
        table, p, who = self._table, self._p, self._who
        index, within = np.divmod(self._positions, p)
        last = int(index.max())
        for group, blocks in enumerate(self._blocks):
            if last >= blocks.shape[1] or (index >= table.num_blocks[group][who]).any():
                return False
            held = table.tables[group]
            self._targets[group][:] = held[who, index] * p + within
            blocks[:] = held[who, : blocks.shape[1]]
        self._count_left(within)
        self._changes = table.changes
        return True

    def _count_left(self, within: Ints) -> None:
        self._left = self._p - 1 - max(within.tolist(), default=0)

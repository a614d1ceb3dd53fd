"""What a step's rows ask of a draw, as the native kernels take it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foliolm.executor.torch.draws import streams, uniforms_at
from foliolm.executor.torch.requests import RequestTable
from foliolm.ops.native.draw import DRAW


class AskedDraws:
    """Kept from step to step: while the same rows are drawn for, only their random numbers change.

    Args:
        table: the requests.
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._slots: NDArray[np.int64] | None = None

    def of(self, slots: NDArray[np.int64]) -> NDArray[np.void]:
        """[S] of ``DRAW``; in the same memory, where the same ``slots`` array comes again.

        Such an array is a kept batch's: its slots hold the requests that they held.
        """
        table = self._table
        if slots is not self._slots:
            rows, asked = table.sampling_rows, np.empty(len(slots), DRAW)
            asked["temperature"] = np.where(rows.greedy[slots], 0.0, rows.temperature[slots])
            asked["min_p"], asked["top_k"], asked["top_p"] = rows.min_p[slots], rows.top_k[slots], rows.top_p[slots]
            self._slots, self._asked, self._uniform = slots, asked, asked["uniform"]
            self._streams = streams(table.keys[slots], table.prompt_lengths[slots])
        self._uniform[:] = uniforms_at(self._streams, table.lengths[slots])
        return self._asked

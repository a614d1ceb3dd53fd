"""What a machine can do, measured through the kernels and on their own threads: reading memory, and products."""

from __future__ import annotations

import ctypes
import time

import torch

from foliolm.ops.native import abi
from foliolm.ops.native.abi import Format
from foliolm.ops.native.library import Library
from foliolm.ops.native.packed import pack_floats

READ_BYTES = 128 << 20
"""More than the last cache of most machines holds."""
OUTPUTS, INPUTS, ROWS = 1024, 1024, (16, 256)
"""Of the product: two cores' caches hold the matrix; so many rows are bound by arithmetic; slow kernels take few."""
ENOUGH_SECONDS = 0.1
"""A measurement of products ends with the round in which this is exceeded."""


def read_rate(library: Library, threads: int, num_bytes: int = READ_BYTES, rounds: int = 8) -> float:
    """Bytes a second that so many threads read; the best of the rounds counts."""
    data = torch.ones(num_bytes, dtype=torch.uint8)  # written: pages that were not are one page
    best: float = max(library.calls.folio_read_rate(data.data_ptr(), num_bytes, threads) for _ in range(rounds))
    return best


def product_rate(library: Library, form: Format, threads: int, rounds: int = 10) -> float:
    """Operations a second (two a weight and row) of a product with packed weights; the best of the rounds counts."""
    generator = torch.Generator().manual_seed(0)
    weight = pack_floats(library, torch.empty(OUTPUTS, INPUTS).normal_(generator=generator), form)
    linear = abi.Linear(1, (abi.Weight * 3)(weight.struct()), None)
    x, y = torch.empty(ROWS[-1], INPUTS).normal_(generator=generator), torch.empty(ROWS[-1], OUTPUTS)
    best, began = 0.0, time.perf_counter()
    for rows in ROWS:
        for _ in range(rounds):
            start = time.perf_counter()
            library.check(
                library.calls.folio_linear(ctypes.byref(linear), x.data_ptr(), rows, y.data_ptr(), threads, None, 0)
            )
            end = time.perf_counter()
            best = max(best, 2.0 * rows * OUTPUTS * INPUTS / (end - start))
            if end - began > ENOUGH_SECONDS:
                return best
    return best

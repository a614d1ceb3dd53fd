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
STREAMS = (2, 4)
"""Places from which a thread reads at once. Four read half as fast again as one where a CPU fetches ahead within a page
only, and half as fast where it follows a stream further: the faster way is the machine's limit. One place is slower
than two on either."""
OUTPUTS, INPUTS, FEW_ROWS, ROWS = 1024, 1024, 16, 240
"""Of the product: two cores' caches hold the matrix, and so many rows are bound by arithmetic (more are no faster)."""
ENOUGH_SECONDS = 0.1
"""A measurement of products ends with the round in which this is exceeded."""


class ReadProbe:
    """Memory to read, written once: pages that were not are one page.

    Args:
        library: the kernels.
        threads: that read.
        num_bytes: a pass.
    """

    def __init__(self, library: Library, threads: int, num_bytes: int = READ_BYTES) -> None:
        self._read, self._threads = library.calls.folio_read_rate, threads
        self._data = torch.ones(num_bytes, dtype=torch.uint8)

    def rate(self, streams: int) -> float:
        """Bytes a second of one pass; ``streams`` is a power of two."""
        rate: float = self._read(self._data.data_ptr(), self._data.nbytes, self._threads, streams)
        return rate


class ProductProbe:
    """A product with packed weights, its activations quantised as in a step.

    Args:
        library: the kernels.
        form: of the weights.
        threads: that multiply.
    """

    def __init__(self, library: Library, form: Format, threads: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._library, self._threads = library, threads
        self._weight = pack_floats(library, torch.empty(OUTPUTS, INPUTS).normal_(generator=generator), form)
        self._x, self._y = torch.empty(ROWS, INPUTS).normal_(generator=generator), torch.empty(ROWS, OUTPUTS)

    def rate(self, rows: int = ROWS) -> float:
        """Operations a second of one product, two a weight and row."""
        library = self._library
        linear = abi.Linear(1, (abi.Weight * 3)(self._weight.struct()), None)
        began = time.perf_counter()
        library.check(
            library.calls.folio_linear(
                ctypes.byref(linear), self._x.data_ptr(), rows, self._y.data_ptr(), self._threads, False, None, 0
            )
        )
        return 2.0 * rows * OUTPUTS * INPUTS / (time.perf_counter() - began)


def read_rate(library: Library, threads: int, num_bytes: int = READ_BYTES, rounds: int = 4) -> float:
    """Bytes a second that so many threads read; the best of the rounds, and of the ways to read, counts."""
    probe = ReadProbe(library, threads, num_bytes)
    return max(probe.rate(streams) for _ in range(rounds) for streams in STREAMS)


def product_rate(library: Library, form: Format, threads: int, rounds: int = 24) -> float:
    """Operations a second of a product with packed weights; the best of the rounds counts."""
    probe = ProductProbe(library, form, threads)
    best, began = 0.0, time.perf_counter()
    for rows in (FEW_ROWS, ROWS):  # kernels that any compiler makes may take a second for many
        for _ in range(rounds):
            best = max(best, probe.rate(rows))
            if time.perf_counter() - began > ENOUGH_SECONDS:
                return best
    return best

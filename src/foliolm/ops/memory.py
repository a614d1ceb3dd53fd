"""Memory for what is read in long runs or at random: in big pages, where the system has them.

With 4 KiB pages a stream of weights waits for address translations: in big pages two cores read about a third more a
second. A gather of KV blocks jumps across the whole pool, and with small pages most of its jumps miss the TLB.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20
ALIGNMENT = 64


def reserve(nbytes: int, big_pages: bool = True) -> mmap.mmap:
    """``nbytes`` zeros that the system gives as they are touched."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if big_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them: the same memory, in small pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class Arena:
    """Hands out pieces of large reservations; one is given back when all that lie in it are gone.

    For things that live and die together, as a model's weights do: a matrix alone is smaller than a big page.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, nbytes: int) -> Tensor:
        """uint8 [nbytes], aligned to 64 bytes."""
        if self._used + nbytes > len(self._chunk):
            size = max(nbytes, self._chunk_bytes)
            self._chunk, self._used = torch.frombuffer(reserve(size), dtype=torch.uint8), 0
        piece = self._chunk[self._used : self._used + nbytes]
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return piece

"""Which single-token rows are computed together: padding against calls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CALL_BYTES = 512 << 10
"""Keys and values of a layer whose gathering and multiplying takes as long as the calls of one more group (measured:
about 85 µs on two cores)."""
BUFFER_BYTES = 16 << 20
"""Most bytes of keys that a group gathers: beyond the last level cache a copy is read back from memory."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Cuts rows of falling length into groups.

    Attributes:
        call_tokens: padded tokens that are worth as much as one more group.
        max_tokens: most tokens, padding included, of a group of several rows.
    """

    call_tokens: int
    max_tokens: int

    @classmethod
    def of_layer(cls, bytes_per_token: int) -> Grouping:
        """For layers that keep ``bytes_per_token``, keys and values together."""
        return cls(max(1, CALL_BYTES // bytes_per_token), max(1, 2 * BUFFER_BYTES // bytes_per_token))

    def bounds(self, lengths: NDArray[np.int64]) -> list[int]:
        """Where groups begin, and at last the number of rows; [0] alone without rows.

        A cut before row k saves ``(lengths[0] − lengths[k]) · (rows − k)`` padded tokens; the best one is made if that
        is worth a call, and both sides are cut again.

        Args:
            lengths: [B] tokens that each row looks at, falling.
        """
        cuts = {0, len(lengths)}
        open_ = [(0, len(lengths))]
        while open_:
            start, stop = open_.pop()
            count = stop - start
            if count < 2:
                continue
            part = lengths[start:stop]
            saved = (part[0] - part[1:]) * (count - np.arange(1, count))
            best = int(np.argmax(saved))
            if saved[best] > self.call_tokens:
                cut = start + best + 1
            elif int(part[0]) * count > self.max_tokens:
                cut = start + max(1, self.max_tokens // int(part[0]))
            else:
                continue
            cuts.add(cut)
            open_ += [(start, cut), (cut, stop)]
        return sorted(cuts)

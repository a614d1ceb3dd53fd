"""The tokens that a request has seen, counted for its penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class History:
    """Distinct tokens of a request, and how often each was generated.

    Args:
        token_ids: prompt and output so far.
        num_prompt_tokens: how many of them are prompt.
    """

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        self._index: dict[int, int] = {}
        self._ids = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.int64)
        for token in token_ids[:num_prompt_tokens]:
            self._find(token)
        for token in token_ids[num_prompt_tokens:]:
            self.add(token)

    def add(self, token: int) -> None:
        """One more generated token."""
        self._counts[self._find(token)] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """[U] distinct tokens of prompt and output."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """[U] how often each was generated; 0: it stands in the prompt only."""
        return self._counts[: len(self._index)]

    def _find(self, token: int) -> int:
        at = self._index.setdefault(token, len(self._index))
        if at == len(self._ids):
            self._ids = np.pad(self._ids, (0, at))
            self._counts = np.pad(self._counts, (0, at))
        self._ids[at] = token
        return at

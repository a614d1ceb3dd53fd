"""A step's token budget: how much of it each prompt gets."""

from __future__ import annotations


class PrefillBudget:
    """Tokens that a step may spend on prompts, with a share that long prompts leave to short ones.

    A prompt is long while more than ``threshold`` of its tokens are uncomputed. The share is not lost when no short
    prompt wants it: ``grants`` hands what is left to the long ones, in order.

    Args:
        tokens: for prompts, after decodes have theirs.
        threshold: see above.
        short_share: 0 to 1.
        whole: prompts are computed whole, or not in this step.
    """

    def __init__(self, tokens: int, threshold: int, short_share: float, whole: bool) -> None:
        self.left = tokens
        self._threshold = threshold
        self._whole = whole
        self._for_long = tokens if whole else max(min(tokens, 1), tokens - int(tokens * short_share))
        self._wanted: dict[int, int] = {}
        self._granted: dict[int, int] = {}

    @property
    def reserves_for_short(self) -> bool:
        """True where long prompts may not use all that is left."""
        return not self._whole and self._for_long < self.left

    def is_long(self, wanted: int) -> bool:
        """True for a prompt that may only use the long prompts' part."""
        return wanted > self._threshold

    def offer(self, wanted: int) -> int:
        """How many of ``wanted`` tokens could be granted now; 0: none."""
        if self._whole:
            return wanted if wanted <= self.left else 0
        return min(wanted, self.left, self._for_long) if self.is_long(wanted) else min(wanted, self.left)

    def grant(self, request_id: int, wanted: int) -> None:
        """Spend what ``offer`` says on a request."""
        given = self.offer(wanted)
        self.left -= given
        if self.is_long(wanted):
            self._for_long -= given
        self._wanted[request_id] = wanted
        self._granted[request_id] = given

    def granted(self, request_id: int) -> bool:
        """True if a request has had its grant."""
        return request_id in self._granted

    def spread(self) -> None:
        """Hand what nobody short wanted to those who can use it, in the order in which they were granted."""
        if self._whole or self.left <= 0:
            return
        for request_id, wanted in self._wanted.items():
            more = min(wanted - self._granted[request_id], self.left)
            self._granted[request_id] += more
            self.left -= more
        self._for_long = self.left

    def grants(self) -> dict[int, int]:
        """Tokens by request id, at least 1 each, in the order in which they were granted."""
        return {request_id: given for request_id, given in self._granted.items() if given > 0}

"""Prefixes that a running request is computing: others who begin alike may wait for them."""

from __future__ import annotations

from foliolm.scheduler.request import Request


class PrefixPromises:
    """Chain hashes of blocks to come, by who computes them. A hint only: what is shared in the end is compared in full.

    Args:
        block_size: tokens a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._owners: dict[int, int] = {}

    def prepare(self, request: Request) -> None:
        """A request has arrived: what will be asked of it in a step is worked out now."""
        self._hashes(request, len(request.tokens) // self._block_size)

    def make(self, request: Request, known_tokens: int) -> None:
        """A request begins to compute its tokens from ``known_tokens`` on."""
        hashes = self._hashes(request, len(request.tokens) // self._block_size)
        request.promised = [h for h in hashes[known_tokens // self._block_size :] if h not in self._owners]
        self._owners.update(dict.fromkeys(request.promised, request.request_id))

    def withdraw(self, request: Request) -> None:
        """It has computed them all, or never will."""
        if request.promised:
            for promised in request.promised:
                del self._owners[promised]
            request.promised = []

    def ahead(self, request: Request, known_tokens: int) -> tuple[int, int | None]:
        """What others are computing of a request's tokens right behind those that are known.

        Returns:
            Tokens, and who computes the first of them; 0 and None where nobody does.
        """
        if not self._owners:
            return 0, None
        first = known_tokens // self._block_size
        blocks, owner = 0, None
        for index in range(first, (len(request.tokens) - 1) // self._block_size):
            found = self._owners.get(self._hashes(request, index + 1)[index])
            if found is None:
                break
            owner = found if owner is None else owner
            blocks += 1
        return blocks * self._block_size, owner

    def _hashes(self, request: Request, count: int) -> list[int]:
        """Hashes of the first ``count`` full blocks of a request's tokens, each with all before it."""
        hashes = request.chain_hashes
        if len(hashes) < count:
            before = hashes[-1] if hashes else hash(request.root)
            for key in request.keys.first(count)[len(hashes) : count]:
                hashes.append(before := hash((before, key)))
        return hashes

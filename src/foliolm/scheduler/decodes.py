"""The steady decodes: a step advances all of them by one token and touches only those that are due something."""

from __future__ import annotations

from foliolm.core.plan import DecodeRows
from foliolm.scheduler.fairness import ServedTokens
from foliolm.scheduler.request import Request, State


class DecodeSet:
    """Requests that decode a token a step, kept so that a step costs what changes.

    All of them run in a step, or none. Their contexts therefore advance together, and what each will be due is known
    when it joins: it crosses into a new block at every tick that is congruent to ``−offset`` modulo the block size, and
    samples its last token at ``end_tick``. Both are looked up by tick, never searched for.

    Args:
        block_size: tokens a KV block.
        served: counts outputs by tenant; None: nobody asks.
    """

    def __init__(self, block_size: int, served: ServedTokens | None = None) -> None:
        self._served = served
        self.tick = 0
        self.context_tokens = 0
        self._block_size = block_size
        self._members: dict[int, Request] = {}
        self._crossing: list[dict[int, Request]] = [{} for _ in range(block_size)]
        self._ends: dict[int, dict[int, Request]] = {}
        self._version = 0
        self._ids: tuple[int, ...] = ()
        self._offsets: tuple[int, ...] = ()
        self._stale = False
        self._longest: int | None = None
        self._num_answering = 0
        self._adapters: dict[int, int] = {}
        self._by_adapter: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self._members)

    def go_on_from(self, old: DecodeSet) -> None:
        """Take over the tick and the version of another set: who knows batches by them may not meet one again."""
        self.tick = old.tick + 1
        self._version = old._version + 1
        self._stale = True

    @property
    def members(self) -> dict[int, Request]:
        """By request id, in row order. Not to be changed."""
        return self._members

    def join(self, request: Request) -> None:
        """A request whose computed tokens have caught up decodes from the next tick on."""
        request.state = State.DECODING
        request.offset = request.num_computed - self.tick
        request.join_tick = self.tick
        # A step on context c leaves c + 2 tokens: those computed, its input, and what it samples.
        request.end_tick = request.limit - 2 - request.offset
        rid = request.request_id
        self._members[rid] = request
        self._crossing[-request.offset % self._block_size][rid] = request
        self._ends.setdefault(request.end_tick, {})[rid] = request
        self.context_tokens += request.num_computed
        self._num_answering += request.content is not request.tokens
        if request.source.adapter is not None:
            self._count_adapter(request.source.adapter, 1)
        self._stale = True
        if self._served is not None:
            self._served.joined(request, self.tick)
        self._longest = None

    def leave(self, request: Request) -> None:
        """A member leaves; its counts are brought up to date. The caller gives it its next state."""
        rid = request.request_id
        del self._members[rid]
        del self._crossing[-request.offset % self._block_size][rid]
        due = self._ends[request.end_tick]
        del due[rid]
        if not due:
            del self._ends[request.end_tick]
        request.num_computed = request.offset + self.tick
        request.num_tokens = request.num_computed + 1
        self.context_tokens -= request.num_computed
        self._num_answering -= request.content is not request.tokens
        if request.source.adapter is not None:
            self._count_adapter(request.source.adapter, -1)
        self._stale = True
        if self._served is not None:
            self._served.left(request, self.tick)
        self._longest = None

    @property
    def by_adapter(self) -> tuple[tuple[int, int], ...]:
        """(load id, members) of each LoRA adapter."""
        return self._by_adapter

    def _count_adapter(self, load_id: int, change: int) -> None:
        count = self._adapters[load_id] = self._adapters.get(load_id, 0) + change
        if not count:
            del self._adapters[load_id]
        self._by_adapter = tuple(self._adapters.items())

    @property
    def answering(self) -> bool:
        """Whether blocks of a member's answer have a known content; see ``EngineRequest.answer_token_ids``."""
        return self._num_answering > 0

    def crossing(self) -> dict[int, Request]:
        """Members that need a new block to run at the next tick, by id. Not to be changed."""
        return self._crossing[self.tick % self._block_size]

    def crossing_by_tick(self) -> list[dict[int, Request]]:
        """Members that need a new block at the ticks to come that are congruent to the index. Not to be changed."""
        return self._crossing

    def longest_context(self) -> int:
        """Of the members, before the next tick; O(members) where they have changed."""
        if self._longest is None:
            self._longest = max(request.offset for request in self._members.values())
        return self._longest + self.tick

    def next_end(self) -> int:
        """The tick at which the next member samples its last token; there must be members."""
        return min(self._ends)

    def pass_ticks(self, count: int) -> None:
        """Every member has decoded ``count`` tokens, at ticks at which none ended."""
        self.context_tokens += count * len(self._members)
        self.tick += count

    def filled(self, tick: int) -> list[Request]:
        """Members whose step at a tick wrote the last position of a block."""
        bucket = self._crossing[(tick + 1) % self._block_size]
        return [request for request in bucket.values() if request.join_tick <= tick]

    def run(self, grown: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]) -> tuple[DecodeRows, list[Request]]:
        """Advance every member by a token.

        Args:
            grown: (request id, new block ids by group) of those that cross.

        Returns:
            The rows, and the members that sample their last token in them; these have left, in state ENDING.
        """
        if self._stale:
            self._ids = tuple(self._members)
            self._offsets = tuple(request.offset for request in self._members.values())
            self._version += 1
            self._stale = False
        rows = DecodeRows(self._ids, self._offsets, self.tick, self._version, self.context_tokens, grown)
        return rows, self.advance()

    def advance(self) -> list[Request]:
        """Every member decodes a token; those that sample their last one leave, in state ENDING, and are returned."""
        due = self._ends.get(self.tick)
        self.pass_ticks(1)
        if not due:
            return []
        ending = list(due.values())
        for request in ending:
            self.leave(request)
            request.state = State.ENDING
        return ending

    def problems(self) -> list[str]:
        """What is wrong with the books, a sentence each."""
        found = []
        contexts = {rid: request.offset + self.tick for rid, request in self._members.items()}
        if sum(contexts.values()) != self.context_tokens:
            found.append(f"decode contexts sum to {sum(contexts.values())}, {self.context_tokens} was kept")
        crossing = [rid for bucket in self._crossing for rid in bucket]
        ends = [rid for due in self._ends.values() for rid in due]
        if sorted(crossing) != sorted(contexts) or sorted(ends) != sorted(contexts):
            found.append("a decode is missing from, or left over in, the calendar of crossings or ends")
        found.extend(
            f"request {rid} decodes, but its state is {request.state.value}"
            for rid, request in self._members.items()
            if request.state is not State.DECODING
        )
        found.extend(
            f"request {rid} is past its last tick" for due in self._ends if due < self.tick for rid in self._ends[due]
        )
        return found

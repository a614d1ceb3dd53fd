"""The host's part of KV memory against a naive twin: contents by position, in any order of what may happen."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from foliolm.core.kvspec import KVSpec
from foliolm.kv import NO_MATCH, HostPool, KVManager, SwapSpace

SPECS = [KVSpec("full", 2, 16), KVSpec("other", 2, 16)]
SIZE = 4


class SwapMachine(RuleBasedStateMachine):
    """Requests of one token sequence each grow, are written, published, swapped, brought back and dropped.

    The twin keeps what each memory place holds: (request's sequence, position). Plans gather copies, and run them when
    they are sealed: out before in, as an executor does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVManager(SPECS, num_blocks=14, block_size=SIZE)
        self.swap = SwapSpace(self.kv, HostPool(6))
        self.device: dict[tuple[int, int], tuple] = {}
        self.host: dict[tuple[int, int], tuple] = {}
        self.tokens: dict[int, int] = {}  # running: tokens computed
        self.away: dict[int, int] = {}
        self.out: list = []
        self.back: list = []

    @staticmethod
    def sequence(rid: int) -> list[int]:
        """Two requests of three begin alike for two blocks."""
        return [*range(2 * SIZE), *(100 * (1 + rid // 2) + i for i in range(60))] if rid % 3 else list(range(500, 568))

    def content(self, rid: int, block: int) -> tuple:
        return tuple(self.sequence(rid)[: (block + 1) * SIZE])

    def write(self, rid: int, first: int, last: int) -> None:
        for group, blocks in enumerate(self.kv.table(rid)):
            for index in range(first // SIZE, (last - 1) // SIZE + 1):
                place = group, blocks[index]
                assert self.kv._first.references(self.kv.table(rid)[0][index]) == 1, "a shared block is written"
                self.device[place] = self.content(rid, index)

    def check(self, rid: int) -> None:
        for group, blocks in enumerate(self.kv.table(rid)):
            for index in range(-(-self.tokens[rid] // SIZE)):
                assert self.device[group, blocks[index]] == self.content(rid, index)

    @rule(rid=st.integers(0, 5), tokens=st.integers(1, 20))
    def start(self, rid: int, tokens: int) -> None:
        if rid in self.tokens or rid in self.away:
            return
        self.run_plan()  # what is to be moved away must be away before its blocks are written
        match = self.kv.match("root", self.sequence(rid)[:tokens])
        needed = self.kv.blocks_for(tokens) - len(match.nodes) + match.num_idle
        if needed > self.kv.num_free:
            return
        self.kv.allocate(rid, tokens, match, "root")
        self.tokens[rid] = tokens
        self.write(rid, match.num_tokens, tokens)
        self.kv.publish(rid, self.sequence(rid), tokens)

    @rule(rid=st.integers(0, 5))
    def grow(self, rid: int) -> None:
        if rid not in self.tokens or self.tokens[rid] == 40:
            return
        self.run_plan()
        count = self.tokens[rid]
        if count % SIZE == 0:
            if not self.kv.num_free:
                return
            self.kv.grow(rid)
        self.tokens[rid] = count + 1
        self.write(rid, count, count + 1)
        self.kv.publish(rid, self.sequence(rid), count + 1)

    @rule(rid=st.integers(0, 5))
    def swap_out(self, rid: int) -> None:
        if rid not in self.tokens:
            return
        wanted = self.swap.slots_for(rid, self.tokens[rid])
        if wanted > self.swap.pool.num_free:
            with pytest.raises(ValueError, match="host slots wanted"):
                self.swap.out(rid, self.tokens[rid])
            return
        copies = self.swap.out(rid, self.tokens[rid])
        assert len(copies) == 2 * wanted
        self.out += copies
        self.kv.release(rid)
        self.away[rid] = self.tokens.pop(rid)

    @rule(rid=st.integers(0, 5))
    def swap_in(self, rid: int) -> None:
        if rid not in self.away:
            return
        tokens = self.away[rid] + 1
        match = self.kv.match("root", self.sequence(rid)[:tokens])
        if not self.swap.usable(rid, match):
            assert self.swap.get(rid).first > len(match.nodes) or match.num_tokens >= self.away[rid]
            self.swap.drop(rid)
            del self.away[rid]
            return
        if self.kv.blocks_for(tokens) - len(match.nodes) + match.num_idle > self.kv.num_free:
            return
        _, copies = self.swap.back(rid, tokens, match, "root")
        self.back += copies
        self.tokens[rid] = self.away.pop(rid)
        self.run_plan()
        # The block for the next token may be new: it is given back to the twin's own count by growing over it.
        self.tokens[rid] += 1
        self.write(rid, self.tokens[rid] - 1, self.tokens[rid])

    @rule(rid=st.integers(0, 5))
    def abort(self, rid: int) -> None:
        self.swap.drop(rid)
        self.kv.release(rid)
        self.tokens.pop(rid, None)
        self.away.pop(rid, None)

    @rule()
    def reset(self) -> None:
        self.kv.reset_prefixes()

    @rule()
    def run_plan(self) -> None:
        assert len({(s.group, s.host_block) for s in self.out}) == len(self.out), "a slot is written twice in a plan"
        for swap in self.out:
            self.host[swap.group, swap.host_block] = self.device[swap.group, swap.device_block]
        for swap in self.back:
            self.device[swap.group, swap.device_block] = self.host[swap.group, swap.host_block]
        self.out, self.back = [], []
        self.swap.pool.seal()

    @invariant()
    def books_agree(self) -> None:
        assert self.kv.problems(set(self.tokens)) == []
        assert self.swap.pool.problems(self.swap.slots()) == []
        assert self.swap.request_ids() == set(self.away)
        for rid in self.tokens:
            self.check(rid)


TestSwaps = SwapMachine.TestCase
TestSwaps.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_slot_that_the_plan_touches_is_not_handed_out_before_the_next():
    pool = HostPool(2)
    first = pool.allocate(2)
    pool.release(first)
    assert (pool.num_free, pool.num_used) == (0, 0)
    pool.seal()
    assert pool.num_free == 2
    held = pool.allocate(1)
    pool.seal()
    pool.read(held)
    pool.release(held)
    assert pool.num_free == 1
    with pytest.raises(ValueError, match="2 host slots wanted, 1 free"):
        pool.allocate(2)
    pool.seal()
    assert sorted(pool.allocate(2)) == [0, 1]


def test_errors_name_what_is_wrong():
    kv = KVManager(SPECS, num_blocks=8, block_size=SIZE)
    swap = SwapSpace(kv, HostPool(4))
    kv.allocate(1, 8, NO_MATCH, "root")
    swap.out(1, 8)
    with pytest.raises(ValueError, match="request 1 is swapped out already"):
        swap.out(1, 8)
    with pytest.raises(ValueError, match="host slot 3 is freed, but nobody holds it"):
        swap.pool.release([3])
    with pytest.raises(ValueError, match="num_slots is -1"):
        HostPool(-1)
    assert swap.pool.problems([])

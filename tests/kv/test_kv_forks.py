"""Forks, writes, frees and evictions in any order, against a memory whose every cell is known."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from foliolm.core.kvspec import KVSpec
from foliolm.kv import KVManager

GROUPS, BLOCKS, SIZE = 2, 14, 2
SPECS = [KVSpec("near", 1, 4), KVSpec("far", 2, 8)]


def manager(num_blocks=BLOCKS, size=SIZE):
    return KVManager(SPECS, num_blocks, size)


class ForkMachine(RuleBasedStateMachine):
    """Writes reach the memory when they are planned, as early as can be; what a step reads is looked at when it is
    completed, as late as can be: a block that is handed out too soon shows in between.
    """

    @initialize(depth=st.integers(0, 2))
    def begin(self, depth):
        self.kv = manager()
        self.depth = depth
        self.memory = [[[None] * SIZE for _ in range(BLOCKS)] for _ in range(GROUPS)]
        self.tokens = {}  # by request: what it should read, position by position
        self.salts = {}
        self.last_step = {}
        self.families = {}  # by request: who shares a reservation
        self.flights = []
        self.step_id = 0
        self.next_id = 0

    # --- what requests do

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), salt=st.sampled_from([None, "a"]))
    def admit(self, tokens, salt):
        match = self.kv.match(salt or "", tokens)
        needed = self.kv.blocks_for(len(tokens)) - len(match.nodes) + match.num_idle
        assert match.num_tokens < len(tokens)
        rid = self.new()
        if needed > self.kv.num_free:
            with pytest.raises(ValueError, match="are free"):
                self.kv.allocate(rid, len(tokens), match, salt or "")
            return
        self.kv.allocate(rid, len(tokens), match, salt or "")
        self.tokens[rid], self.salts[rid] = [], salt or ""
        for position, token in enumerate(tokens):
            if position >= match.num_tokens:
                self.write(rid, position, token)
            self.tokens[rid].append((self.salts[rid], tuple(tokens[: position + 1])))
        self.run(rid)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data, token):
        rid = self.any(data)
        position = len(self.tokens[rid])
        before = self.kv.num_free
        try:
            if position % SIZE == 0:
                self.kv.grow(rid)
            elif self.kv.is_shared(rid, position):
                _, copies = self.kv.own(rid, position, self.fence(rid))
                assert len(copies) == GROUPS
                for copy in copies:
                    self.memory[copy.group][copy.target] = list(self.memory[copy.group][copy.source])
        except ValueError:
            assert before == 0, "it was refused although there was room"
            return
        path = self.tokens[rid][-1][1]
        self.tokens[rid].append((self.salts[rid], (*path, token)))
        self.write(rid, position, token)
        self.run(rid)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data):
        parent = self.any(data)
        count = data.draw(st.integers(1, len(self.tokens[parent])))
        child, free = self.new(), self.kv.num_free
        self.kv.fork(child, parent, count, is_public=data.draw(st.booleans()))
        assert self.kv.num_free == free, "a fork takes no block"
        self.tokens[child], self.salts[child] = self.tokens[parent][:count], self.salts[parent]
        self.last_step[child] = self.last_step[parent]
        if parent in self.families:
            self.families[child] = self.families[parent]
            self.families[child].append(child)

    @precondition(lambda self: any(rid not in self.families for rid in self.tokens))
    @rule(data=st.data())
    def reserve(self, data):
        rid = data.draw(st.sampled_from([rid for rid in self.tokens if rid not in self.families]))
        count = data.draw(st.integers(0, max(0, self.kv.num_free)))
        self.kv.reserve(rid, count)
        self.families[rid] = [rid]

    @precondition(lambda self: not self.flights and any(len(one) > 1 for one in self.families.values()))
    @rule(data=st.data())
    def refork(self, data):
        family = data.draw(st.sampled_from([one for one in self.families.values() if len(one) > 1]))
        child, parent = data.draw(st.permutations(family))[:2]
        count = data.draw(st.integers(1, len(self.tokens[parent])))
        self.kv.refork(child, parent, count)
        self.tokens[child] = self.tokens[parent][:count]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data):
        self.free(self.any(data))

    # --- what steps do

    @precondition(lambda self: self.flights)
    @rule()
    def complete(self):
        step_id, rid, cells, ok = self.flights.pop(0)
        for group, block, offset, value in cells:
            assert self.memory[group][block][offset] == value, "a block was written while a step still read it"
        self.kv.complete(step_id)
        if ok and rid in self.tokens:
            path = self.tokens[rid][-1][1]
            self.kv.publish(rid, path, min(len(path), len(cells) // GROUPS))

    @precondition(lambda self: self.flights)
    @rule()
    def fail(self):
        """The newest step raises: nothing of it is published, and its request ends."""
        step_id, rid, cells, _ = self.flights[-1]
        self.flights[-1] = (step_id, rid, cells, False)
        if rid in self.tokens:
            self.free(rid)

    @rule()
    def forget_prefixes(self):
        self.kv.reset_prefixes()

    # --- helpers

    def new(self):
        self.next_id += 1
        return self.next_id

    def any(self, data):
        return data.draw(st.sampled_from(sorted(self.tokens)))

    def fence(self, rid):
        last = self.last_step[rid]
        return last if self.flights and last >= self.flights[0][0] else None

    def write(self, rid, position, token):
        path = (*self.tokens[rid][position - 1][1], token) if position else (token,)
        for group, blocks in enumerate(self.kv.table(rid)):
            self.memory[group][blocks[position // SIZE]][position % SIZE] = (self.salts[rid], path)

    def cells(self, rid):
        return [
            (group, blocks[position // SIZE], position % SIZE, value)
            for group, blocks in enumerate(self.kv.table(rid))
            for position, value in enumerate(self.tokens[rid])
        ]

    def run(self, rid):
        self.step_id += 1
        self.last_step[rid] = self.step_id
        self.flights.append((self.step_id, rid, self.cells(rid), True))
        while len(self.flights) > self.depth:
            self.complete()

    def free(self, rid):
        family = self.families.pop(rid, None)
        if family is not None:
            family.remove(rid)
            if rid == min([rid, *family]):  # who reserved: the others go on without
                for other in family:
                    del self.families[other]
        self.kv.release(rid, self.fence(rid))
        self.kv.release(rid, self.fence(rid))  # a second time is nothing
        del self.tokens[rid], self.salts[rid]

    @invariant()
    def everybody_reads_what_is_his(self):
        if not hasattr(self, "kv"):
            return
        for rid in self.tokens:
            for group, block, offset, value in self.cells(rid):
                assert self.memory[group][block][offset] == value, f"request {rid} reads another's token"

    @invariant()
    def the_books_are_right(self):
        if not hasattr(self, "kv"):
            return
        assert self.kv.problems(set(self.tokens)) == []
        holders = {}
        for rid in self.tokens:
            for block in set(self.kv.table(rid)[0]):
                holders[block] = holders.get(block, 0) + 1
        assert self.kv.num_shared_blocks == sum(count > 1 for count in holders.values())
        usage = self.kv.group_usage()[0]
        assert usage.used == len(holders)
        assert usage.used + usage.free + usage.fenced == usage.total

    def teardown(self):
        if not hasattr(self, "kv"):
            return
        for rid in sorted(self.tokens):
            self.free(rid)
        while self.flights:
            self.complete()
        assert self.kv.num_free == self.kv.num_usable
        assert self.kv.num_shared_blocks == self.kv.num_reserved == 0


ForkMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestForks = ForkMachine.TestCase


def test_a_shared_tail_is_copied_by_whoever_writes_first_and_kept_by_the_last():
    kv = manager(size=4)
    kv.allocate(1, 6, root="")
    kv.fork(2, 1, 6)
    kv.fork(3, 1, 6)
    assert kv.group_usage()[0].used == 2
    assert kv.num_shared_blocks == 2
    old = kv.table(1)[0][1]
    for rid in (1, 2):
        assert kv.is_shared(rid, 6)
        fresh, copies = kv.own(rid, 6)
        assert kv.table(rid)[0] == (kv.table(3)[0][0], fresh[0])
        assert [copy.source for copy in copies if copy.group == 0] == [old]
    assert not kv.is_shared(3, 6)
    assert kv.table(3)[0][1] == old
    assert kv.group_usage()[0].used == 4
    assert kv.problems({1, 2, 3}) == []


def test_a_fork_without_room_for_its_copy_is_refused_whole():
    kv = KVManager(SPECS[:1], 3, 4)
    kv.allocate(1, 6, root="")
    kv.fork(2, 1, 6)
    with pytest.raises(ValueError, match="none is free"):
        kv.own(2, 6)
    assert kv.table(2) == kv.table(1)
    assert kv.problems({1, 2}) == []
    with pytest.raises(ValueError, match="already holds"):
        kv.fork(2, 1, 6)
    with pytest.raises(ValueError, match="has 2 blocks"):
        kv.fork(3, 1, 9)
    with pytest.raises(KeyError):
        kv.fork(3, 9, 1)


def test_a_reservation_is_kept_from_others_and_for_the_family():
    kv = KVManager(SPECS[:1], 9, 4)
    kv.allocate(1, 4, root="")
    kv.reserve(1, 5)
    assert (kv.num_free, kv.num_reserved) == (2, 5)
    with pytest.raises(ValueError, match="2 are free"):
        kv.allocate(2, 12)
    kv.fork(3, 1, 4)
    for rid in (1, 1, 3, 3):
        kv.grow(rid)
    assert (kv.num_free, kv.num_reserved) == (2, 1)
    kv.refork(3, 1, 4)  # gives its two blocks back to the family, not to everybody
    assert (kv.num_free, kv.num_reserved) == (2, 3)
    kv.release(1)
    kv.release(3)
    assert (kv.num_free, kv.num_reserved) == (8, 0)


def test_a_block_that_others_may_find_is_not_written_in_place():
    kv = manager(size=2)
    kv.allocate(1, 4, root="")
    kv.publish(1, [5, 6, 7, 8], 4)
    kv.fork(2, 1, 3)
    kv.release(1)
    assert kv.is_shared(2, 3), "nobody else holds it, but the prefix index does"
    kv.own(2, 3)
    assert kv.match("", [5, 6, 7, 8, 9]).num_tokens == 4

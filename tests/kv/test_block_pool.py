"""The block pool against a naive twin, in any order of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from foliolm.kv import NULL_BLOCK, BlockPool


class PoolMachine(RuleBasedStateMachine):
    """The twin is a dict of counts and a dict of fences; it knows nothing of stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.counts: dict[int, int] = {}
        self.fences: dict[int, int] = {}
        self.held: list[list[int]] = []
        self.step = 0

    def expected_free(self) -> int:
        return 11 - len(self.counts) - len(self.fences)

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        if count > self.expected_free():
            with pytest.raises(ValueError, match="free"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert NULL_BLOCK not in blocks
        for block in blocks:
            assert block not in self.counts, "handed out while in use"
            assert block not in self.fences, "handed out while a step in flight reads it"
            self.counts[block] = 1
        if blocks:
            self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        self.pool.share(blocks)
        self.held.append(list(blocks))
        for block in blocks:
            self.counts[block] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), ahead=st.integers(-1, 2))
    def release(self, data, ahead: int) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        fence = None if ahead < 0 else self.step + 1 + ahead
        unheld = self.pool.release(blocks, fence)
        gone = [block for block in blocks if self.counts[block] == 1]
        assert unheld == len(gone)
        for block in blocks:
            self.counts[block] -= 1
            if not self.counts[block]:
                del self.counts[block]
                if fence is not None:
                    self.fences[block] = fence

    @rule()
    def complete(self) -> None:
        self.step += 1
        self.pool.complete(self.step)
        self.fences = {block: fence for block, fence in self.fences.items() if fence > self.step}

    @rule(block=st.integers(0, 11))
    def double_free_is_refused(self, block: int) -> None:
        if block not in self.counts:
            with pytest.raises(ValueError, match="nobody holds"):
                self.pool.release([block])
            with pytest.raises(ValueError, match="not in use"):
                self.pool.share([block])

    @invariant()
    def books_agree(self) -> None:
        assert self.pool.problems() == []
        assert self.pool.num_free == self.expected_free()
        assert self.pool.num_fenced == len(self.fences)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=50)


def test_freed_tail_is_handed_out_before_the_head():
    pool = BlockPool(9)
    blocks = pool.allocate(4)
    assert blocks == [1, 2, 3, 4]
    pool.release(blocks)
    assert pool.allocate(3) == [4, 3, 2]


def test_fenced_blocks_come_back_with_their_step_or_a_later_one():
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.release(first, fence=3)
    pool.release(second, fence=5)
    pool.complete(2)
    assert (pool.num_free, pool.num_fenced) == (0, 4)
    pool.complete(4)
    assert (pool.num_free, pool.num_fenced) == (2, 2)
    pool.complete(9)
    assert (pool.num_free, pool.num_fenced) == (4, 0)


def test_problems_names_what_was_broken():
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool._empty.append(block)
    assert any("free with 1 references" in problem for problem in pool.problems())
    pool._empty[-1] = NULL_BLOCK
    assert any("null block" in problem for problem in pool.problems())


def test_a_pool_without_a_usable_block_is_refused():
    with pytest.raises(ValueError, match="num_blocks is 1"):
        BlockPool(1)

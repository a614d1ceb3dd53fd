"""The KV manager: tables cover tokens, releases are idempotent, the check finds what is wrong."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from foliolm.core.kvspec import KVSpec
from foliolm.kv import KVManager

SPECS = [KVSpec("full", 2, 16), KVSpec("windowed", 2, 16, window=8)]


class ManagerMachine(RuleBasedStateMachine):
    """The twin counts tokens by request, and derives everything from them."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVManager(SPECS, num_blocks=16, block_size=4)
        self.blocks: dict[int, int] = {}
        self.fenced: dict[int, int] = {}
        self.step = 0

    def free(self) -> int:
        return 15 - sum(self.blocks.values()) - sum(self.fenced.values())

    @rule(rid=st.integers(0, 5), tokens=st.integers(0, 40))
    def allocate(self, rid: int, tokens: int) -> None:
        needed = (tokens + 3) // 4
        if rid in self.blocks or needed > self.free():
            with pytest.raises(ValueError, match=f"request {rid}"):
                self.kv.allocate(rid, tokens)
            return
        table = self.kv.allocate(rid, tokens)
        assert [len(blocks) for blocks in table] == [needed, needed]
        self.blocks[rid] = needed

    @rule(rid=st.integers(0, 5))
    def grow(self, rid: int) -> None:
        if rid not in self.blocks:
            with pytest.raises(KeyError):
                self.kv.grow(rid)
        elif not self.free():
            with pytest.raises(ValueError, match="none is free"):
                self.kv.grow(rid)
        else:
            before = self.kv.table(rid)
            added = self.kv.grow(rid)
            assert self.kv.table(rid) == tuple(old + new for old, new in zip(before, added, strict=True))
            self.blocks[rid] += 1

    @rule(rid=st.integers(0, 5), fenced=st.booleans())
    def release(self, rid: int, fenced: bool) -> None:
        fence = self.step + 1 if fenced else None
        held = self.blocks.pop(rid, 0)
        assert self.kv.release(rid, fence) == held
        assert self.kv.release(rid, fence) == 0
        if fenced:
            self.fenced[self.step + 1] = self.fenced.get(self.step + 1, 0) + held

    @rule()
    def complete(self) -> None:
        self.step += 1
        self.kv.complete(self.step)
        self.fenced.pop(self.step, None)

    @invariant()
    def books_agree(self) -> None:
        assert self.kv.problems(set(self.blocks)) == []
        assert self.kv.num_free == self.free()
        assert {rid: self.kv.holds(rid) for rid in range(6) if self.kv.holds(rid)} == {
            rid: count for rid, count in self.blocks.items() if count
        }
        for usage in self.kv.group_usage():
            assert usage.used + usage.free + usage.fenced == usage.total == 15


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=50, stateful_step_count=40)


@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
def test_waste_is_at_most_a_block_less_one_token(block_size):
    kv = KVManager(SPECS[:1], num_blocks=200, block_size=block_size)
    for tokens in range(1, 150):
        waste = kv.blocks_for(tokens) * block_size - tokens
        assert 0 <= waste <= block_size - 1


def test_problems_finds_a_holder_that_is_not_live_and_a_wrong_count():
    kv = KVManager(SPECS[:1], num_blocks=8, block_size=4)
    kv.allocate(1, 8)
    assert kv.problems({1}) == []
    assert "not live" in kv.problems(set())[0]
    kv._first.share([1])
    assert any("tables hold it 1 times" in problem for problem in kv.problems({1}))


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="at least one KV group"):
        KVManager([], 8, 4)
    with pytest.raises(ValueError, match="block_size is 0"):
        KVManager(SPECS, 8, 0)

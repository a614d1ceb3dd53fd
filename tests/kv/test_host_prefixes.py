"""Evicted prefixes in host slots: when they are found, which go first, and how often they are wanted again."""

from __future__ import annotations

import pytest

from foliolm.core.kvspec import KVSpec
from foliolm.kv import HostPool, KVManager

SPECS = [KVSpec("near", 1, 4), KVSpec("far", 2, 8)]
TOKENS = list(range(8))  # four blocks of two


def kept(slots: int) -> tuple[KVManager, HostPool]:
    """A pool of four blocks that all hold one idle prefix, and a host pool."""
    kv = KVManager(SPECS, 5, 2)
    pool = HostPool(slots)
    kv.offload_to(pool, lambda node: True)
    kv.allocate(1, 8, root="")
    kv.publish(1, TOKENS, 8)
    kv.release(1)
    return kv, pool


def found(kv: KVManager) -> tuple[int, int]:
    """Blocks of the prefix on the device, and behind them on the host."""
    match = kv.match("", [*TOKENS, 99])
    return len(match.nodes), len(match.on_host)


def evict(kv: KVManager, count: int, rid: int = 2) -> None:
    kv.allocate(rid, 2 * count)
    kv.release(rid)


def seal(kv: KVManager, pool: HostPool):
    moves, offloaded = kv.host.seal()
    pool.seal()
    return moves, offloaded


def test_a_copy_is_found_once_its_step_is_committed():
    kv, pool = kept(4)
    evict(kv, 2)
    assert found(kv) == (2, 0), "the plan that copies is being made"
    moves, offloaded = seal(kv, pool)
    assert found(kv) == (2, 0), "the step that copies is in flight"
    assert [(move.group, move.device_block) for move in moves] == [(0, 4), (1, 4), (0, 3), (1, 3)]
    assert len({move.host_block for move in moves}) == 2
    generation = kv.prefix_generation
    kv.host.written(offloaded)
    assert kv.prefix_generation > generation, "who looked before must look again"
    assert found(kv) == (2, 2)
    assert kv.problems() == []


def test_a_copy_whose_step_failed_is_not_found():
    kv, pool = kept(4)
    evict(kv, 2)
    _, offloaded = seal(kv, pool)
    kv.host.failed(offloaded)
    assert found(kv) == (2, 0)
    assert pool.num_free == 4
    assert kv.problems() == []


def test_the_tail_goes_first_where_the_host_has_less_room_than_is_evicted_at_once():
    kv, pool = kept(2)
    evict(kv, 4)
    moves, offloaded = seal(kv, pool)
    assert len(offloaded) == 2
    assert len(moves) == 4
    kv.host.written(offloaded)
    assert found(kv) == (0, 2)
    assert (kv.evicted_blocks, kv.offloaded_blocks) == (4, 2)
    # Whoever gives way takes the tail's slot, not the head's.
    kv.host.reclaim(1)
    assert found(kv) == (0, 1)


def test_what_the_plan_reads_is_not_given_away_by_it():
    kv, pool = kept(2)
    evict(kv, 4)
    kv.host.written(seal(kv, pool)[1])
    match = kv.match("", [*TOKENS, 99])
    table, copies = kv.allocate_from_host(3, 8, match, "")
    assert [(copy.group, copy.device_block) for copy in copies] == [(g, table[g][i]) for g in (0, 1) for i in (0, 1)]
    assert kv.host.room(1) == 0
    kv.host.reclaim(1)
    assert len(kv.host) == 2
    seal(kv, pool)
    assert kv.host.room(1) == 1
    kv.publish(3, TOKENS, 4)
    assert found(kv) == (2, 0), "on the device again"
    kv.host.reclaim(2)
    assert found(kv) == (2, 0), "the host's copy was one too many"
    assert kv.problems() == []


def test_a_block_that_the_host_has_already_is_not_copied_again():
    kv, pool = kept(4)
    evict(kv, 4)
    kv.host.written(seal(kv, pool)[1])
    kv.allocate_from_host(3, 8, kv.match("", [*TOKENS, 99]), "")
    seal(kv, pool)
    kv.publish(3, TOKENS, 8)
    kv.release(3)
    evict(kv, 4)
    assert seal(kv, pool) == ([], [])
    assert found(kv) == (0, 4)
    assert kv.host.moved_blocks == 4
    assert kv.offloaded_blocks == 8


def test_reuse_is_measured_by_copies_that_were_wanted_or_had_to_go():
    kv, pool = kept(4)
    assert kv.host.reuse.rate == 0.5, "nothing is known yet"
    evict(kv, 4)
    kv.host.written(seal(kv, pool)[1])
    assert kv.host.reuse.rate == 0.5, "nothing has come out yet"
    kv.host.reclaim(2)
    assert kv.host.reuse.rate == pytest.approx(8 / 18)
    match = kv.match("", [*TOKENS, 99])
    for _ in range(2):
        kv.host.read(match.on_host)
    assert kv.host.reuse.rate == pytest.approx(12 / 20)
    kv.reset_prefixes()
    assert kv.host.reuse.rate == pytest.approx(12 / 20), "an order says nothing"


def test_only_what_the_plan_was_given_can_be_called_off():
    pool = HostPool(2)
    (slot,) = pool.allocate(1)
    pool.cancel(slot)
    assert pool.num_free == 2
    with pytest.raises(ValueError, match=f"host slot {slot} is not one"):
        pool.cancel(slot)

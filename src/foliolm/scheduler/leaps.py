"""Runs of like steps taken at once: the same members decode a token each, and nothing is decided.

A virtual run whose steps nobody reads one by one need not plan and commit each of them. What is done here is what so
many calls of ``schedule`` and ``commit`` would have done, in their order: blocks grow and are published step by step.
The last of the steps may be one in which members end, where nobody waits.
"""

from __future__ import annotations

from foliolm.scheduler.request import Request
from foliolm.scheduler.state import SchedulerState


def like_steps(state: SchedulerState, is_full: bool) -> int:
    """How many of the next steps only decode, whatever they take: none admits, preempts or evicts for room.

    Members end in the last of them at most, and in none where somebody waits who might take their place. 0 where that
    cannot be said: a step is in flight, a prompt is under way, or somebody waits who might be let in.

    Args:
        state: the scheduler's.
        is_full: nobody may join those who run until one of them leaves.
    """
    decodes, kv = state.decodes, state.kv
    if not decodes or state.prefilling or state.flights or state.swap_notes:
        return 0
    if state.forked or state.searches:
        return 0  # blocks are copied, or come out of a reservation
    somebody_waits = bool(state.num_waiting)
    if somebody_waits and not is_full:
        return 0
    count = decodes.next_end() - decodes.tick + (not somebody_waits)
    if count < 1:
        return 0
    # Copies of what is evicted belong to a step, so that no leap evicts where these may be made.
    free, size = kv.num_free if kv.host is None else kv.num_free - kv.num_idle, state.config.block_size
    if free < len(decodes) * -(-count // size):  # not surely enough: count what each step takes
        crossing = decodes.crossing_by_tick()
        for index in range(count):
            free -= len(crossing[(decodes.tick + index) % size])
            if free < 0:
                return index
    return count


def leap(state: SchedulerState, count: int) -> tuple[list[int], list[Request]]:
    """Take ``count`` of the steps that ``like_steps`` promised.

    Returns:
        The blocks in use after each (those of members that end in it included), and the members that ended in the last:
        they have left the decode set, in state ENDING.
    """
    decodes, kv, caching = state.decodes, state.kv, state.config.enable_prefix_caching
    crossing, size = decodes.crossing_by_tick(), state.config.block_size
    in_use = kv.num_usable - kv.num_free - kv.num_fenced
    used: list[int] = []
    growing: list[int] = []
    first, last = decodes.tick, decodes.tick + count - 1
    ends = decodes.next_end() == last
    publishing = caching and decodes.answering
    for tick in range(first, last + 1):
        if crosses := crossing[tick % size]:
            growing += crosses
            in_use += len(crosses)
        used.append(in_use)
        if publishing and not (ends and tick == last):
            kv.grow_each(growing)
            growing.clear()
            _publish(state, tick)
    kv.grow_each(growing)
    state.counters.steps += count
    if not ends:
        decodes.pass_ticks(count)
        return used, []
    decodes.pass_ticks(count - 1)
    ending = decodes.advance()
    if publishing:
        _publish(state, last)
    if caching:
        for request in ending:
            kv.publish(request.request_id, request.keys, request.num_computed)
    return used, ending


def _publish(state: SchedulerState, tick: int) -> None:
    """Blocks of answers that a step has filled. A block whose content is the prompt's was published with the prompt."""
    for request in state.decodes.filled(tick):
        if request.content is not request.tokens:
            state.kv.publish(request.request_id, request.keys, request.offset + tick + 1)

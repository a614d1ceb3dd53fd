"""Runs of like steps taken at once: the same members decode a token each, and nothing is decided.

A virtual run whose steps nobody reads one by one need not plan and commit each of them. What is done here is what so
many calls of ``schedule`` and ``commit`` would have done, in their order: blocks grow and are published step by step.
"""

from __future__ import annotations

from foliolm.scheduler.state import SchedulerState


def like_steps(state: SchedulerState, is_full: bool) -> int:
    """How many of the next steps only decode, whatever they take: none ends, admits, preempts or evicts for room.

    0 where that cannot be said: a step is in flight, a prompt is under way, or somebody waits who might be let in.

    Args:
        state: the scheduler's.
        is_full: nobody may join those who run until one of them leaves.
    """
    decodes, kv = state.decodes, state.kv
    if not decodes or state.prefilling or state.flights or state.swap_notes:
        return 0
    if state.forked or state.searches:
        return 0  # blocks are copied, or come out of a reservation
    if len(state.waiting) and not is_full:
        return 0
    count = decodes.next_end() - decodes.tick
    if count < 1:
        return 0
    # Copies of what is evicted belong to a step, so that no leap evicts where these may be made.
    free, size = kv.num_free if kv.host is None else kv.num_free - kv.num_idle, state.config.block_size
    if free < len(decodes) * -(-count // size):  # not surely enough: count what each step takes
        for index in range(count):
            free -= len(decodes.crossing_at(decodes.tick + index))
            if free < 0:
                return index
    return count


def leap(state: SchedulerState, count: int) -> list[int]:
    """Take ``count`` of the steps that ``like_steps`` promised; returns the blocks in use after each."""
    decodes, kv = state.decodes, state.kv
    in_use = kv.num_usable - kv.num_free - kv.num_fenced
    used: list[int] = []
    growing: list[int] = []
    publishing = state.config.enable_prefix_caching and decodes.answering
    for tick in range(decodes.tick, decodes.tick + count):
        crossing = decodes.crossing_at(tick)
        if crossing:
            growing.extend(crossing)
            in_use += len(crossing)
        if publishing:
            kv.grow_each(growing)
            growing.clear()
            # A block whose content is the prompt's was published with the prompt.
            for request in decodes.filled(tick):
                if request.content is not request.tokens:
                    kv.publish(request.request_id, request.content, request.offset + tick + 1)
        used.append(in_use)
    kv.grow_each(growing)
    decodes.pass_ticks(count)
    state.counters.steps += count
    return used

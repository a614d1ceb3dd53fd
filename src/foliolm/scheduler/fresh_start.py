"""A fresh start after planning raised half-way: nothing that was being changed is relied upon."""

from __future__ import annotations

from foliolm.kv import KVManager
from foliolm.scheduler.state import Flight, SchedulerState


def fresh_state(old: SchedulerState) -> SchedulerState:
    """A state in which nobody lives and all memory is free, once the steps in flight are committed.

    Whatever raised may have left any of the books half-written, so that none of them is mended: every request is
    forgotten, and every prefix on the device and on the host. What must go on is taken over: the steps in flight, which
    still write to the memory; whom the executor is to forget; versions that it knows batches by; totals.
    """
    kv = KVManager(old.kv.specs, old.kv.num_usable + 1, old.kv.block_size)
    kv.evicted_blocks = old.kv.evicted_blocks
    state = SchedulerState(old.config, kv)
    state.counters = old.counters
    state.last_decode_step = old.last_decode_step
    state.decodes.go_on_from(old.decodes)
    state.released = [*old.released, *old.requests]
    if old.flights:
        state.flights.extend(Flight(flight.step_id, -1) for flight in old.flights)
        kv.allocate(0, kv.num_usable * kv.block_size)
        kv.release(0, fence=old.flights[-1].step_id)
    return state

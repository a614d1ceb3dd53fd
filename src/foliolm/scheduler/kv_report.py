"""Who holds the KV memory, and what it is worth: the answer to ``GET /debug/kv``."""

from __future__ import annotations

from typing import Any

from foliolm.kv.report import pool_report, prefix_report
from foliolm.scheduler.request import Request, State
from foliolm.scheduler.state import SchedulerState

MOST_OWNERS = 1000
"""Requests that a report lists, those with most blocks first."""


def kv_report(state: SchedulerState) -> dict[str, Any]:
    """A report that can be written as JSON. O(blocks + requests); nothing is changed.

    Counts are blocks of one KV group and tokens; ``waste`` is what lies unused in last blocks, against the bound of
    p − 1 tokens a request. ``hits`` are prompt tokens at first admissions, by where they were found: in the prefix
    cache on the device, in what the host keeps of it, or with a sibling that had just computed them; what was computed,
    lost and found again counts for none. Of the host's blocks requests that gave way hold those ``used``, evicted
    prefixes those ``cached``; ``reuse`` is how often a block that was moved there is wanted again, as it looks so far.
    """
    kv, counters = state.kv, state.counters
    owners = sorted((_owner(state, request) for request in state.running()), key=lambda one: -one["blocks"])
    unused = sum(one["unused_tokens"] for one in owners)
    queries = counters.prefix_queries + counters.forked_tokens
    sources = {
        "prefix_cache": counters.prefix_hits - counters.host_hits,
        "host": counters.host_hits,
        "siblings": counters.forked_tokens,
    }
    return {
        **pool_report(kv),
        "owners": owners[:MOST_OWNERS],
        "num_owners": len(owners),
        "num_waiting": state.num_waiting,
        "host": {
            "blocks": state.swap.pool.num_slots,
            "used": len(state.swap.slots()),
            "requests": sorted(state.swap.request_ids()),
            "cached": 0 if kv.host is None else len(kv.host),
            "reuse": None if kv.host is None else round(kv.host.reuse.rate, 5),
            "moved_blocks": 0 if kv.host is None else kv.host.moved_blocks,
            "loaded_blocks": counters.loaded_blocks,
        },
        "prefixes": prefix_report(kv),
        "hits": {
            "query_tokens": queries,
            "sources": {
                name: {"hit_tokens": hits, "ratio": round(hits / queries, 5) if queries else 0.0}
                for name, hits in sources.items()
            },
        },
        "copied_blocks": counters.copied_blocks,
        "evicted_blocks": kv.evicted_blocks,
        "offloaded_blocks": kv.offloaded_blocks,
        "waste": {"tokens": unused, "bound_tokens": len(owners) * (kv.block_size - 1)},
    }


def _owner(state: SchedulerState, request: Request) -> dict[str, Any]:
    kv, rid = state.kv, request.request_id
    held = kv.holds(rid)
    decoding = request.state is State.DECODING
    tokens = request.offset + state.decodes.tick if decoding else request.num_tokens
    shared = sum(kv.holders(block) > 1 for block in kv.table(rid)[0])
    return {
        "request_id": rid,
        "label": request.source.label,
        "state": request.state.value,
        "tokens": tokens,
        "blocks": held,
        "shared_blocks": shared,
        "own_blocks": held - shared,
        "unused_tokens": held * kv.block_size - tokens,
        "cached_tokens": request.num_cached,
    }

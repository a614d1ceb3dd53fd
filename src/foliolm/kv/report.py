"""What lies in the KV memory: blocks by state, by holder, by prefix."""

from __future__ import annotations

from collections import Counter
from typing import Any

from foliolm.kv.block_keys import tokens_of
from foliolm.kv.manager import KVManager
from foliolm.kv.prefix import Node

TOP = 10
"""Prefixes that a report names."""


def pool_report(kv: KVManager) -> dict[str, Any]:
    """Blocks by KV group and state; sharing; what reservations keep. O(blocks)."""
    groups = [
        {
            "group": spec.name,
            "total": usage.total,
            "used": usage.used,
            "free": usage.free,
            "fenced": usage.fenced,
            "idle_cached": usage.idle,
            "bytes_per_block": spec.bytes_per_block(kv.block_size),
        }
        for spec, usage in zip(kv.specs, kv.group_usage(), strict=True)
    ]
    holders = Counter(kv.holder_counts())
    return {
        "block_size": kv.block_size,
        "groups": groups,
        "reserved_blocks": kv.num_reserved,
        "shared": {
            "blocks": sum(count for number, count in holders.items() if number > 1),
            "saved_blocks": sum((number - 1) * count for number, count in holders.items()),
            "by_holders": {str(number): holders[number] for number in sorted(holders)},
        },
        "idle_cached": {"blocks": kv.num_idle, "tokens": kv.num_idle * kv.block_size},
    }


def prefix_report(kv: KVManager) -> list[dict[str, Any]]:
    """The prefixes behind which most blocks hang, those that contain one another left out. O(prefix blocks).

    Each is followed from its first block to where it branches or ends: ``tokens`` of it are in common to all that hangs
    behind it, ``blocks`` are kept of it and of that (``host_blocks`` of them on the host alone), ``branches`` begin
    there, ``holders`` requests hold its first block, and ``token_ids`` are its first few.
    """
    found = []
    for root, first in kv.prefix_roots():
        path, node = 1, first
        while len(node.children) == 1:
            node = next(iter(node.children.values()))
            path += 1
        blocks, host_blocks = _count(first)
        adapter, salt = root if isinstance(root, tuple) else (None, root)
        found.append(
            {
                "tokens": path * kv.block_size,
                "blocks": blocks,
                "host_blocks": host_blocks,
                "branches": len(node.children),
                "holders": kv.holders(first.blocks[0]) if first.blocks else 0,
                "adapter": adapter,
                "salted": salt is not None,
                "token_ids": tokens_of(first.key)[:16],
            }
        )
    found.sort(key=lambda one: (-one["blocks"], -one["tokens"]))
    return found[:TOP]


def _count(node: Node) -> tuple[int, int]:
    """Blocks of a node and of all behind it, and how many of them are on the host alone."""
    total, on_host, open_ = 0, 0, [node]
    while open_:
        node = open_.pop()
        total += 1
        on_host += not node.blocks
        open_.extend(node.children.values())
    return total, on_host

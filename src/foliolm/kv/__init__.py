"""Paged KV memory, as bookkeeping: blocks, tables, prefixes, host slots, and what composes them."""

from foliolm.kv.block_keys import BlockKeys
from foliolm.kv.host import HostPool
from foliolm.kv.manager import NO_MATCH, KVManager, KVUsage, PrefixMatch
from foliolm.kv.offload import HostPrefixes
from foliolm.kv.pool import NULL_BLOCK, BlockPool, BlockState
from foliolm.kv.swap import Swapped, SwapSpace

__all__ = [
    "NO_MATCH",
    "NULL_BLOCK",
    "BlockKeys",
    "BlockPool",
    "BlockState",
    "HostPool",
    "HostPrefixes",
    "KVManager",
    "KVUsage",
    "PrefixMatch",
    "SwapSpace",
    "Swapped",
]

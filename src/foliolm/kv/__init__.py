"""Paged KV memory, as bookkeeping: blocks, tables, prefixes, and the manager that composes them."""

from foliolm.kv.manager import NO_MATCH, KVManager, KVUsage, PrefixMatch
from foliolm.kv.pool import NULL_BLOCK, BlockPool, BlockState

__all__ = ["NO_MATCH", "NULL_BLOCK", "BlockPool", "BlockState", "KVManager", "KVUsage", "PrefixMatch"]

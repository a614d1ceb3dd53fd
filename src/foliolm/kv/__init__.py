"""Paged KV memory, as bookkeeping: blocks, tables, and the manager that composes them."""

from foliolm.kv.manager import KVManager, KVUsage
from foliolm.kv.pool import NULL_BLOCK, BlockPool

__all__ = ["NULL_BLOCK", "BlockPool", "KVManager", "KVUsage"]

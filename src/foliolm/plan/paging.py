"""What paging saves against whole reservation, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foliolm.core.errors import ConfigError
from foliolm.plan.checks import whole, wholes
from foliolm.plan.report import Report, Table, count, sentences, share

SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def plan_paging(
    lengths: Sequence[int],
    block_size: int,
    max_len: int | None = None,
    sweep: bool = False,
    common_prefix: int | None = None,
) -> Report:
    """Compare reserving ``max_len`` tokens a sequence with blocks of ``block_size``.

    ``blocks = ceil(L / p)``, so the last block wastes at most ``p − 1`` tokens.

    Args:
        lengths: tokens of each sequence at its longest.
        block_size: p.
        max_len: what a whole reservation sets aside for each; None: the longest.
        sweep: also for block sizes 1 to 256 and each sequence whole.
        common_prefix: leading tokens that every sequence shares with one already cached; what comes after the first
            difference cannot hit, even where it is equal again.

    Raises:
        ConfigError: a number is out of range, or a sequence is longer than ``max_len``.
    """
    lengths = wholes("lengths", lengths)
    whole("block_size", block_size, 1, 2**30)
    longest = max(lengths)
    limit = longest if max_len is None else whole("max_len", max_len)
    if longest > limit:
        raise ConfigError(f"lengths has {longest}; the longest that max_len {limit} can hold is {limit}")
    used = sum(lengths)
    reserved: dict[str, int] = {"allocated_tokens": limit * len(lengths), "unused_tokens": limit * len(lengths) - used}
    paged: dict[str, Any] = {"blocks": [-(-length // block_size) for length in lengths], **_paged(lengths, block_size)}
    numbers: dict[str, Any] = {
        "sequences": len(lengths),
        "used_tokens": used,
        "max_len": limit,
        "block_size": block_size,
        "reserved": reserved,
        "paged": paged,
    }
    sizes = sorted({*SWEEP, block_size}) if sweep else [block_size]
    table = [{"block_size": size, **_paged(lengths, size)} for size in sizes]
    if sweep:
        numbers["sweep"] = table
    if common_prefix is not None:
        numbers["prefix"] = _prefix(lengths, block_size, common_prefix)
    verdict = sentences(
        reservation_verdict(reserved["unused_tokens"], paged["unused_tokens"], used),
        page_size_verdict(lengths, block_size),
        prefix_verdict(numbers.get("prefix"), block_size),
    )
    return Report(numbers, verdict, (_table(reserved, table, used),))


def reservation_verdict(reserved: int, paged: int, used: int) -> str:
    """What whole reservation wastes, or that it wastes nothing more."""
    if reserved == 0 and paged == 0:
        return (
            "All lengths equal the reservation: whole reservation wastes nothing more than paging, and neither wastes."
        )
    if reserved <= paged:
        return (
            f"Reserving whole wastes {count(reserved)} tokens, paging {count(paged)}: with lengths this equal paging "
            "gains nothing here (it still lets sequences share and be preempted)."
        )
    ratio = (used + reserved) / (used + paged)
    return (
        f"Reserving whole leaves {count(reserved)} of {count(used + reserved)} tokens unused "
        f"({share(reserved / (used + reserved))}), paging {count(paged)}: the same memory holds {ratio:.2f} times as "
        "many."
    )


def page_size_verdict(lengths: Sequence[int], block_size: int) -> str | None:
    """What half the block size would save and cost."""
    if block_size == 1:
        return "Blocks of one token waste nothing and cost a table entry and an allocation for every token."
    now, half = _paged(lengths, block_size), _paged(lengths, max(1, block_size // 2))
    return (
        f"Blocks half as big would leave {count(half['unused_tokens'])} unused instead of "
        f"{count(now['unused_tokens'])}, for {count(half['table_entries'])} table entries and allocations instead of "
        f"{count(now['table_entries'])}."
    )


def prefix_verdict(prefix: dict[str, int] | None, block_size: int) -> str | None:
    """How far a common prefix hits."""
    if prefix is None:
        return None
    common, hit = prefix["common_tokens"], prefix["hit_tokens_per_sequence"]
    if hit == 0:
        return (
            f"A prefix of {common} common tokens never hits: the shortest that can is one block of {block_size}, with "
            "a token left to compute."
        )
    return (
        f"Prompts that agree in their first {common} tokens hit in {hit} (whole blocks of {block_size}); all after the "
        "first difference is computed again, even where the text is equal: put what changes last."
    )


def _paged(lengths: Sequence[int], block_size: int) -> dict[str, int]:
    blocks = sum(-(-length // block_size) for length in lengths)
    return {
        "allocated_tokens": blocks * block_size,
        "unused_tokens": blocks * block_size - sum(lengths),
        "max_unused_tokens": len(lengths) * (block_size - 1),
        "table_entries": blocks,
        "allocations": blocks,
    }


def _prefix(lengths: Sequence[int], block_size: int, common: int) -> dict[str, int]:
    """Hits of a cached sequence that agrees in ``common`` tokens; the last token of a prompt is always computed."""
    whole("common_prefix", common, 0)
    hits = [min(common, length - 1) // block_size * block_size for length in lengths]
    return {
        "common_tokens": common,
        "hit_tokens_per_sequence": max(hits),
        "hit_tokens": sum(hits),
        "computed_tokens": sum(lengths) - sum(hits),
    }


def _table(reserved: dict[str, int], sizes: Sequence[dict[str, int]], used: int) -> Table:
    columns = ("block size", "allocated tokens", "unused tokens", "used", "table entries", "allocations")
    lines = [
        (
            "whole",
            count(reserved["allocated_tokens"]),
            count(reserved["unused_tokens"]),
            share(used / reserved["allocated_tokens"]),
            "-",
            "-",
        )
    ]
    lines += [
        (
            count(one["block_size"]),
            count(one["allocated_tokens"]),
            count(one["unused_tokens"]),
            share(used / one["allocated_tokens"]),
            count(one["table_entries"]),
            count(one["allocations"]),
        )
        for one in sizes
    ]
    return Table("Whole reservation against blocks", columns, tuple(lines))

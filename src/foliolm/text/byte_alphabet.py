"""The 256 printable characters that byte-level BPE writes bytes as (GPT-2's table)."""

from __future__ import annotations


def _table() -> dict[str, int]:
    """Printable Latin-1 characters stand for themselves; every other byte gets the next free code point from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF: dict[str, int] = _table()


def bytes_of(token: str) -> bytes | None:
    """The bytes that a token's spelling stands for, or None where it is not written in this alphabet."""
    try:
        return bytes(BYTE_OF[character] for character in token)
    except KeyError:
        return None

"""Grammars that an answer must follow: as data, and as the parts that whoever samples needs of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from foliolm.core.errors import RequestError

KINDS = ("json", "regex", "choice", "grammar")
MAX_SOURCE_CHARACTERS = 256 << 10


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as a client gave it. Plain data: it crosses processes, and two that are equal are compiled once.

    Attributes:
        kind: ``json`` (``source`` is a JSON schema), ``regex``, ``choice`` (a JSON list of strings), or ``grammar``
            (Lark with the rule ``start``, or GBNF with ``root``).
        source: its text.
        field: the request's field that it came from, for errors.
        whitespace: of ``json``, a regex for what may stand between its parts (which may always be nothing); "": no
            whitespace; None: a space, or a line break with an indentation of bounded length.

    Raises:
        RequestError: the text is too long.
    """

    kind: str
    source: str
    field: str = "structured_outputs"
    whitespace: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a grammar of kind {self.kind!r}; it must be one of {', '.join(KINDS)}")
        if len(self.source) > MAX_SOURCE_CHARACTERS:
            raise RequestError(
                f"{self.field} has {len(self.source)} characters; the limit is {MAX_SOURCE_CHARACTERS}", self.field
            )


class GrammarState(Protocol):
    """How far one answer has come in its grammar."""

    @property
    def num_accepted(self) -> int:
        """Tokens taken so far."""
        ...

    @property
    def ended(self) -> bool:
        """True once the answer is complete and nothing may follow."""
        ...

    @property
    def error(self) -> str | None:
        """Why it cannot go on: a token that it does not allow, or a grammar that takes too long; None: all is well."""
        ...

    def accept(self, token_id: int) -> None:
        """Take the next token. After the end, and after an error, it does nothing."""
        ...

    def restart(self, token_ids: Sequence[int]) -> None:
        """Begin again with these tokens."""
        ...


class Grammars(Protocol):
    """Compiles grammars for one vocabulary. Safe to use from several threads."""

    def read_ahead(self) -> None:
        """Do now what the first grammar would otherwise wait for."""
        ...

    def prepare(self, spec: GrammarSpec) -> None:
        """Compile a grammar, or find that it is compiled already.

        Raises:
            RequestError: it is wrong, too large, or allows nothing.
        """
        ...

    def begin(self, spec: GrammarSpec) -> GrammarState:
        """The state before the first token. Raises as ``prepare``."""
        ...

    def masks(self, states: Sequence[GrammarState]) -> bytes:
        """Which tokens may come next, by state: rows of 32-bit little-endian words, bit ``t % 32`` of word ``t // 32``
        for token ``t``; ``ceil(vocabulary / 32)`` words a row. A state in error allows nothing in particular.
        """
        ...

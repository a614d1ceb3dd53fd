"""Where a request's time went, as an answer and the ledger have it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from foliolm.api.choice import Choice
from foliolm.core.timeline import HttpStamps, with_http


@dataclass(frozen=True, slots=True)
class Before:
    """What the HTTP process did before the engine got a request.

    Attributes:
        arrival_ns: HTTP accept, monotonic.
        text_ns: nanoseconds from the parsed body to the tokens.
    """

    arrival_ns: int
    text_ns: int


def stamps_of(choice: Choice, before: Before, closed_ns: int) -> HttpStamps:
    """The HTTP side's stamps of a choice whose answer is handed to the socket at ``closed_ns``."""
    return HttpStamps(before.arrival_ns, before.text_ns, choice.received_ns, choice.last_text_ns, closed_ns)


def timings_of(choice: Choice, before: Before) -> dict[str, Any]:
    """The ``timings`` of a choice that has ended: milliseconds by part up to now; they sum to ``total_ms``.

    Where a stop string ended it, the engine learns of the end from here and its books are not closed yet: then only the
    whole is known.
    """
    now = time.monotonic_ns()
    if choice.timeline is None:
        return {"total_ms": (now - before.arrival_ns) / 1e6, "parts_ms": None}
    whole = with_http(choice.timeline, stamps_of(choice, before, now))
    return {
        "total_ms": whole.total_ns / 1e6,
        "parts_ms": {name: value / 1e6 for name, value in whole.parts},
    }

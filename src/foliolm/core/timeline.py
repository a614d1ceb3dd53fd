"""Where a request's time went, in exact nanoseconds."""

from __future__ import annotations

from foliolm.core.valueclass import valueclass

PARTS = (
    "http",
    "text",
    "queue",
    "host",
    "own_prefill",
    "own_decode",
    "recompute",
    "swap",
    "others_prefill",
    "others_decode",
    "skipped",
    "preempted",
)
"""Kinds of parts in the order in which people read them; ``queue`` and ``skipped`` carry a reason behind a colon."""


@valueclass
class RequestTimeline:
    """A request's life split into parts; ``sum(ns) == end_ns − start_ns`` exactly, and no part is a remainder.

    Attributes:
        start_ns: HTTP accept (or the call), monotonic.
        end_ns: last byte handed to the socket; inside the engine: the commit of its last step, or the abort.
        parts: (name, nanoseconds), names from ``PARTS``, ``queue:<reason>`` and ``skipped:<reason>``; none is zero.
        prefill_of: (request id, nanoseconds): whose prompts made up ``others_prefill``, by their new tokens.
    """

    start_ns: int
    end_ns: int
    parts: tuple[tuple[str, int], ...]
    prefill_of: tuple[tuple[int, int], ...] = ()

    @property
    def total_ns(self) -> int:
        """From start to end."""
        return self.end_ns - self.start_ns

    def by_kind(self) -> dict[str, int]:
        """Nanoseconds by kind of part, reasons summed up."""
        kinds: dict[str, int] = {}
        for name, value in self.parts:
            kind = name.partition(":")[0]
            kinds[kind] = kinds.get(kind, 0) + value
        return kinds


@valueclass
class HttpStamps:
    """What the HTTP process saw of a request; monotonic nanoseconds.

    Attributes:
        arrival_ns: HTTP accept.
        text_ns: nanoseconds of tokenising and templating before the engine got it.
        received_ns: its last output came from the engine.
        last_text_ns: nanoseconds of detokenising that last output.
        closed_ns: its answer was handed to the socket whole.
    """

    arrival_ns: int
    text_ns: int
    received_ns: int
    last_text_ns: int
    closed_ns: int


def ordered(parts: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """Parts that are not zero, in the order of ``PARTS``, reasons by name."""
    rank = {name: index for index, name in enumerate(PARTS)}
    names = sorted(
        (name for name, value in parts.items() if value), key=lambda name: (rank[name.partition(":")[0]], name)
    )
    return tuple((name, parts[name]) for name in names)


def with_http(timeline: RequestTimeline, stamps: HttpStamps) -> RequestTimeline:
    """An engine's timeline with the HTTP process's time before and after it.

    Before: the engine's own books call everything from accept to its queue ``http``; the text work in it is taken out.
    After: from the engine's last commit to the last byte, the last output's text work apart.
    """
    parts = dict(timeline.parts)
    before = parts.get("http", 0)
    text = min(before, stamps.text_ns)
    parts["http"] = before - text
    parts["text"] = text
    end = max(timeline.end_ns, stamps.closed_ns)
    received = min(end, max(timeline.end_ns, stamps.received_ns))
    last_text = min(stamps.last_text_ns, end - received)
    parts["http"] += (received - timeline.end_ns) + (end - received - last_text)
    parts["text"] += last_text
    return RequestTimeline(timeline.start_ns, end, ordered(parts), timeline.prefill_of)

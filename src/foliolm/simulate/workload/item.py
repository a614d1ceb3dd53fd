"""One request of a workload, before anybody serves it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from foliolm.core.request import EngineRequest
from foliolm.core.sampling import SamplingParams
from foliolm.core.valueclass import valueclass

NS = 1_000_000_000
_OWN = 1 << 40
"""Content identities from here up belong to one request alone."""
_BLANK = (0,) * 4096


@valueclass
class Item:
    """A request that is to be sent.

    Attributes:
        time_ns: when, from the workload's start.
        num_prompt, num_output: tokens, at least 1 each.
        content: (identity, tokens) runs from the prompt's first token on: equal beginnings of two contents are equal
            prompts' beginnings. What they do not cover is nobody else's. Empty: nothing is known of what is shared.
        answer: identity of the output's tokens where a later prompt repeats them; 0: nobody's.
        session: of the conversation that it is a turn of, or −1.
        turn: counted from 0.
        label: for records.
        adapter: load id of its LoRA adapter; 0: the bare model.
    """

    time_ns: int
    num_prompt: int
    num_output: int
    content: tuple[tuple[int, int], ...] = ()
    answer: int = 0
    session: int = -1
    turn: int = 0
    label: str = ""
    adapter: int = 0


class Workload(Protocol):
    """Items in order of time, and those that follow upon an end.

    Attributes:
        total: how many items in all, where that is known before.
    """

    total: int | None

    def items(self) -> Iterator[Item]:
        """Those that depend on nobody; times never fall."""
        ...

    def after(self, item: Item, now_ns: int) -> Iterable[Item]:
        """What its sender does next, once an item has been answered (or refused) at ``now_ns``."""
        ...


def as_request(item: Item, request_id: int, start_ns: int = 0, http_ns: int = 0) -> EngineRequest:
    """The request as an engine takes it, ``http_ns`` after it arrived.

    Its tokens have no meaning, but are equal where contents are.
    """
    arrival = item.time_ns + start_ns
    return EngineRequest(
        request_id,
        prompt_tokens(item, request_id),
        sampling(item.num_output),
        arrival_ns=arrival,
        label=item.label,
        share_prefix=bool(item.content),
        sent_ns=arrival + http_ns,
        adapter=item.adapter or None,
        answer_token_ids=(item.answer,) * item.num_output if item.answer else (),
    )


def prompt_tokens(item: Item, request_id: int) -> tuple[int, ...]:
    """One number a token: its content's identity, or the request's own."""
    count = item.num_prompt
    if not item.content:
        return _BLANK[:count] if count <= len(_BLANK) else (0,) * count
    tokens: list[int] = []
    for identity, length in item.content:
        tokens += [identity] * length
    del tokens[count:]
    return tuple(tokens + [_OWN + request_id] * (count - len(tokens)))


def sampling(num_output: int, _known: dict[int, SamplingParams] = {}) -> SamplingParams:  # noqa: B006
    """Greedy parameters that yield exactly ``num_output`` tokens; made once for each number."""
    found = _known.get(num_output)
    if found is None:
        found = _known[num_output] = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    return found

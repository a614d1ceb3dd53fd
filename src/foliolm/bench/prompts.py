"""From a workload's item, whose content is identities, to a prompt that a live server can read.

Equal beginnings of contents become equal beginnings of prompts. The unit is a token id where the server takes ids, else
a short word, which most vocabularies hold as one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foliolm.bench.answer import Answer
from foliolm.core.errors import ConfigError
from foliolm.simulate.workload.item import Item

BLOCK = 16
"""Tokens to which an identity in a recorded trace belongs."""
_OWN = 1 << 40
_WORDS = (
    "the of and to in is it you that he was for on are with as his they be at one have this from or had by hot but "
    "some what there we can out other were all your when up use word how said an each she which do their time if will "
    "way about many then them would write like so these her long make thing see him two has look more day could go "
    "come did my sound no most number who over know water than call first people may down side been now find any new "
    "work part take get place made live where after back little only round man year came show every good me give our "
    "under"
)
WORDS = _WORDS.split()


def token_range(text: str) -> tuple[int, int]:
    """``LOW:HIGH`` of token ids, HIGH left out.

    Raises:
        ConfigError: it is none.
    """
    low, _, high = text.partition(":")
    if not (low.isascii() and low.isdigit() and high.isascii() and high.isdigit() and int(low) < int(high) < 2**31):
        raise ConfigError(f"--token-ids is {text!r}; it must be LOW:HIGH, token ids from LOW to below HIGH")
    return int(low), int(high)


class Contents:
    """Units of prompts: numbers from ``low`` to below ``high``, a function of seed, identity and position alone.

    Args:
        seed: another one gives other prompts, so that a server's cache of an earlier run does not help.
        low, high: of token ids.
    """

    def __init__(self, seed: int, low: int, high: int) -> None:
        self._seed, self._low, self._span = np.uint64(seed % 2**63), np.uint64(low), np.uint64(high - low)

    def units(self, item: Item, number: int, count: int) -> list[int]:
        """The first ``count`` units of an item's prompt and of what follows it; ``number`` is the item's own."""
        identities, positions, left = [], [], count
        for identity, length in item.content:
            # The last run goes on: a later turn holds this answer in its place.
            take = min(length, left)
            identities.append(np.full(take, identity % 2**64, dtype=np.uint64))
            positions.append(np.arange(take, dtype=np.uint64))
            left -= take
        if left:
            identity, start = (_OWN + number, 0) if not item.answer else (item.answer, _length_of(item))
            identities.append(np.full(left, identity % 2**64, dtype=np.uint64))
            positions.append(np.arange(start, start + left, dtype=np.uint64))
        found = self._mixed(np.concatenate(identities), np.concatenate(positions))
        result: list[int] = found.tolist()
        return result

    def _mixed(self, identities: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """SplitMix64's finaliser over both, twice, so that neighbours have nothing in common."""
        with np.errstate(over="ignore"):
            mixed = _finalise(identities * np.uint64(0x9E3779B97F4A7C15) + self._seed)
            mixed = _finalise(mixed + positions * np.uint64(0xD1B54A32D192ED03))
            return mixed % self._span + self._low


def _length_of(item: Item) -> int:
    """Units of the run of its answer's identity that the prompt holds already."""
    return sum(length for identity, length in item.content if identity == item.answer)


def _finalise(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def words(units: list[int]) -> str:
    """Units as words."""
    return " ".join(WORDS[unit % len(WORDS)] for unit in units)


@dataclass(slots=True)
class _Said:
    """What a conversation holds: as units where ids are sent, as text, and as messages; ``count`` units in all."""

    units: list[int]
    text: str
    messages: list[dict[str, str]]
    count: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's place in a request's body, and what a later turn needs of it.

    Attributes:
        fields: ``prompt`` or ``messages``.
        units: all of them.
        text, messages: as sent; empty for ids.
    """

    fields: dict[str, Any]
    units: list[int]
    text: str = ""
    messages: tuple[dict[str, str], ...] = ()


class Prompts:
    """Makes prompts, and keeps what conversations have said, so that a next turn repeats the real answer.

    Args:
        contents: gives the units.
        form: ``token_ids``, ``text`` or ``chat``.
    """

    def __init__(self, contents: Contents, form: str) -> None:
        self.form = form
        self._contents = contents
        self._said: dict[int, _Said] = {}
        self._blocks: dict[tuple[int, tuple[int, ...]], int] = {}

    def make(self, item: Item, number: int) -> Prompt:
        """The prompt of the request with that number."""
        units = self._contents.units(item, number, item.num_prompt)
        said = self._said.get(item.session) if item.turn else None
        if self.form == "token_ids":
            if said is not None:
                units[: said.count] = said.units[: item.num_prompt]
            return Prompt({"prompt": units}, units)
        new = words(units if said is None else units[said.count :])
        if self.form == "text":
            text = new if said is None else f"{said.text} {new}"
            return Prompt({"prompt": text}, units, text)
        if said is not None:
            messages = [*said.messages, {"role": "user", "content": new}]
        elif item.session >= 0 and len(item.content) > 1:
            system = item.content[0][1]
            messages = [
                {"role": "system", "content": words(units[:system])},
                {"role": "user", "content": words(units[system:])},
            ]
        else:
            messages = [{"role": "user", "content": new}]
        return Prompt({"messages": messages}, units, messages=tuple(messages))

    def keeps_text(self, item: Item) -> bool:
        """Whether the answer's text is needed for a next turn."""
        return self.form != "token_ids" and item.session >= 0 and item.answer != 0

    def heard(self, item: Item, prompt: Prompt, answer: Answer) -> None:
        """An answer ended; a next turn of its conversation repeats it, filled up where it came short."""
        if item.session < 0 or not item.answer:
            return
        count = item.num_prompt + item.num_output
        units = self._contents.units(item, answer.number, count)
        units[: item.num_prompt] = prompt.units
        known = answer.token_ids[: item.num_output]
        if self.form == "token_ids":
            units[item.num_prompt : item.num_prompt + len(known)] = known
        text = "".join(answer.text) or words(units[item.num_prompt :])
        messages = [*prompt.messages, {"role": "assistant", "content": text}]
        self._said[item.session] = _Said(units, f"{prompt.text} {text}", messages, count)

    def blocks(self, item: Item, prompt: Prompt) -> list[int]:
        """A number for every full block of the prompt, equal where all units up to its end are; empty where nothing
        is known of what is shared."""
        if not item.content:
            return []
        parent, found = 0, []
        for start in range(0, len(prompt.units) - BLOCK + 1, BLOCK):
            key = (parent, tuple(prompt.units[start : start + BLOCK]))
            parent = self._blocks.setdefault(key, len(self._blocks) + 1)
            found.append(parent)
        return found

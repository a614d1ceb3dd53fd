"""Workloads that are drawn: independent requests, closed loops, and conversations."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from foliolm.core.errors import ConfigError
from foliolm.simulate.workload.distribution import Distribution, distribution
from foliolm.simulate.workload.item import NS, Item


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When senders come.

    Attributes:
        rate: a second, of an open loop; infinite: all at once. None: a closed loop.
        burstiness: shape k of the gamma-distributed intervals: 1 is Poisson, below it bursts, above it is regular; the
            intervals' coefficient of variation is ``1/√k``.
        concurrency: senders of a closed loop: each sends again when it was answered.
    """

    rate: float | None = None
    burstiness: float = 1.0
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise ConfigError("give either --rate (an open loop) or --concurrency (a closed one)")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"--rate is {self.rate}; it must be above 0 (inf: all at once)")
        if not (math.isfinite(self.burstiness) and 1e-3 <= self.burstiness <= 1e6):
            raise ConfigError(f"--burstiness is {self.burstiness}; it must be from 0.001 to 1,000,000")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"--concurrency is {self.concurrency}; it must be at least 1")

    def times(self, rng: random.Random, count: int) -> Iterator[int]:
        """Nanoseconds from the start at which an open loop's senders come; those who begin a closed one come at 0."""
        if self.concurrency is not None:
            yield from (0 for _ in range(min(count, self.concurrency)))
            return
        assert self.rate is not None
        now, mean = 0.0, 0.0 if math.isinf(self.rate) else 1 / self.rate
        for _ in range(count):
            yield round(now * NS)
            now += mean * rng.gammavariate(self.burstiness, 1 / self.burstiness) if mean else 0.0


class Independent:
    """Requests that have nothing to do with each other.

    Args:
        count: of requests.
        arrivals: when they come.
        input_len, output_len: tokens.
        seed: says everything that is drawn.
    """

    def __init__(
        self, count: int, arrivals: Arrivals, input_len: Distribution, output_len: Distribution, seed: int = 0
    ) -> None:
        if count < 1:
            raise ConfigError(f"--requests is {count}; it must be at least 1")
        self.total: int | None = count
        self._arrivals, self._input_len, self._output_len = arrivals, input_len, output_len
        # Times and lengths are drawn apart: another rate then asks the same questions.
        self._when = random.Random(f"{seed}:arrivals")
        self._what = random.Random(f"{seed}:lengths")
        self._left = count

    def items(self) -> Iterator[Item]:
        """All of an open loop, or those that begin a closed one."""
        for time_ns in self._arrivals.times(self._when, self._left):
            yield self._draw(time_ns)

    def after(self, item: Item, now_ns: int) -> Iterable[Item]:
        """A closed loop's next."""
        if self._arrivals.concurrency is None or self._left < 1:
            return ()
        return (self._draw(now_ns),)

    def _draw(self, time_ns: int) -> Item:
        self._left -= 1
        return Item(time_ns, self._input_len.whole(self._what), self._output_len.whole(self._what))


@dataclass(frozen=True, slots=True)
class Dialogue:
    """What conversations look like.

    Attributes:
        turns: of a conversation.
        think_s: seconds from an answer to the next question.
        system_tokens: of the system prompt that comes before everything; 0: none.
        system_prompts: how many different ones there are; conversations take them in turn.
        branches: how often each turn is asked at once (other answers to the same question); the conversation goes on
            from the first, when all were answered.
    """

    turns: Distribution = field(default_factory=lambda: distribution("--turns", "1"))
    think_s: Distribution = field(default_factory=lambda: distribution("--think-s", "0"))
    system_tokens: int = 0
    system_prompts: int = 1
    branches: int = 1

    def __post_init__(self) -> None:
        for flag, value, low in (
            ("--system-prompt-len", self.system_tokens, 0),
            ("--system-prompts", self.system_prompts, 1),
            ("--branches", self.branches, 1),
        ):
            if value < low:
                raise ConfigError(f"{flag} is {value}; it must be at least {low}")


@dataclass(slots=True)
class _Talk:
    """An open conversation: its generator, turns to come, and the tokens said so far."""

    rng: random.Random
    left: int
    said: int
    answered: int = 0


class Sessions:
    """Conversations: each turn's prompt is all that was said before it, and a new question.

    Args:
        count: of conversations.
        arrivals: when they begin; in a closed loop, one begins when another ends.
        input_len, output_len: tokens of each question and answer.
        dialogue: their shape.
        most_tokens: a conversation ends before a turn that would pass so many tokens.
        seed: says everything that is drawn.
    """

    def __init__(
        self,
        count: int,
        arrivals: Arrivals,
        input_len: Distribution,
        output_len: Distribution,
        dialogue: Dialogue,
        most_tokens: int,
        seed: int = 0,
    ) -> None:
        if count < 1:
            raise ConfigError(f"--sessions is {count}; it must be at least 1")
        self.total: int | None = None
        self._arrivals, self._dialogue, self._most, self._seed = arrivals, dialogue, most_tokens, seed
        self._input_len, self._output_len = input_len, output_len
        self._when = random.Random(f"{seed}:arrivals")
        self._count, self._begun = count, 0
        self._open: dict[int, _Talk] = {}

    def items(self) -> Iterator[Item]:
        """First turns."""
        for time_ns in self._arrivals.times(self._when, self._count):
            yield from self._begin(time_ns)

    def after(self, item: Item, now_ns: int) -> Iterable[Item]:
        """The next turn once every branch of this one was answered; or, in a closed loop, the next conversation."""
        talk = self._open[item.session]
        talk.answered += 1
        if item.answer:
            talk.said = item.num_prompt + item.num_output
        if talk.answered < self._dialogue.branches:
            return ()
        think_ns = round(self._dialogue.think_s.real(talk.rng) * NS)
        following = self._turn(item.session, item.turn + 1, now_ns + think_ns) if talk.left else []
        if following:
            return following
        del self._open[item.session]
        if self._arrivals.concurrency is None or self._begun >= self._count:
            return ()
        return self._begin(now_ns)

    def _begin(self, time_ns: int) -> list[Item]:
        number = self._begun
        self._begun += 1
        rng = random.Random(f"{self._seed}:session:{number}")
        talk = _Talk(rng, self._dialogue.turns.whole(rng), self._dialogue.system_tokens)
        self._open[number] = talk
        items = self._turn(number, 0, time_ns)
        if not items:
            raise ConfigError(
                f"the first turn of a conversation has more than the {self._most} tokens that a request may have: "
                "shorten --system-prompt-len, --input-len or --output-len"
            )
        return items

    def _turn(self, session: int, turn: int, time_ns: int) -> list[Item]:
        talk, dialogue = self._open[session], self._dialogue
        talk.left -= 1
        talk.answered = 0
        prompt = talk.said + self._input_len.whole(talk.rng)
        outputs = [self._output_len.whole(talk.rng) for _ in range(dialogue.branches)]
        if prompt + max(outputs) > self._most:
            return []
        system = dialogue.system_tokens
        mine = 2 * dialogue.system_prompts + session
        runs = ((1 + session % dialogue.system_prompts, system),) if system else ()
        content = (*runs, (mine, prompt - system))
        return [
            Item(time_ns, prompt, output, content, 0 if branch else mine, session, turn, f"{session}/{turn}.{branch}")
            for branch, output in enumerate(outputs)
        ]

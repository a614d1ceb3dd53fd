"""One choice being generated: tokens come in from the engine, text goes out to whoever reads."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from foliolm.core.errors import FolioError
from foliolm.core.plan import Decision, DecisionKind
from foliolm.core.request import FinishReason, RequestStamps, TokenLogprobs, TokenOutput
from foliolm.core.sampling import SamplingParams
from foliolm.core.timeline import RequestTimeline


class ChoiceState(enum.StrEnum):
    """Where a choice is that has not ended, as the engine last told."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"


class TextStream(Protocol):
    """Text of one choice: detokenised incrementally, with stop strings looked for."""

    @property
    def stop_reason(self) -> str | None:
        """The stop string that was found, or None."""
        ...

    def push(self, token_id: int) -> str:
        """Text that is certain after this token. Nothing more may be pushed once a stop string was found."""
        ...

    def flush(self) -> str:
        """Text that was held back."""
        ...


class Meter(Protocol):
    """Takes the times of one choice."""

    def tokens(self, count: int, now_ns: int) -> None:
        """``count`` new tokens came at ``now_ns``."""
        ...

    def finish(self, reason: str) -> None:
        """It ended."""
        ...


@dataclass(slots=True)
class Delta:
    """What a choice got since it was last read.

    Attributes:
        text, token_ids, logprobs: new ones; one logprobs entry a token, where asked for.
        finish_reason: set once, on the last delta.
        stop_reason: the stop string or stop token id that ended it, where one did.
        error: a sentence, where finish_reason is ``error``.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


class Choice:
    """A sink of the engine's client that makes text of tokens as they come.

    When it has ended, ``timeline`` is the engine's (None where a stop string ended it: the engine hears of that later),
    ``received_ns`` when its last output came, and ``last_text_ns`` how long that output's text took.

    Text is made here, when tokens arrive, and not when somebody reads: a stop string must end the request even if its
    reader is slow. What a slow reader has not taken piles up in one ``Delta``, which ``max_tokens`` bounds.

    Args:
        index: its place in the answer's ``choices``.
        prompt_token_ids: of its prompt.
        sampling: as the engine has it (``n == 1``).
        text: makes its text.
        notify: called when there is something to read.
        end: called with the request's id when a stop string ended it; must make the engine drop the request.
        meter: takes its times, or None.
        on_turn: called when it is let in for the first time, loses its memory, or comes back.
    """

    def __init__(
        self,
        index: int,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        text: TextStream,
        notify: Callable[[], None],
        end: Callable[[int], None],
        meter: Meter | None = None,
        on_turn: Callable[[], None] | None = None,
    ) -> None:
        self.index = index
        self.prompt_token_ids = prompt_token_ids
        self.sampling = sampling
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.stamps: RequestStamps | None = None
        self.timeline: RequestTimeline | None = None
        self.request_id = 0
        self.received_ns = 0
        self.last_text_ns = 0
        self.finish_reason: FinishReason | None = None
        self.dead: FolioError | None = None
        self.state = ChoiceState.WAITING
        self._text = text
        self._notify = notify
        self._end = end
        self._meter = meter
        self._on_turn = on_turn
        self._delta = Delta()
        self._has_news = False

    def take(self) -> Delta | None:
        """What came since the last call, or None where nothing did."""
        if not self._has_news:
            return None
        delta, self._delta, self._has_news = self._delta, Delta(), False
        return delta

    def on_output(self, output: TokenOutput) -> None:
        """Take a step's tokens."""
        if self.finish_reason is not None:
            return
        self.request_id = output.request_id
        self.received_ns = time.monotonic_ns()
        if self._meter is not None and output.token_ids:
            self._meter.tokens(len(output.token_ids), self.received_ns)
        self.prompt_logprobs.extend(output.prompt_logprobs)
        self.num_cached_tokens = self.num_cached_tokens or output.num_cached_tokens
        ends_here = output.stop_reason is not None and not self.sampling.include_stop_str_in_output
        for position, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            self._delta.token_ids.append(token_id)
            if output.logprobs:
                self._delta.logprobs.append(output.logprobs[position])
            if not (ends_here and position == len(output.token_ids) - 1):
                self._delta.text += self._text.push(token_id)
            if self._text.stop_reason is not None:
                self._finish(FinishReason.STOP, self._text.stop_reason)
                if output.finish_reason is None:
                    self._end(output.request_id)
                return
        if output.finish_reason is not None:
            self.stamps = output.stamps
            self.timeline = output.timeline
            if output.stamps is not None:
                self.num_cached_tokens = output.stamps.num_cached_tokens
            self._delta.error = output.error
            self._delta.text += self._text.flush()
            self._finish(output.finish_reason, self._text.stop_reason or output.stop_reason)
        self._changed()

    def on_decision(self, decision: Decision) -> None:
        """The scheduler let it in, or took its memory."""
        admitted = decision.kind is DecisionKind.ADMIT
        self.state = ChoiceState.RUNNING if admitted else ChoiceState.PREEMPTED
        if self._on_turn is not None:
            self._on_turn()

    def on_error(self, error: FolioError) -> None:
        """The engine is gone, or its time is up."""
        if self.finish_reason is None:
            self.dead = error
            self._delta.error = str(error)
            self._finish(FinishReason.ERROR, None)

    def abandon(self) -> None:
        """Nobody will read it any more."""
        if self.finish_reason is None:
            self._finish(FinishReason.ABORT, None)

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        if self._text.stop_reason is not None:
            reason = FinishReason.STOP
        self.finish_reason = self._delta.finish_reason = reason
        if self.received_ns:
            self.last_text_ns = time.monotonic_ns() - self.received_ns
        self._delta.stop_reason = stop_reason
        if self._meter is not None:
            self._meter.finish(reason.value)
        self._changed()

    def _changed(self) -> None:
        self._has_news = True
        self._notify()

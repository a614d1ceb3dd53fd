"""All choices of one HTTP request: handed to the engine together, read together, given up together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foliolm.api.choice import Choice, ChoiceState, Delta
from foliolm.api.errors import GenerationFailedError, RequestTimeoutError
from foliolm.api.timings import Before, timings_of
from foliolm.core.errors import EngineDeadError, FolioError
from foliolm.core.plan import Decision
from foliolm.core.request import EngineRequest, FinishReason, TokenOutput

if TYPE_CHECKING:
    from foliolm.engine.client import ProcessClient
    from foliolm.engine.routing import OutputSink

Notify = Callable[[], None]
ChoiceMaker = Callable[[Notify, Callable[[int], None], Notify], Choice]


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a request may take, in seconds from its arrival; None: as long as it likes.

    Attributes:
        total_s: to its end.
        queue_s: to the step that lets it in first.
        source: the field or flag that says ``total_s``, for people.
    """

    total_s: float | None = None
    queue_s: float | None = None
    source: str = "timeout"


class _Unread:
    """Takes what nobody reads."""

    def on_output(self, output: TokenOutput) -> None:
        """Nothing."""

    def on_decision(self, decision: Decision) -> None:
        """Nothing."""

    def on_error(self, error: EngineDeadError) -> None:
        """Nothing."""


class Generation:
    """One HTTP request's choices, ``n`` a prompt.

    Args:
        client: the engine's client.
        names: under which an abort may ask for it.
        deadlines: when it is given up.
        on_timeout: called with ``total`` or ``queue`` when that happens.
    """

    def __init__(
        self,
        client: ProcessClient,
        names: frozenset[str] = frozenset(),
        deadlines: Deadlines | None = None,
        on_timeout: Callable[[str], None] | None = None,
    ) -> None:
        self.names = names
        self.turn = asyncio.Event()
        self._client = client
        self._deadlines = deadlines or Deadlines()
        self._on_timeout = on_timeout
        self._timers: list[asyncio.TimerHandle] = []
        self._news = asyncio.Event()
        self._requests: list[EngineRequest] = []
        self._sinks: list[OutputSink] = []
        self._ids: tuple[int, ...] = ()
        self.choices: list[Choice] = []
        self.before: Before | None = None
        self.trace: dict[str, str] = {}

    def add(self, request: EngineRequest, make: ChoiceMaker) -> None:
        """One more choice. ``make`` is given the callbacks that ``Choice`` wants."""
        choice = make(self._news.set, lambda request_id: self._client.abort([request_id]), self.turn.set)
        self._requests.append(request)
        self._sinks.append(choice)
        self.choices.append(choice)

    def add_unread(self, request: EngineRequest) -> None:
        """A hypothesis of a beam search beyond those that become choices."""
        self._requests.append(request)
        self._sinks.append(_Unread())

    async def start(self) -> None:
        """Hand all choices to the engine, all or none, and wait until it takes them.

        Raises:
            RequestError, QueueFullError, EngineDeadError: as the client's ``add``.
            RequestTimeoutError: the engine did not take them in time.
        """
        add = self._client.add(self._requests, self._sinks)
        limits = [seconds for seconds in (self._deadlines.total_s, self._deadlines.queue_s) if seconds is not None]
        if not limits:
            self._ids = await add
            return
        try:
            self._ids = await asyncio.wait_for(add, max(0.0, min(limits) - self._age_s))
        except TimeoutError:
            total = self._deadlines.total_s
            raise self._timed_out("total" if total is not None and total <= min(limits) else "queue") from None
        for phase, seconds in (("total", self._deadlines.total_s), ("queue", self._deadlines.queue_s)):
            if seconds is not None:
                loop = asyncio.get_running_loop()
                self._timers.append(loop.call_later(max(0.0, seconds - self._age_s), self._expire, phase))

    @property
    def state(self) -> ChoiceState:
        """``running`` if any choice is; else ``preempted`` if any is; else ``waiting``."""
        states = {choice.state for choice in self.choices if choice.finish_reason is None}
        for state in (ChoiceState.RUNNING, ChoiceState.PREEMPTED):
            if state in states:
                return state
        return ChoiceState.WAITING if states else ChoiceState.RUNNING

    @property
    def _age_s(self) -> float:
        return (time.monotonic_ns() - self._requests[0].arrival_ns) * 1e-9

    def _expire(self, phase: str) -> None:
        if phase == "queue" and all(choice.state is not ChoiceState.WAITING for choice in self.choices):
            return
        if any(choice.finish_reason is None for choice in self.choices):
            self.fail(self._timed_out(phase))

    def _timed_out(self, phase: str) -> RequestTimeoutError:
        if self._on_timeout is not None:
            self._on_timeout(phase)
        if phase == "queue":
            return RequestTimeoutError(
                f"the request waited {self._age_s:.1f} s to be run; --queue-timeout is {self._deadlines.queue_s:g} s"
            )
        return RequestTimeoutError(
            f"the request took {self._age_s:.1f} s; {self._deadlines.source} is {self._deadlines.total_s:g} s"
        )

    def close(self) -> None:
        """Nobody waits for it any more; deadlines no longer matter."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    @property
    def labels(self) -> list[str]:
        """The choices' names in the ledger."""
        return [
            request.label
            for request, sink in zip(self._requests, self._sinks, strict=True)
            if not isinstance(sink, _Unread)
        ]

    def timings(self, choice: Choice) -> dict[str, Any]:
        """Where a choice's time went up to now; it must have ended."""
        assert self.before is not None
        return timings_of(choice, self.before)

    def abort(self) -> None:
        """Give up what has not ended. Idempotent; whoever reads sees the choices end."""
        self._client.abort(self._ids)
        for choice in self.choices:
            choice.abandon()

    def fail(self, error: FolioError) -> None:
        """End what has not ended with an error that its reader gets to see."""
        self._client.abort(self._ids)
        for choice in self.choices:
            choice.on_error(error)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts, each prompt once however many choices it has."""
        prompts = {id(choice.prompt_token_ids): len(choice.prompt_token_ids) for choice in self.choices}
        return sum(prompts.values())

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, over all choices."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were read from the prefix cache, each prompt once."""
        # The first choice of a prompt computes what is not cached; the others take it from there.
        first: dict[int, int] = {}
        for choice in self.choices:
            first.setdefault(id(choice.prompt_token_ids), choice.num_cached_tokens)
        return sum(first.values())

    async def deltas(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """What comes, as it comes, until every choice has ended."""
        open_choices = len(self.choices)
        while open_choices:
            await self._news.wait()
            self._news.clear()
            for choice in self.choices:
                delta = choice.take()
                if delta is not None:
                    open_choices -= delta.finish_reason is not None
                    yield choice, delta

    async def results(self) -> Sequence[Delta]:
        """The whole of each choice, once all have ended.

        Raises:
            EngineDeadError: the engine died, or the server ends.
            RequestTimeoutError: a deadline has passed.
            GenerationFailedError: the engine ended a choice with an error.
        """
        # Deltas coalesce, so nothing needs to be read before the last choice has ended.
        while any(choice.finish_reason is None for choice in self.choices):
            await self._news.wait()
            self._news.clear()
        for choice in self.choices:
            if choice.dead is not None:
                raise choice.dead
        wholes = [choice.take() or Delta() for choice in self.choices]
        for whole in wholes:
            if whole.finish_reason is FinishReason.ERROR:
                raise GenerationFailedError(whole.error or "the engine ended the request with an error")
        return wholes

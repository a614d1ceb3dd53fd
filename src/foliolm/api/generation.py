"""All choices of one HTTP request: handed to the engine together, read together, given up together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from foliolm.api.choice import Choice, Delta
from foliolm.api.errors import GenerationFailedError
from foliolm.core.errors import EngineDeadError
from foliolm.core.request import EngineRequest, FinishReason

if TYPE_CHECKING:
    from foliolm.engine.client import ProcessClient


class Generation:
    """One HTTP request's choices, ``n`` a prompt.

    Args:
        client: the engine's client.
    """

    def __init__(self, client: ProcessClient) -> None:
        self._client = client
        self._news = asyncio.Event()
        self._requests: list[EngineRequest] = []
        self._ids: tuple[int, ...] = ()
        self.choices: list[Choice] = []

    def add(self, request: EngineRequest, make: Callable[[Callable[[], None], Callable[[int], None]], Choice]) -> None:
        """One more choice. ``make`` is given the two callbacks that ``Choice`` wants."""
        self._requests.append(request)
        self.choices.append(make(self._news.set, lambda request_id: self._client.abort([request_id])))

    async def start(self) -> None:
        """Hand all choices to the engine, all or none, and wait until it takes them.

        Raises:
            RequestError, QueueFullError, EngineDeadError: as the client's ``add``.
        """
        self._ids = await self._client.add(self._requests, self.choices)

    def abort(self) -> None:
        """Give up what has not ended. Idempotent; whoever reads sees the choices end."""
        self._client.abort(self._ids)
        for choice in self.choices:
            choice.abandon()

    def fail(self, error: EngineDeadError) -> None:
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
        cached: dict[int, int] = {}
        for choice in self.choices:
            key = id(choice.prompt_token_ids)
            cached[key] = max(cached.get(key, 0), choice.num_cached_tokens)
        return sum(cached.values())

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
            EngineDeadError: the engine died.
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

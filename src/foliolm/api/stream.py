"""Server-sent events that notice at once when their reader has gone, and answers that do too."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def event(payload: Any) -> bytes:
    """One event with a JSON payload."""
    return b"data: " + _encode(payload) + b"\n\n"


class JSONBytes(Response):
    """A JSON answer, encoded by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return _encode(content)


def comment(words: str) -> bytes:
    """A comment: clients pass over it, and proxies see that the stream lives."""
    return b": " + words.encode() + b"\n\n"


@dataclass(frozen=True, slots=True)
class Comments:
    """What a stream says while it has nothing to say.

    Attributes:
        state: the word to send.
        turn: set when the state has changed in a way that a silent reader should hear of at once.
        every_s: seconds of silence after which the word is sent again; 0: only on a turn.
    """

    state: Callable[[], str]
    turn: asyncio.Event
    every_s: float


class EventStream(Response):
    """Sends events as they come, and comments while none come.

    Starlette's own streaming response looks for a disconnect only when it sends; a request that still waits in the
    queue would live on. Here a task listens for it all the time.

    Args:
        events: encoded events.
        on_close: called when nothing more will be sent: at the end, or as soon as the reader has left (then it must
            make ``events`` end soon). May be called twice.
        headers: more of them.
        comments: None: there are none.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_close: Callable[[], None],
        headers: dict[str, str] | None = None,
        comments: Comments | None = None,
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})},
        )
        # A length would be that of the empty body that the base class was given.
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._events = events
        self._on_close = on_close
        self._comments = comments
        self._sending = False
        self._sent_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it."""
        gone = asyncio.Event()

        async def watch() -> None:
            await disconnected(receive)
            gone.set()
            self._on_close()

        tasks = [asyncio.create_task(watch())]
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if self._comments is not None:
                tasks.append(asyncio.create_task(self._comment(self._comments, send)))
            async for chunk in self._events:
                if gone.is_set():
                    return
                self._sending = True
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                self._sending = False
                self._sent_s = time.monotonic()
            self._sending = True  # no comment comes after the end
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            for task in tasks:
                task.cancel()
            self._on_close()
            await self._events.aclose()

    async def _comment(self, comments: Comments, send: Send) -> None:
        was = comments.state()
        while True:
            await _within(comments.turn, comments.every_s)
            comments.turn.clear()
            state = comments.state()
            # The first admission is no news: tokens follow. That a stream pauses, and goes on, is, also where the turn
            # came at the same time as a sign of life was due.
            changed = state != was and "preempted" in (state, was)
            was = state
            silent = bool(comments.every_s) and time.monotonic() - self._sent_s >= comments.every_s * 0.99
            # While a chunk is on its way the reader is slow, and not in want of signs of life.
            if (changed or silent) and not self._sending:
                words = "resumed" if changed and state == "running" else state
                await send({"type": "http.response.body", "body": comment(words), "more_body": True})
                self._sent_s = time.monotonic()


async def _within(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, for at most so many seconds (0: for ever)."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds or None):
            await event.wait()


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone; the request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Awaitable[Result], on_disconnect: Callable[[], None]) -> Result:
    """Await ``work``; if the client leaves first, call ``on_disconnect`` and go on awaiting what then ends soon."""
    watcher = asyncio.create_task(disconnected(receive))
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((watcher, task), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            on_disconnect()
        return await task
    except asyncio.CancelledError:
        on_disconnect()
        task.cancel()
        raise
    finally:
        watcher.cancel()

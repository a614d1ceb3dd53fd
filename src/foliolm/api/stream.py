"""Server-sent events that notice at once when their reader has gone, and answers that do too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
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


class EventStream(Response):
    """Sends events as they come.

    Starlette's own streaming response looks for a disconnect only when it sends; a request that still waits in the
    queue would live on. Here a task listens for it all the time.

    Args:
        events: encoded events.
        on_close: called when nothing more will be sent: at the end, or as soon as the reader has left (then it must
            make ``events`` end soon). May be called twice.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], on_close: Callable[[], None], headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})},
        )
        # A length would be that of the empty body that the base class was given.
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it."""
        gone = asyncio.Event()

        async def watch() -> None:
            await disconnected(receive)
            gone.set()
            self._on_close()

        watcher = asyncio.create_task(watch())
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in self._events:
                if gone.is_set():
                    return
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watcher.cancel()
            self._on_close()
            await self._events.aclose()


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

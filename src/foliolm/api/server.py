"""Serving, and ending well."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from foliolm.api.options import ServerOptions
from foliolm.api.service import Service


class DrainingServer(uvicorn.Server):
    """Uvicorn, but a first SIGINT or SIGTERM drains before anything is closed; a second one ends at once.

    Args:
        config: uvicorn's.
        service: is told to drain.
        shutdown_timeout_s: how long open requests may take to end.
        on_ready: called once connections are accepted.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        shutdown_timeout_s: float,
        on_ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self.on_ready = on_ready
        self.service = service
        self.shutdown_timeout_s = shutdown_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Remember the event loop (signal handlers run outside of it), listen, and say so."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self.on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; on a second signal, stop waiting."""
        if self._loop is None or self.service.draining:
            self.service.draining = True
            self.force_exit = self.should_exit = True
            return
        self.service.draining = True
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        self._drain = asyncio.ensure_future(self._drained())

    async def _drained(self) -> None:
        try:
            await self.service.drain(self.shutdown_timeout_s)
        finally:
            self.should_exit = True


def serve(
    app: ASGIApp,
    service: Service,
    listener: socket.socket,
    options: ServerOptions,
    on_ready: Callable[[], None],
) -> None:
    """Serve until a signal ends it; the engines are stopped at the end, the port is released last."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        # What has not ended by then was told so already; this only bounds connections that do not read.
        timeout_graceful_shutdown=2,
        timeout_keep_alive=75,
        backlog=2048,
        lifespan="on",
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        server_header=False,
    )
    _allow_many_connections()
    server = DrainingServer(config, service, options.shutdown_timeout, on_ready)
    try:
        server.run(sockets=[listener])
    finally:
        service.client.close()
        listener.close()


def _allow_many_connections() -> None:
    """Raise the soft limit of open files, often 1,024, to the hard one: a connection is a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems refuse their own hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

"""HTTP/1.1 connections of an asyncio client: every byte is stamped when it is read, and connections are used again."""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Protocol
from urllib.parse import urlsplit

import httptools

from foliolm.core.errors import ConfigError

MOST_IDLE = 1024
"""Idle connections that are kept."""


class Reader(Protocol):
    """Takes one answer as it comes."""

    def head(self, status: int, headers: dict[str, str]) -> None:
        """Status and headers (names in small letters)."""
        ...

    def body(self, stamp_ns: int, data: bytes) -> None:
        """A piece of the body, and when it was read (monotonic)."""
        ...

    def ended(self) -> None:
        """The answer is whole."""
        ...

    def failed(self, kind: str, message: str) -> None:
        """It never will be."""
        ...


class Address:
    """Where a server is.

    Args:
        url: like ``http://127.0.0.1:8000``, with or without ``/v1``.
        api_key: its key, or None.

    Raises:
        ConfigError: the URL is none.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"URL is {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"URL is {url!r}; it must be like http://127.0.0.1:8000")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key must be printable ASCII characters")
        self.url = url
        self.host = parts.hostname
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.port = port or (443 if self.tls else 80)
        self.path = parts.path.rstrip("/").removesuffix("/v1")
        host = f"[{self.host}]" if ":" in self.host else self.host
        key = "" if api_key is None else f"authorization: Bearer {api_key}\r\n"
        self._common = f"host: {host}:{self.port}\r\nuser-agent: foliolm-bench\r\n{key}"

    @property
    def is_local(self) -> bool:
        """Whether it is this machine."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def get(self, path: str) -> bytes:
        """A GET request's bytes."""
        return f"GET {self.path}{path} HTTP/1.1\r\n{self._common}accept: application/json\r\n\r\n".encode()

    def post(self, path: str, body: bytes) -> bytes:
        """A POST request's bytes, with a JSON body."""
        head = (
            f"POST {self.path}{path} HTTP/1.1\r\n{self._common}accept: text/event-stream\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Connection(asyncio.Protocol):
    """One connection, which answers one request at a time. Call `ask` only while it is idle."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._reader: Reader | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._stamp = 0
        self._heard = self._headed = False
        self.used = False
        """It has answered before, so that the server may have closed it meanwhile."""

    def ask(self, request: bytes, reader: Reader) -> int:
        """Send a request; returns the monotonic time in nanoseconds."""
        assert self._transport is not None
        assert self._reader is None
        self._reader, self._headers, self._heard, self._headed = reader, {}, False, False
        now = time.monotonic_ns()
        self._transport.write(request)
        return now

    def drop(self) -> None:
        """Close at once; nobody is told."""
        self._reader = None
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Bytes were read."""
        self._stamp = time.monotonic_ns()
        if self._reader is None:
            self.drop()  # nobody asked for anything
            return
        self._heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail("broken_http", f"the answer is no HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """The server closed it, or the network did."""
        self._pool.forget(self)
        reader = self._reader
        if reader is None:
            return
        endless = "content-length" not in self._headers and "chunked" not in self._headers.get("transfer-encoding", "")
        if self._headed and endless and exc is None:
            self._reader = None
            reader.ended()
        elif self.used and not self._heard:
            self._fail("stale", "the server closed the idle connection as it was used again")
        else:
            why = f": {exc}" if exc is not None and str(exc) else ""
            when = "in the middle of the answer" if self._heard else "before it answered"
            self._fail("broken_stream", f"the server closed the connection {when}{why}")

    # --- the parser's calls

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """All headers."""
        status = self._parser.get_status_code()
        if status < 200 or self._reader is None:
            self._headers = {}  # "100 Continue": another head follows
            return
        self._headed = True
        self._reader.head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if self._reader is not None:
            self._reader.body(self._stamp, data)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if not self._headed or self._reader is None:
            return
        reader, self._reader = self._reader, None
        self.used = True
        if self._parser.should_keep_alive() and self._transport is not None and not self._transport.is_closing():
            # A parser that has seen one message takes the next.
            self._pool.keep(self)
        else:
            self.drop()
        reader.ended()

    def _fail(self, kind: str, message: str) -> None:
        reader = self._reader
        self.drop()
        if reader is not None:
            reader.failed(kind, message)


class Pool:
    """Connections to one server: as many as there are requests at once, so that none waits for another.

    Args:
        address: of the server.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.opened = 0
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()

    def idle(self) -> Connection | None:
        """A connection that was used before, the last one first; or None."""
        return self._idle.pop() if self._idle else None

    async def open(self) -> Connection:
        """A new connection.

        Raises:
            OSError: it could not be had.
        """
        address = self.address
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self), address.host, address.port, ssl=address.tls
        )
        self.opened += 1
        self._all.add(connection)
        return connection

    def keep(self, connection: Connection) -> None:
        """It is idle again."""
        if len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.drop()

    def forget(self, connection: Connection) -> None:
        """It is closed."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close all of them."""
        for connection in list(self._all):
            connection.drop()
        self._idle.clear()

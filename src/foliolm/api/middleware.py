"""What happens to every request before and after its handler: its arrival, its id, its log line, its key."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foliolm.api.errors import UnauthorizedError, error_response
from foliolm.api.request_log import RequestLog, figures, now
from foliolm.core.errors import RequestError

REQUEST_ID = b"x-request-id"
MAX_REQUEST_ID = 256
OPEN_PATHS = frozenset({"/health"})
"""Paths that need no key: probes of the machinery around a server have none."""
QUIET_PATHS = frozenset({"/health", "/metrics"})
"""Paths that are asked every few seconds; they are logged only where the answer is an error."""


class Access:
    """ASGI middleware around everything else, errors of the framework's own included.

    Every clock that a client can feel starts here (``arrival_ns`` in the scope, monotonic). A client's ``x-request-id``
    comes back with the answer, and stands in the log and in the answer's id; without one, an id is made.

    Args:
        app: the application.
        log: takes a line a request; None: nobody does.
    """

    def __init__(self, app: ASGIApp, log: RequestLog | None = None) -> None:
        self.app = app
        self.log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope["arrival_ns"] = time.monotonic_ns()
        entry: dict[str, Any] = {}
        scope["log"] = entry
        given = _header(scope, REQUEST_ID)
        status = 0

        async def stamped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message["headers"]
                own = next((value for name, value in headers if name == REQUEST_ID), None)
                identifier = given or own or f"req-{secrets.token_hex(12)}".encode()
                entry["id"] = identifier.decode("latin-1")
                kept = [(name, value) for name, value in headers if name != REQUEST_ID]
                message = {**message, "headers": [*kept, (REQUEST_ID, identifier)]}
            await send(message)

        try:
            if given is not None and not _is_id(given):
                given = None
                error = RequestError(
                    f"the header x-request-id must be 1 to {MAX_REQUEST_ID} visible ASCII characters", "x-request-id"
                )
                await error_response(error)(scope, receive, stamped)
                return
            scope["request_id"] = None if given is None else given.decode()
            await self.app(scope, receive, stamped)
        finally:
            if self.log is not None and (status >= 400 or scope["path"] not in QUIET_PATHS):
                self.log.write(self._line(scope, entry, status))

    def _line(self, scope: Scope, entry: dict[str, Any], status: int) -> dict[str, Any]:
        client = scope.get("client")
        line: dict[str, Any] = {
            "time": now(),
            "event": "request",
            "id": entry.pop("id", None),
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status or None,  # None: nothing was answered, since the client had gone
            "client": client[0] if client else None,
            "seconds": round((time.monotonic_ns() - scope["arrival_ns"]) * 1e-9, 6),
        }
        generation = entry.pop("generation", None)
        line.update({name: value for name, value in entry.items() if value is not None})
        if generation is not None:
            line.update(figures(generation))
        return line


class ApiKeys:
    """ASGI middleware that lets in who bears one of the keys. How long a refusal takes says nothing about the keys.

    Args:
        app: the application.
        keys: at least one.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._known(_header(scope, b"authorization")):
            await self.app(scope, receive, send)
            return
        error = UnauthorizedError("no known API key was given; send it as: Authorization: Bearer KEY")
        scope["log"]["error"] = str(error)
        await error_response(error)(scope, receive, send)

    def _known(self, header: bytes | None) -> bool:
        kind, _, key = (header or b"").partition(b" ")
        given = _digest(key.strip())
        # Digests have one length, and every key is compared whatever came of the others.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return kind.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _header(scope: Scope, wanted: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == wanted), None)


def _is_id(value: bytes) -> bool:
    return 0 < len(value) <= MAX_REQUEST_ID and all(33 <= byte <= 126 for byte in value)

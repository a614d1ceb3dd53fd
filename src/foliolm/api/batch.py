"""Batches of requests in OpenAI's file format, answered by the server's own handlers, without a server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from starlette.types import ASGIApp, Message

from foliolm.core.errors import ConfigError

logger = logging.getLogger("foliolm.batch")

URLS = ("/v1/chat/completions", "/v1/completions")
MAX_ATTEMPTS = 20
"""How often a request is sent that the server cannot take now: its queue is full, or its engine is being started."""
RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input.

    Attributes:
        number: of the line, from 1.
        custom_id: the user's name for it, unique within the file.
        url: which endpoint answers it.
        body: the endpoint's.
    """

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(slots=True)
class Counts:
    """How a run went.

    Attributes:
        total: requests of the input.
        done: answered, those of earlier runs included.
        failed: of those, the ones whose answer is an error.
        resumed: answered by earlier runs.
        output_tokens: generated in this run.
    """

    total: int = 0
    done: int = 0
    failed: int = 0
    resumed: int = 0
    output_tokens: int = 0


def read_requests(path: Path) -> list[BatchRequest]:
    """The input, checked as far as it can be without a model.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong; names the line and what is wrong with it.
    """
    requests: list[BatchRequest] = []
    lines: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    request = _parsed(line, f"{path}, line {number}", number)
                    if request.custom_id in lines:
                        raise ConfigError(
                            f"{path}, line {number}: custom_id {request.custom_id!r} is also on line "
                            f"{lines[request.custom_id]}; each must be unique"
                        )
                    lines[request.custom_id] = number
                    requests.append(request)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if not requests:
        raise ConfigError(f"{path} holds no request")
    return requests


def _parsed(line: bytes, where: str, number: int) -> BatchRequest:
    try:
        loaded = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{where}: must be a JSON object")
    unknown = sorted(set(loaded) - {"custom_id", "method", "url", "body"})
    if unknown:
        raise ConfigError(f"{where}: unknown field {unknown[0][:100]!r}")
    custom_id, url, body = loaded.get("custom_id"), loaded.get("url"), loaded.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= 200:
        raise ConfigError(f"{where}: custom_id must be a string of 1 to 200 characters")
    if loaded.get("method", "POST") != "POST":
        raise ConfigError(f"{where}: method must be POST")
    if url not in URLS:
        raise ConfigError(f"{where}: url must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise ConfigError(f"{where}: body must be a JSON object")
    if body.get("stream"):
        raise ConfigError(f"{where}: body.stream is true; a batch answers whole")
    return BatchRequest(number, custom_id, url, body)


@dataclass(slots=True)
class BatchOutput:
    """The output file: answers are appended as they come, and stand in the input's order at the end.

    Each line is written in one piece. What a crash of the machine left of a line is cut off when the file is opened
    again. While it is open, no other run can open it.

    Attributes:
        path: of the file.
        done: answers by custom id: where each line begins, its length, and whether it is an error.
    """

    path: Path
    done: dict[str, tuple[int, int, bool]] = field(default_factory=dict)
    _file: BinaryIO | None = None

    @contextlib.contextmanager
    def opened(self, known: frozenset[str], retry_failed: bool = False) -> Iterator[BatchOutput]:
        """Open the file and read which answers it has.

        Args:
            known: custom ids of the input.
            retry_failed: forget answers that are errors.

        Raises:
            ConfigError: the file cannot be written, is in use, or holds what is no answer to the input.
        """
        try:
            self._file = self.path.open("a+b")
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from None
        try:
            self._lock()
            self._read(known)
            if retry_failed and any(failed for _, _, failed in self.done.values()):
                self._rewrite([name for name, (_, _, failed) in self.done.items() if not failed])
            yield self
        finally:
            self._file.close()

    def append(self, custom_id: str, line: dict[str, Any], failed: bool) -> None:
        """Write an answer."""
        file = self._opened_file()
        data = msgspec.json.encode(line) + b"\n"
        start = file.seek(0, os.SEEK_END)
        try:
            file.write(data)
            file.flush()
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from None
        self.done[custom_id] = (start, len(data), failed)

    def put_in_order(self, requests: list[BatchRequest]) -> None:
        """Let the answers stand in the order of their requests; the file is whole at every moment."""
        wanted = [request.custom_id for request in requests if request.custom_id in self.done]
        if wanted != sorted(self.done, key=lambda name: self.done[name][0]):
            self._rewrite(wanted)

    def _opened_file(self) -> BinaryIO:
        assert self._file is not None, "opened() first"
        return self._file

    def _lock(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._opened_file(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{self.path} is being written by another run") from None

    def _read(self, known: frozenset[str]) -> None:
        file = self._opened_file()
        file.seek(0)
        end = 0
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                loaded = msgspec.json.decode(line)
                custom_id, response = loaded["custom_id"], loaded["response"]
                failed = response is None or response["status_code"] != 200
            except (msgspec.DecodeError, KeyError, TypeError):
                raise ConfigError(
                    f"{self.path}, line {number}: not an answer of a batch; choose another file"
                ) from None
            if custom_id not in known:
                raise ConfigError(
                    f"{self.path}, line {number}: custom_id {custom_id!r} is not in the input; choose another file"
                )
            if custom_id in self.done:
                raise ConfigError(f"{self.path}, line {number}: custom_id {custom_id!r} is there twice")
            self.done[custom_id] = (end, len(line), failed)
            end += len(line)
        file.truncate(end)

    def _rewrite(self, custom_ids: list[str]) -> None:
        old = self._opened_file()
        beside = self.path.with_name(self.path.name + ".partial")
        done: dict[str, tuple[int, int, bool]] = {}
        with beside.open("wb") as file:
            for custom_id in custom_ids:
                start, length, failed = self.done[custom_id]
                old.seek(start)
                done[custom_id] = (file.tell(), length, failed)
                file.write(old.read(length))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)
        self._file = self.path.open("a+b")
        self._lock()
        old.close()
        self.done = done


async def run_batch(
    app: ASGIApp,
    requests: list[BatchRequest],
    output: BatchOutput,
    concurrency: int,
    seed: int,
    on_progress: Callable[[Counts], None],
) -> Counts:
    """Answer what has no answer yet. A cancelled run leaves whole lines only, and can be gone on with.

    Args:
        app: the server's application.
        requests: of the input.
        output: opened.
        concurrency: requests at once.
        seed: where a request that samples has no seed, it gets one made of this and its custom id, so that an
            interrupted run ends with the same output as one that was not.
        on_progress: called after each answer.
    """
    counts = Counts(len(requests), len(output.done), sum(failed for _, _, failed in output.done.values()))
    counts.resumed = counts.done
    waiting = iter([request for request in requests if request.custom_id not in output.done])
    on_progress(counts)

    async def work() -> None:
        for request in waiting:
            status, body = await _answer(app, request, seed)
            output.append(request.custom_id, _line(request, status, body), status != 200)
            counts.done += 1
            counts.failed += status != 200
            usage = body.get("usage") or {}
            counts.output_tokens += usage.get("completion_tokens", 0)
            on_progress(counts)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    output.put_in_order(requests)
    return counts


async def _answer(app: ASGIApp, request: BatchRequest, seed: int) -> tuple[int, dict[str, Any]]:
    body = dict(request.body)
    if body.get("request_id") is None and all("!" <= character <= "~" for character in request.custom_id):
        body["request_id"] = request.custom_id
    if body.get("seed") is None:
        body["seed"] = seed_for(seed, request.custom_id)
    raw = msgspec.json.encode(body)
    for attempt in range(MAX_ATTEMPTS):
        status, answer = await post(app, request.url, raw)
        if status not in (429, 503) or attempt == MAX_ATTEMPTS - 1:
            break
        await asyncio.sleep(RETRY_S * min(attempt + 1, 10))
    loaded: dict[str, Any] = msgspec.json.decode(answer)
    return status, loaded


def seed_for(seed: int, custom_id: str) -> int:
    """A request's seed, which depends on nothing but its name and the run's seed."""
    digest = hashlib.sha256(f"{seed}:{custom_id}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def _line(request: BatchRequest, status: int, body: dict[str, Any]) -> dict[str, Any]:
    digest = hashlib.sha256(request.custom_id.encode()).hexdigest()[:24]
    return {
        "id": f"batch_req_{digest}",
        "custom_id": request.custom_id,
        "response": {"status_code": status, "request_id": body.get("id"), "body": body},
        "error": None,
    }


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Call an ASGI application as a server would.

    Returns:
        The status and the body.
    """
    sent = False
    status = 500
    parts: list[bytes] = []

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # this client never leaves
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
    }
    try:
        await app(scope, receive, send)
    except Exception:
        # Starlette raises again what it has answered with a 500.
        if status != 500 or not parts:
            raise
        logger.exception("%s failed", path)
    return status, b"".join(parts)

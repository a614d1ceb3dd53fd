"""What a client sees of one request: stamps, counts, and what the server said about itself."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec

from foliolm.simulate.workload.item import Item

MOST_ERROR_BYTES = 1 << 16
MOST_MESSAGE = 300


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    message: Any = None
    object: str | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True, eq=False)
class Answer:
    """One request that was sent, and its answer so far. All times are monotonic nanoseconds; 0: not yet.

    Attributes:
        item: what was to be sent.
        number: counted from 1 in the order of sending.
        due_ns: when it was to be sent; latencies count from here.
        woke_ns: when the client turned to it: later than due is the client's own fault.
        sent_ns: when its bytes were given to the system, once there was a connection.
        first_ns, last_ns: its first and last tokens.
        stamps: of every chunk that brought tokens.
        chunks: that brought tokens.
        status: of HTTP; 0: none came.
        finish_reason: as the server said.
        done: the stream's last event came.
        token_ids: of the answer, where the server sends them.
        has_token_ids, num_ids: it does, and how many came.
        text: of the answer, where a later turn repeats it.
        prompt_tokens, completion_tokens, cached_tokens: as the server counts; None: it did not say.
        error: kind, or "" for an answer that came whole.
        message: of the error.
        blocks: identities of its prompt's full blocks, where something is shared.
    """

    item: Item
    number: int
    due_ns: int
    woke_ns: int = 0
    sent_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    stamps: array[int] = field(default_factory=lambda: array("q"))
    chunks: int = 0
    status: int = 0
    finish_reason: str | None = None
    done: bool = False
    token_ids: list[int] = field(default_factory=list)
    has_token_ids: bool = False
    num_ids: int = 0
    text: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error: str = ""
    message: str = ""
    blocks: list[int] = field(default_factory=list)

    @property
    def num_output(self) -> int:
        """Tokens that came: counted where ids came, else as the server says, but never fewer than chunks."""
        return self.num_ids if self.has_token_ids else max(self.completion_tokens or 0, self.chunks)

    def forget_tokens(self) -> None:
        """Drop what only its conversation and its checks needed, so that a long run takes little memory."""
        self.token_ids, self.text, self.stamps = [], [], array("q")

    def fail(self, kind: str, message: str) -> None:
        """Note the first error."""
        if not self.error:
            self.error, self.message = kind, " ".join(message.split())[:MOST_MESSAGE]

    def take_chunk(self, stamp_ns: int, data: bytes, keep_text: bool) -> None:
        """One event's data."""
        try:
            chunk = _decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            self.fail("bad_json", f"an event is no chunk of OpenAI's format: {error}: {data[:80]!r}")
            return
        if chunk.error is not None or chunk.object == "error":
            self.fail("stream_error", _message_of(chunk.error if chunk.error is not None else chunk.message))
            return
        usage = chunk.usage
        if usage is not None:
            self.prompt_tokens, self.completion_tokens = usage.prompt_tokens, usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        for choice in chunk.choices or ():
            self._take_choice(stamp_ns, choice, keep_text)

    def _take_choice(self, stamp_ns: int, choice: _Choice, keep_text: bool) -> None:
        delta = choice.delta
        text = choice.text
        if delta is not None:
            text = delta.content or delta.reasoning_content or delta.reasoning
        brought = bool(text or choice.token_ids or (delta is not None and delta.tool_calls))
        if choice.token_ids is not None:
            self.has_token_ids = True
            self.num_ids += len(choice.token_ids)
            self.token_ids += choice.token_ids
        if keep_text and text:
            self.text.append(text)
        if brought:
            self.chunks += 1
            self.stamps.append(stamp_ns)
            self.first_ns = self.first_ns or stamp_ns
            self.last_ns = stamp_ns
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason
            if self.first_ns and not brought and self.chunks < self.item.num_output:
                self.last_ns = stamp_ns  # tokens without text of their own came with it


def _message_of(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(error)


class Exchange:
    """A `Reader` that turns a stream of events into an `Answer`.

    Args:
        answer: is filled.
        done: is set when nothing more will come.
        keep_text: the answer's text is needed afterwards.
    """

    def __init__(self, answer: Answer, done: asyncio.Future[None], keep_text: bool = False) -> None:
        self.answer, self.done, self._keep_text = answer, done, keep_text
        self._rest = b""
        self._event: list[bytes] = []
        self._refusal = False

    def head(self, status: int, headers: dict[str, str]) -> None:
        """Status and headers."""
        self.answer.status = status
        kind = headers.get("content-type", "")
        if status != 200:
            self._refusal = True
        elif not kind.startswith("text/event-stream"):
            self._refusal = True
            self.answer.fail("not_a_stream", f"the answer's type is {kind!r}; text/event-stream was asked for")

    def body(self, stamp_ns: int, data: bytes) -> None:
        """A piece of the body."""
        if self._refusal:
            if len(self._rest) < MOST_ERROR_BYTES:
                self._rest += data
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take_line(stamp_ns, line.rstrip(b"\r"))

    def ended(self) -> None:
        """The answer is whole, as far as HTTP goes."""
        answer = self.answer
        if answer.status != 200:
            answer.fail(f"http_{answer.status}", refusal_of(self._rest, answer.status))
        elif not answer.done and answer.finish_reason is None:
            answer.fail("broken_stream", "the stream ended without a finish reason and without [DONE]")
        self._finish()

    def failed(self, kind: str, message: str) -> None:
        """The connection is gone."""
        self.answer.fail(kind, message)
        self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def _take_line(self, stamp_ns: int, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._event.append(line[5:].strip())
        elif not line and self._event:
            data, self._event = b"\n".join(self._event), []
            if data == b"[DONE]":
                self.answer.done = True
            else:
                self.answer.take_chunk(stamp_ns, data, self._keep_text)


def refusal_of(raw: bytes, status: int) -> str:
    """The sentence in an error's body, or what there is of it."""
    try:
        loaded = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return raw.decode("utf-8", "replace").strip()[:MOST_MESSAGE] or f"HTTP {status} without a word"
    if isinstance(loaded, dict):
        found = loaded.get("error", loaded.get("message", loaded.get("detail", loaded)))
        return _message_of(found)
    return str(loaded)

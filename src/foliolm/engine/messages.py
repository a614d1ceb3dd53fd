"""What crosses between a client and an engine in another process, as msgpack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from foliolm.core.errors import (
    ConfigError,
    EngineDeadError,
    FolioError,
    ModelError,
    QueueFullError,
    RequestError,
    TtftTargetError,
)
from foliolm.core.plan import Decision
from foliolm.core.record import RequestRecord, StepRecord
from foliolm.core.request import EngineRequest, TokenOutput
from foliolm.engine.engine import EngineInfo


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Take these requests, all or none; answered in ``StepOutputs.accepted`` or ``refused`` by the first one's id."""

    requests: tuple[EngineRequest, ...]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """End these requests."""

    request_ids: tuple[int, ...]


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Say that you live: answered, like any message, by the ``StepOutputs`` of the turn that reads it."""


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A question about, or an order to, the engine as a whole; answered in ``StepOutputs.answers`` by its number.

    Attributes:
        number: of the question, unique for the client.
        what: one of ``Engine.ask``'s, ``load_adapter`` or ``unload_adapter``.
        arguments: of an order: ``load_id``, and of a load ``name`` and ``path``.
    """

    number: int
    what: str
    arguments: dict[str, Any] = {}


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """End the engine's loop."""


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """A line about the start-up, for people."""

    text: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The engine takes requests from now on."""

    info: EngineInfo


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """An error as data.

    Attributes:
        kind: ``config``, ``model``, ``request``, ``queue_full``, ``ttft_target`` or ``engine``.
        message: fit to be shown.
        field, code: of a RequestError.
        retry_after_s: of a QueueFullError.
    """

    kind: str
    message: str
    field: str | None = None
    code: str | None = None
    retry_after_s: int = 1

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """The error as data; one that is not FolioLM's own becomes kind ``engine`` with its type named."""
        if isinstance(error, RequestError):
            return cls("request", str(error), error.field, error.code)
        if isinstance(error, TtftTargetError):
            return cls("ttft_target", str(error), retry_after_s=error.retry_after_s)
        if isinstance(error, QueueFullError):
            return cls("queue_full", str(error), retry_after_s=error.retry_after_s)
        if isinstance(error, ConfigError):
            return cls("config", str(error))
        if isinstance(error, ModelError):
            return cls("model", str(error))
        return cls("engine", str(error) if isinstance(error, FolioError) else f"{type(error).__name__}: {error}")

    def error(self) -> FolioError:
        """The exception that it stands for."""
        if self.kind == "request":
            return RequestError(self.message, self.field, self.code)
        if self.kind == "ttft_target":
            return TtftTargetError(self.message, self.retry_after_s)
        if self.kind == "queue_full":
            return QueueFullError(self.message, self.retry_after_s)
        return {"config": ConfigError, "model": ModelError}.get(self.kind, EngineDeadError)(self.message)


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's state after a step. Gauges are of now; counters rise from the engine's start.

    Attributes:
        num_running, num_waiting: requests now.
        kv_blocks_total, kv_blocks_used: blocks that requests can use, and those in use, now.
        num_preemptions: so far.
        num_failed_steps: steps that raised, so far.
        prefix_cache_queries, prefix_cache_hits: tokens looked up and found, so far.
        prefix_cache_host_hits: of those found, tokens on the host.
        recomputed_tokens: tokens whose KV was computed, given up, and is computed again, so far.
        swap_out_bytes, swap_in_bytes: KV moved to the host and back, so far.
        host_blocks_total, host_blocks_used, host_blocks_cached: slots of the host pool, those that requests which gave
            way use, and those that keep an evicted prefix block, now.
        prompt_forked_tokens: prompt tokens that siblings took over from one another, so far.
        kv_blocks_copied: shared blocks copied since one of their holders wrote, so far.
        kv_blocks_evicted: idle blocks whose prefix gave way on the device, so far.
        kv_blocks_offloaded, kv_blocks_loaded: of these, blocks that the host kept; and blocks copied back, so far.
        kv_blocks_idle, kv_blocks_shared: free blocks that keep a prefix, and blocks with several holders, now.
        kv_unused_tokens: positions without a token in blocks that requests hold, now.
        adapter_slots: LoRA adapters that a step may use; 0: none are served.
        adapters_running, adapters_waiting: names of adapters that running, and other, requests use, now.
        adapters_held: adapters in host memory, now.
        lora_adapter_loads, lora_adapter_bytes_read: copies into slots, and bytes that steps read, so far.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    num_preemptions: int = 0
    num_failed_steps: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prefix_cache_host_hits: int = 0
    recomputed_tokens: int = 0
    swap_out_bytes: int = 0
    swap_in_bytes: int = 0
    host_blocks_total: int = 0
    host_blocks_used: int = 0
    host_blocks_cached: int = 0
    prompt_forked_tokens: int = 0
    kv_blocks_copied: int = 0
    kv_blocks_evicted: int = 0
    kv_blocks_offloaded: int = 0
    kv_blocks_loaded: int = 0
    kv_blocks_idle: int = 0
    kv_blocks_shared: int = 0
    kv_unused_tokens: int = 0
    adapter_slots: int = 0
    adapters_running: tuple[str, ...] = ()
    adapters_waiting: tuple[str, ...] = ()
    adapters_held: int = 0
    lora_adapter_loads: int = 0
    lora_adapter_bytes_read: int = 0


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """All that one turn of the engine's loop gave, in one message.

    Nearly every output of a steady step is one token and nothing else; those travel as two flat lists, because
    building and encoding a record for each would cost the loop more than planning the step does.

    Attributes:
        plain_ids, plain_tokens: request ids and their one new token each.
        others: every other output.
        accepted: first ids of the groups that were taken.
        refused: (first id, why) of the groups that were not.
        stats: the state after it.
        record: the step that was committed, if one was.
        finished: records of the requests that ended.
        turns: admissions and preemptions, in the order in which they were decided; they come before the outputs.
        answers: (number, answer) of the questions that were read.
    """

    plain_ids: list[int]
    plain_tokens: list[int]
    others: list[TokenOutput]
    accepted: list[int]
    refused: list[tuple[int, Failure]]
    stats: EngineStats
    record: StepRecord | None = None
    finished: list[RequestRecord] = []
    turns: list[Decision] = []
    answers: list[tuple[int, dict[str, Any]]] = []

    @classmethod
    def of(
        cls,
        outputs: Sequence[TokenOutput],
        accepted: list[int],
        refused: list[tuple[int, Failure]],
        stats: EngineStats,
        record: StepRecord | None,
        finished: list[RequestRecord],
        turns: list[Decision],
        answers: Sequence[tuple[int, dict[str, Any]]] = (),
    ) -> StepOutputs:
        """Sort outputs into plain and other ones; the order within a request is kept."""
        ids: list[int] = []
        tokens: list[int] = []
        others: list[TokenOutput] = []
        seen: set[int] = set()
        for output in outputs:
            plain = (
                len(output.token_ids) == 1
                and output.finish_reason is None
                and not output.logprobs
                and not output.prompt_logprobs
                and not output.num_cached_tokens
                and output.request_id not in seen
            )
            if plain:
                ids.append(output.request_id)
                tokens.append(output.token_ids[0])
            else:
                seen.add(output.request_id)
                others.append(output)
        return cls(ids, tokens, others, accepted, refused, stats, record, finished, turns, list(answers))

    def outputs(self) -> Iterator[TokenOutput]:
        """The outputs again; those of one request are in order."""
        for request_id, token in zip(self.plain_ids, self.plain_tokens, strict=True):
            yield TokenOutput(request_id, (token,))
        yield from self.others


ToEngine = Add | Abort | Ask | Ping | Stop
FromEngine = Progress | Ready | Failure | StepOutputs

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """A message as msgpack."""
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    """A message that an engine received."""
    message: ToEngine = _to_engine.decode(frame)
    return message


def decode_from_engine(frame: bytes) -> FromEngine:
    """A message that a client received."""
    message: FromEngine = _from_engine.decode(frame)
    return message

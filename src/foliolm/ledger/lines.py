"""The lines of a ledger on disk: one JSON object each, its ``kind`` first."""

from __future__ import annotations

from typing import Any

import msgspec

from foliolm.core.adapter import AdapterSize
from foliolm.core.machine import MachineLimits
from foliolm.core.record import RequestRecord, StepRecord
from foliolm.core.resolve import SchedulerConfig
from foliolm.core.timeline import HttpStamps
from foliolm.ledger.step_cost import StepCost


class EngineLine(msgspec.Struct, frozen=True, tag_field="kind", tag="engine"):
    """The first line of every file of an engine: all that it takes to run its arrivals again.

    Attributes:
        engine: which engine of the client's list.
        started_ns: the monotonic clock when it was built: files of one start are one run.
        wall_ns, monotonic_ns: both clocks at one moment.
        model: for people.
        dtype: of weights and activations.
        scheduler: its settings.
        cost: the step cost, or None.
        cost_source: ``default``, ``file`` or ``calibrated``.
        depth: steps in flight while the next is planned.
        itl_target_ms: the target that chunks follow, or None.
        version: FolioLM's.
        limits: how fast the machine reads and multiplies; None: unknown, as in older files.
    """

    engine: int
    started_ns: int
    wall_ns: int
    monotonic_ns: int
    model: str
    dtype: str
    scheduler: SchedulerConfig
    cost: StepCost | None
    cost_source: str
    depth: int
    version: str
    itl_target_ms: float | None = None
    limits: MachineLimits | None = None


class CostLine(msgspec.Struct, frozen=True, tag_field="kind", tag="cost"):
    """From here on another step cost predicts."""

    engine: int
    cost: StepCost
    cost_source: str


class AdapterLine(msgspec.Struct, frozen=True, tag_field="kind", tag="adapter"):
    """A LoRA adapter was loaded."""

    load_id: int
    size: AdapterSize


class StepLine(msgspec.Struct, frozen=True, tag_field="kind", tag="step"):
    """A step."""

    step: StepRecord


class RequestLine(msgspec.Struct, frozen=True, tag_field="kind", tag="request"):
    """A request that ended, as the engine saw it."""

    request: RequestRecord


class HttpLine(msgspec.Struct, frozen=True, tag_field="kind", tag="http"):
    """What the HTTP process adds about a request."""

    request_id: int
    label: str
    stamps: HttpStamps


Line = EngineLine | CostLine | AdapterLine | StepLine | RequestLine | HttpLine

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Line)


def encode_line(line: Line) -> bytes:
    """The line, its end included."""
    return _encoder.encode(line) + b"\n"


def decode_line(raw: bytes) -> Line:
    """A line.

    Raises:
        msgspec.DecodeError: it is none.
    """
    line: Line = _decoder.decode(raw)
    return line

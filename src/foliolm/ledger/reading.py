"""Reading a ledger's folder back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from foliolm.core.adapter import AdapterSize
from foliolm.core.errors import ConfigError
from foliolm.core.record import RequestRecord, StepRecord
from foliolm.core.timeline import RequestTimeline, with_http
from foliolm.ledger.lines import AdapterLine, CostLine, EngineLine, HttpLine, RequestLine, StepLine, decode_line
from foliolm.ledger.step_cost import StepCost


@dataclass(slots=True)
class LedgerRun:
    """One engine from its start to its end.

    Attributes:
        engine: its first line.
        steps, requests: in the order in which they were written.
        timelines: by request id, the HTTP side included where it reported.
        cost: the newest step cost.
        num_torn: lines that were cut off by a crash and are left out.
        adapters: LoRA adapters by load id.
    """

    engine: EngineLine
    steps: list[StepRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    timelines: dict[int, RequestTimeline] = field(default_factory=dict)
    cost: StepCost | None = None
    num_torn: int = 0
    adapters: dict[int, AdapterSize] = field(default_factory=dict)


def read_runs(folder: Path) -> list[LedgerRun]:
    """All runs of all engines in a ledger's folder, the newest last.

    Raises:
        ConfigError: it is no folder, holds no engine's files, or a line within a file is damaged.
    """
    if not folder.is_dir():
        raise ConfigError(f"ledger {folder}: there is no such folder")
    files = sorted(folder.glob("engine-*-*.jsonl"))
    if not files:
        raise ConfigError(
            f"ledger {folder}: holds no engine-*.jsonl files; a server writes them with --ledger {folder}"
        )
    runs: dict[tuple[int, int], LedgerRun] = {}
    for path in files:
        _read_engine_file(path, runs)
    https = {
        (line.request_id, line.stamps.arrival_ns): line.stamps
        for path in sorted(folder.glob("http-*.jsonl"))
        for line in _lines(path, None)
        if isinstance(line, HttpLine)
    }
    ordered = sorted(runs.values(), key=lambda run: (run.engine.wall_ns, run.engine.engine))
    for run in ordered:
        for request in run.requests:
            if request.timeline is not None:
                stamps = https.get((request.request_id, request.stamps.arrival_ns))
                timeline = request.timeline if stamps is None else with_http(request.timeline, stamps)
                run.timelines[request.request_id] = timeline
    return ordered


def newest_run(folder: Path, engine: int | None = None) -> LedgerRun:
    """The newest run that has steps, of one engine or of any.

    Raises:
        ConfigError: as ``read_runs``, or there is none.
    """
    runs = [run for run in read_runs(folder) if run.steps and engine in (None, run.engine.engine)]
    if not runs:
        which = "no engine" if engine is None else f"engine {engine} never"
        raise ConfigError(f"ledger {folder}: {which} ran a step")
    return runs[-1]


def _read_engine_file(path: Path, runs: dict[tuple[int, int], LedgerRun]) -> None:
    run: LedgerRun | None = None
    torn: list[int] = []
    for line in _lines(path, torn):
        if isinstance(line, EngineLine):
            run = runs.setdefault((line.engine, line.started_ns), LedgerRun(line, cost=line.cost))
        elif run is None:
            raise ConfigError(f"{path}, line 1: a file begins with its engine's line; this one does not")
        elif isinstance(line, StepLine):
            run.steps.append(line.step)
        elif isinstance(line, RequestLine):
            run.requests.append(line.request)
        elif isinstance(line, CostLine):
            run.cost = line.cost
        elif isinstance(line, AdapterLine):
            run.adapters[line.load_id] = line.size
    if run is not None:
        run.num_torn += len(torn)


def _lines(path: Path, torn: list[int] | None) -> Iterator[object]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    lines = raw.split(b"\n")
    # What follows the last line's end was being written when the process died.
    if lines.pop() and torn is not None:
        torn.append(len(lines) + 1)
    for number, line in enumerate(lines, 1):
        try:
            yield decode_line(line)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ConfigError(f"{path}, line {number} is damaged: {error}") from None

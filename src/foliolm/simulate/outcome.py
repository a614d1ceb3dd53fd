"""A workload played against the virtual engine, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foliolm.assemble import Books, build_virtual_engine
from foliolm.core.adapter import AdapterSize
from foliolm.core.record import RequestRecord, StepRecord
from foliolm.core.resolve import SchedulerConfig
from foliolm.ledger.plan_cost import lora_work
from foliolm.simulate.clock import VirtualClock
from foliolm.simulate.collect import Collector
from foliolm.simulate.run import Arrival, Leap, run_arrivals
from foliolm.simulate.workload.item import NS, Item, Workload, as_request

if TYPE_CHECKING:
    from foliolm.core.protocols import CostModel
    from foliolm.engine.engine import Engine

START_NS = 1
"""Virtual time of the first arrival: 0 stands for "not known" in requests' stamps."""


@dataclass(frozen=True, slots=True)
class Machine:
    """An engine to be.

    Attributes:
        settings: the scheduler's.
        books: the step cost, and how the books are kept.
        host_s: seconds between two steps.
        depth: steps in flight while the next is planned.
        times, adapters: see ``build_virtual_engine``.
        http_s: seconds from a request's arrival to the engine's queue.
        delivery_s: seconds from a token's commit until its client has it; no step waits for that.
    """

    settings: SchedulerConfig
    books: Books
    host_s: float = 0.0
    depth: int = 0
    times: CostModel | None = None
    adapters: Mapping[int, AdapterSize] = field(default_factory=dict)
    http_s: float = 0.0
    delivery_s: float = 0.0

    def build(self, clock: VirtualClock) -> Engine:
        """The engine, by the one function that builds it."""
        return build_virtual_engine(
            self.settings, self.books, clock, self.host_s, self.depth, self.times, self.adapters
        )


@dataclass(slots=True)
class Outcome:
    """What came of it.

    Attributes:
        collector: everything that was measured.
        prefix_hit_ratio: prompt tokens found computed, over those looked up.
        preemptions, recomputed_tokens: totals.
        interrupted: somebody stopped it; the numbers are of what was done.
        lora: adapters' numbers; None where no request asked for one.
    """

    collector: Collector
    prefix_hit_ratio: float = 0.0
    preemptions: int = 0
    recomputed_tokens: int = 0
    interrupted: bool = False
    lora: dict[str, float] | None = None

    def to_json(self, wall_s: float) -> dict[str, Any]:
        """The numbers by name; ``wall_s`` is the only one that another run does not repeat."""
        numbers = self.collector.report()
        head = {name: numbers.pop(name) for name in ("requests", "simulated_s")}
        more = {
            "prefix_hit_ratio": self.prefix_hit_ratio,
            "preemptions": self.preemptions,
            "recomputed_tokens": self.recomputed_tokens,
        }
        usage = {name: numbers.pop(name) for name in ("kv_usage", "refused", "bound", "waiting_share", "busy_share")}
        lora = {} if self.lora is None else {"lora": self.lora}
        return {**head, "wall_s": wall_s, **numbers, **more, **usage, **lora, "interrupted": self.interrupted}


def play(
    machine: Machine, workload: Workload, progress: Callable[[int], None] | None = None, leap: bool = True
) -> Outcome:
    """Play a workload in virtual time. Same inputs, same outcome, to the nanosecond.

    Args:
        machine: is built afresh.
        workload: is used up.
        progress: called with the number of requests that have ended.
        leap: runs of like decode steps may be taken at once where nobody reads them one by one; nothing else changes.

    Raises:
        SimulationError: a request ended with an error.
    """
    clock = VirtualClock(START_NS)
    engine = machine.build(clock)
    player = _Player(
        workload,
        Collector(machine.settings.num_blocks - 1, round(machine.delivery_s * NS)),
        progress,
        AdapterTally(machine.adapters),
        round(machine.http_s * NS),
    )
    outcome = Outcome(player.collector)
    try:
        run_arrivals(engine, clock, player.arrivals(), player.following, player, player.after_refusal, leap)
    except KeyboardInterrupt:
        outcome.interrupted = True
    finally:
        engine.close()
    stats = engine.scheduler.stats()
    outcome.prefix_hit_ratio = stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0
    outcome.preemptions, outcome.recomputed_tokens = stats.num_preemptions, stats.recomputed_tokens
    if machine.adapters:
        outcome.lora = player.lora.report(machine)
    return outcome


@dataclass(slots=True)
class AdapterTally:
    """Counts of LoRA adapters over a run's steps; bytes and FLOPs as the ledger counts them."""

    adapters: Mapping[int, AdapterSize]
    steps: int = 0
    uses: int = 0
    loads: int = 0
    passed_over: int = 0
    num_bytes: float = 0.0
    flops: float = 0.0
    busy_s: float = 0.0

    def stepped(self, record: StepRecord) -> None:
        """A step with adapters, or with decisions."""
        self.passed_over += sum(one.reason in ("adapter_slots", "adapter_drain") for one in record.decisions)
        if record.adapters:
            self.steps += 1
            self.uses += len(record.adapters)
            self.loads += record.adapter_loads
            num_bytes, flops = lora_work(record.adapters, self.adapters)
            self.num_bytes += num_bytes
            self.flops += flops
            self.busy_s += record.seconds.total

    def report(self, machine: Machine) -> dict[str, float]:
        """By name; ``step_share`` is of the time of the steps that had one."""
        cost = machine.books.cost
        c = cost.coefficients
        seconds = self.num_bytes / (c.weights * cost.bandwidth) + self.flops / (c.matmul * cost.flops)
        return {
            "adapters": len(self.adapters),
            "steps": self.steps,
            "per_step": self.uses / self.steps if self.steps else 0.0,
            "loads": self.loads,
            "passed_over": self.passed_over,
            "read_bytes": self.num_bytes,
            "flops": self.flops,
            "seconds": seconds,
            "step_share": seconds / self.busy_s if self.busy_s else 0.0,
        }


@dataclass(slots=True)
class _Player:
    """Turns items into arrivals and ends into items; keeps only those that live."""

    workload: Workload
    collector: Collector
    progress: Callable[[int], None] | None
    lora: AdapterTally
    http_ns: int = 0
    live: dict[int, Item] = field(default_factory=dict)
    number: int = 0

    def arrivals(self) -> Iterator[Arrival]:
        for item in self.workload.items():
            yield self._arrival(item, START_NS)

    def following(self, record: RequestRecord, now: int) -> Iterable[Arrival]:
        return self._after(record.request_id, now + self.collector.delivery_ns)

    def after_refusal(self, request_id: int, now: int) -> Iterable[Arrival]:
        return self._after(request_id, now)

    def stepped(self, record: StepRecord) -> None:
        self.collector.stepped(record)
        if record.adapters or record.decisions:
            self.lora.stepped(record)

    def leapt(self, leap: Leap) -> None:
        self.collector.leapt(leap)

    def ended(self, record: RequestRecord) -> None:
        self.collector.ended(record)
        if self.progress is not None:
            self.progress(self.collector.num_ended)

    def refused(self, request_id: int, why: str, now: int) -> None:
        self.collector.refused(request_id, why, now)

    def _arrival(self, item: Item, start_ns: int) -> Arrival:
        self.number += 1
        self.live[self.number] = item
        request = as_request(item, self.number, start_ns, self.http_ns)
        return Arrival(request.sent_ns, request)

    def _after(self, request_id: int, now: int) -> list[Arrival]:
        item = self.live.pop(request_id)
        return [self._arrival(next_item, 0) for next_item in self.workload.after(item, now)]

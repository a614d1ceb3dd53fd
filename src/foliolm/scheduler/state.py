"""What planning and committing share: where each live request is, and which steps are in flight."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from foliolm.core.plan import NOBODY, BlockSwap, Fork, LogitsAt, StepPlan, SwapNote
from foliolm.core.resolve import SchedulerConfig
from foliolm.kv import HostPool, KVManager, PrefixMatch, SwapSpace
from foliolm.kv.offload import Offloaded
from foliolm.scheduler.adapters import AdapterSlots
from foliolm.scheduler.decodes import DecodeSet
from foliolm.scheduler.fairness import ServedTokens
from foliolm.scheduler.families import Families, Family
from foliolm.scheduler.promises import PrefixPromises
from foliolm.scheduler.queue import WaitingQueue
from foliolm.scheduler.request import Request, State


@dataclass(slots=True)
class Flight:
    """A step that was planned and is not committed yet.

    Attributes:
        step_id: of the plan.
        tick: of its decodes, or −1 if none ran.
        ending: requests that sample their last token in it.
        residencies: by request id of its rows other than decodes, how often it had been preempted: a request that
            comes back holds other blocks than those that this step wrote.
        swapped_out: requests whose KV it moves to the host.
        offloaded: evicted prefix blocks that it copies there.
    """

    step_id: int
    tick: int
    ending: list[Request] = field(default_factory=list)
    residencies: dict[int, int] = field(default_factory=dict)
    swapped_out: list[int] = field(default_factory=list)
    offloaded: list[Offloaded] = field(default_factory=list)


@dataclass(slots=True)
class Counters:
    """Running totals since the start.

    Attributes:
        preemptions: how often a request gave way.
        swaps: how often its KV moved to the host for that.
        recomputed_tokens: tokens whose KV was computed and given up.
        swap_out_bytes, swap_in_bytes: moved to the host, and back.
        steps: plans with rows.
        prefix_queries, prefix_hits: tokens looked up, and found, at first admissions; a resumed request counts for
            neither.
        host_hits: of the tokens found, those on the host.
        loaded_blocks: prefix blocks copied back from the host, whoever wanted them.
        forked_tokens: prompt tokens that siblings took over from the one that had computed them.
        copied_blocks: shared blocks that were copied because one of their holders wrote.
    """

    preemptions: int = 0
    swaps: int = 0
    recomputed_tokens: int = 0
    swap_out_bytes: int = 0
    swap_in_bytes: int = 0
    steps: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    host_hits: int = 0
    loaded_blocks: int = 0
    forked_tokens: int = 0
    copied_blocks: int = 0


class SchedulerState:
    """Every live request is in exactly one place: waiting, parked, prefilling, decoding, or ending in a step in flight.

    Args:
        config: the scheduler's settings.
        kv: the KV manager.

    Attributes:
        parked: siblings whose leader has not computed the prompt.
        seats: places among the running that are kept for some of them.
        searches: beam searches past their prompt, by leader's id; no step is planned while one of theirs is in flight.
        forked: decodes that may share the block that they write next.
        forks, begun: tables that changed at a commit, and who has one for the first time: for the next plan.
    """

    def __init__(self, config: SchedulerConfig, kv: KVManager) -> None:
        self.config = config
        self.kv = kv
        self.requests: dict[int, Request] = {}
        self.served = ServedTokens() if config.fairness else None
        age_bound_ns = round(config.age_bound_s * 1e9)
        in_order = not config.fairness and config.scheduling_policy == "fcfs" and config.lora_grouping == "arrival"
        self.adapters = AdapterSlots(config.max_loras, age_bound_ns)
        self.waiting = WaitingQueue(
            None if in_order else age_bound_ns,
            None if self.served is None else self._turn,
        )
        self.parked: dict[int, Request] = {}
        self.prefilling: dict[int, Request] = {}
        self.decodes = DecodeSet(config.block_size, self.served)
        self.flights: deque[Flight] = deque()
        self.released: list[int] = []
        self.preempted: list[int] = []
        self.owed: dict[int, Request] = {}
        self.last_decode_step = 0
        self.promises = PrefixPromises(config.block_size)
        self.counters = Counters()
        self.swap = SwapSpace(kv, HostPool(config.num_host_blocks))
        self.swaps_out: list[BlockSwap] = []
        self.swaps_in: list[BlockSwap] = []
        self.swap_notes: list[SwapNote] = []
        self._bytes_per_block = sum(spec.bytes_per_block(config.block_size) for spec in kv.specs)
        self.families = Families(self)
        self.seats = 0
        self.searches: dict[int, Family] = {}
        self.forked: dict[int, Request] = {}
        self.forks: list[Fork] = []
        self.begun: list[Request] = []

    @property
    def num_waiting(self) -> int:
        """Requests that wait to be run, siblings that wait for their leader included."""
        return len(self.waiting) + len(self.parked)

    @property
    def unused_tokens(self) -> int:
        """Positions in blocks that requests hold with no token in them. O(prompts being computed)."""
        tokens = self.decodes.context_tokens + sum(request.num_tokens for request in self.prefilling.values())
        for flight in self.flights:
            tokens += sum(request.num_computed for request in flight.ending if request.state is State.ENDING)
        return self.kv.num_held * self.config.block_size - tokens

    @property
    def num_running(self) -> int:
        """Requests that take part in steps to come."""
        return len(self.prefilling) + len(self.decodes)

    def running(self) -> Iterator[Request]:
        """Those who take part in steps to come and hold blocks."""
        yield from self.prefilling.values()
        yield from self.decodes.members.values()

    def pending(self, request: Request) -> int:
        """How many of its tokens steps in flight are still sampling."""
        if request.state is State.WAITING:
            return request.pending
        decoding = request.state is State.DECODING
        return sum(
            (decoding and flight.tick >= request.join_tick) + (flight.step_id == request.sample_step)
            for flight in self.flights
        )

    def _turn(self, tenants: Iterator[str]) -> str:
        assert self.served is not None
        return self.served.least(tenants, self.decodes.tick)

    def host_room(self, wanted: int) -> int:
        """Host slots that can be given to a request that gives way, counted no further than ``wanted``."""
        return self.swap.pool.num_free if self.kv.host is None else self.kv.host.room(wanted)

    def landed(self, step_id: int) -> bool:
        """True once a step has been committed."""
        return not self.flights or self.flights[0].step_id > step_id

    def swap_out(self, request: Request, num_computed: int) -> None:
        """Have the next plan move a running request's KV to the host; the caller withdraws it then."""
        if self.kv.host is not None:
            self.kv.host.reclaim(self.swap.slots_for(request.request_id, num_computed))
        copies = self.swap.out(request.request_id, num_computed)
        blocks = len(copies) // len(self.kv.specs)
        moved = blocks * self._bytes_per_block
        self.swaps_out += copies
        self.swap_notes.append(SwapNote(request.request_id, blocks_out=blocks, num_bytes=moved))
        self.counters.swaps += 1
        self.counters.swap_out_bytes += moved
        request.is_swapped = True
        request.swap_step = 0

    def swap_in(self, request: Request, match: PrefixMatch, root: Hashable | None) -> tuple[tuple[int, ...], ...]:
        """Give a swapped request its blocks, to be filled by the next plan; returns its table."""
        held = self.swap.get(request.request_id)
        assert held is not None
        table, copies = self.swap.back(request.request_id, request.num_tokens, match, root)
        blocks = len(copies) // len(self.kv.specs)
        moved = blocks * self._bytes_per_block
        self.swaps_in += copies
        self.swap_notes.append(SwapNote(request.request_id, blocks_in=blocks, num_bytes=moved))
        self.counters.swap_in_bytes += moved
        request.is_swapped = False
        request.num_computed = held.num_tokens
        return table

    def load_prefix(self, request: Request, match: PrefixMatch, root: Hashable | None) -> tuple[tuple[int, ...], ...]:
        """Give a request its blocks, those behind the match to be filled from the host by the next plan."""
        table, copies = self.kv.allocate_from_host(request.request_id, request.num_tokens, match, root)
        blocks = len(match.on_host)
        moved = blocks * self._bytes_per_block
        self.swaps_in += copies
        self.swap_notes.append(SwapNote(request.request_id, blocks_in=blocks, num_bytes=moved))
        self.counters.swap_in_bytes += moved
        self.counters.loaded_blocks += blocks
        request.num_computed = match.num_tokens + blocks * self.config.block_size
        return table

    def take_offloaded(self) -> list[Offloaded]:
        """Have the plan in the making copy evicted prefix blocks to the host; whose they are."""
        if self.kv.host is None or not self.kv.host.num_moving:
            return []
        copies, offloaded = self.kv.host.seal()
        moved = len(offloaded) * self._bytes_per_block
        self.swaps_out += copies
        self.swap_notes.append(SwapNote(NOBODY, blocks_out=len(offloaded), num_bytes=moved))
        self.counters.swap_out_bytes += moved
        return offloaded

    def lose_swapped(self, request: Request, cached: int = 0) -> None:
        """What the host keeps of a request, if anything, is of no use; all but ``cached`` tokens is computed again."""
        held = self.swap.drop(request.request_id)
        request.is_swapped = False
        if held is not None:
            self.counters.recomputed_tokens += max(0, held.num_tokens - cached)

    def owing(self, plan: StepPlan) -> list[Request]:
        """Preempted requests for which a plan, now done, was still sampling."""
        self.owed = {rid: r for rid, r in self.owed.items() if r.state is State.WAITING and r.pending}
        if not self.owed:
            return []
        sampled = {*plan.decodes.request_ids, *(row.request_id for row in plan.rows if row.logits & LogitsAt.LAST)}
        sampled.update(rid for row in plan.rows for rid in row.forks)
        return [request for rid, request in self.owed.items() if rid in sampled]

    def withdraw(self, request: Request) -> int:
        """Take a live request out of where it is, and its blocks back; the caller gives it its next state.

        Returns:
            Blocks a group that nobody holds any more.
        """
        self.promises.withdraw(request)
        self.adapters.release(request)
        if request.family is not None:
            self.families.withdraw(request, request.family)
        if request.state is State.WAITING:
            self.waiting.forget(request)
            self.swap.drop(request.request_id)
        elif request.state is State.PREFILLING:
            del self.prefilling[request.request_id]
        elif request.state is State.DECODING:
            self.decodes.leave(request)
            request.last_step = max(request.last_step, self.last_decode_step)
        in_flight = bool(self.flights) and request.last_step >= self.flights[0].step_id
        return self.kv.release(request.request_id, request.last_step if in_flight else None)

    def retire(self, request: Request) -> None:
        """A request ends, wherever it is. The executor is told to forget it by the next plan."""
        self.withdraw(request)
        request.state = State.FINISHED
        del self.requests[request.request_id]
        self.adapters.leave(request.source.adapter)
        if self.served is not None:
            self.served.leave(request)
        if request.family is not None:
            self.families.retire(request, request.family)
        self.released.append(request.request_id)

    def problems(self) -> list[str]:
        """The invariant check: what is wrong, a sentence each; empty if nothing is."""
        found = self.decodes.problems()
        ending = {
            request.request_id for flight in self.flights for request in flight.ending if request.state is State.ENDING
        }
        waiting = {request.request_id for request in self.waiting}
        if len(waiting) != len(self.waiting):
            found.append(f"{len(waiting)} requests wait, {len(self.waiting)} were counted")
        places = [*waiting, *self.parked, *self.prefilling, *self.decodes.members, *ending]
        if sorted(places) != sorted(self.requests):
            found.append("a live request is in no place, or in two")
        found.extend(self.kv.problems(set(self.requests) - waiting - set(self.parked)))
        for request in self.running():
            tokens = request.num_tokens
            if request.state is State.DECODING:
                # Before it runs, a decode may be about to cross: the block for its input's KV comes with that step.
                tokens = request.offset + self.decodes.tick
            if self.kv.holds(request.request_id) != self.kv.blocks_for(tokens):
                found.append(
                    f"request {request.request_id} holds {self.kv.holds(request.request_id)} blocks "
                    f"for {tokens} tokens of which none may be missing or spare"
                )
        cached = [] if self.kv.host is None else self.kv.host.slots()
        found.extend(self.swap.pool.problems([*self.swap.slots(), *cached]))
        adapted = [(request.source.adapter, request.holds_adapter) for request in self.requests.values()]
        held = Counter(load_id for load_id, holds in adapted if load_id is not None and holds)
        live = Counter(load_id for load_id, _ in adapted if load_id is not None)
        found.extend(self.adapters.problems(dict(held), dict(live)))
        found.extend(f"request {rid} has KV on the host and does not wait" for rid in self.swap.request_ids() - waiting)
        if not self.requests and not self.flights and self.kv.num_free != self.kv.num_usable:
            found.append(f"nobody lives, but {self.kv.num_usable - self.kv.num_free} blocks are not free")
        return found

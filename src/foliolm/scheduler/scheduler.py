"""The scheduler: what runs in each step, and why. A facade; planning and committing have files of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foliolm.core.errors import QueueFullError
from foliolm.core.plan import StepPlan
from foliolm.core.protocols import ChunkBudget, Prices
from foliolm.core.request import EngineRequest, FinishReason, TokenOutput
from foliolm.core.resolve import SchedulerConfig
from foliolm.core.result import StepResult
from foliolm.kv import KVManager
from foliolm.scheduler.adapters import AdapterSlots
from foliolm.scheduler.admission import check_possible, token_limit
from foliolm.scheduler.commit import Committer
from foliolm.scheduler.families import Family, check_search, join_family
from foliolm.scheduler.forecast import Forecaster
from foliolm.scheduler.fresh_start import fresh_state
from foliolm.scheduler.kv_report import kv_report
from foliolm.scheduler.leaps import leap, like_steps
from foliolm.scheduler.planner import Planner
from foliolm.scheduler.request import Request
from foliolm.scheduler.state import SchedulerState


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A look at the scheduler; all counts.

    Attributes:
        num_running: requests that prefill or decode.
        num_waiting: requests that wait, the preempted included.
        decode_context_tokens: computed tokens of the decodes together.
        kv_blocks_total, kv_blocks_used: usable blocks a group, and those that requests hold.
        num_preemptions, recomputed_tokens, num_steps: totals since the start.
        kv_blocks_idle: free blocks that keep a prefix.
        prefix_queries, prefix_hits: tokens looked up and found in the prefix cache, totals.
        host_hits: of the tokens found, those on the host.
        evicted_blocks: idle blocks whose prefix gave way on the device, total.
        offloaded_blocks: of these, those whose content the host keeps, total.
        loaded_blocks: prefix blocks copied back from the host, total.
        num_swaps: preemptions that moved KV to the host, total.
        swap_out_bytes, swap_in_bytes: moved to the host and back, totals.
        host_blocks_total, host_blocks_used: slots of the host pool, and those that requests which gave way use.
        host_blocks_cached: slots that keep an evicted prefix block; whoever gives way may have them.
        kv_blocks_shared: blocks that more than one request holds.
        kv_unused_tokens: positions in blocks that requests hold with no token in them; at most p − 1 a request.
        forked_tokens: prompt tokens that siblings took over from one another, total.
        copied_blocks: shared blocks that were copied since one of their holders wrote, total.
    """

    num_running: int
    num_waiting: int
    decode_context_tokens: int
    kv_blocks_total: int
    kv_blocks_used: int
    num_preemptions: int
    recomputed_tokens: int
    num_steps: int
    kv_blocks_idle: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    host_hits: int = 0
    evicted_blocks: int = 0
    offloaded_blocks: int = 0
    loaded_blocks: int = 0
    num_swaps: int = 0
    swap_out_bytes: int = 0
    swap_in_bytes: int = 0
    host_blocks_total: int = 0
    host_blocks_used: int = 0
    host_blocks_cached: int = 0
    kv_blocks_shared: int = 0
    kv_unused_tokens: int = 0
    forked_tokens: int = 0
    copied_blocks: int = 0


class Scheduler:
    """Decides what runs; has no clock of its own, and does the same for the same calls.

    The caller alternates: ``schedule`` a plan, run it, ``commit`` its result, in the plans' order. More than one plan
    may be in flight: ``schedule`` counts as computed what it plans, ``commit`` appends what was sampled. A plan without
    rows is not run and not committed.

    Args:
        config: its settings.
        kv: the KV manager; the scheduler is its only user.
        chunks: bounds a step's prompt tokens while streams run; None: the token budget alone does.
        prices: predicts what treatments of memory pressure cost; None: they are not compared.

    Raises:
        ValueError: ``config`` and ``kv`` disagree.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        chunks: ChunkBudget | None = None,
        prices: Prices | None = None,
    ) -> None:
        if kv.block_size != config.block_size or kv.num_usable != config.num_blocks - 1:
            raise ValueError(
                f"the scheduler has {config.num_blocks} blocks of {config.block_size}, "
                f"the KV manager {kv.num_usable + 1} of {kv.block_size}"
            )
        if not 1 <= config.max_num_seqs <= config.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs is {config.max_num_seqs}; it must be from 1 to "
                f"max_num_batched_tokens {config.max_num_batched_tokens}"
            )
        if config.mode != "chunked" and config.max_num_batched_tokens < config.max_model_len:
            raise ValueError(
                f"{config.mode} batching computes prompts whole: max_num_batched_tokens "
                f"{config.max_num_batched_tokens} is below max_model_len {config.max_model_len}"
            )
        self.config = config
        self._chunks = chunks
        self._prices = prices
        self._arrivals = 0
        self._begin(SchedulerState(config, kv))

    def _begin(self, state: SchedulerState) -> None:
        self._state = state
        self._planner = Planner(state, self._chunks, self._prices)
        self._committer = Committer(state)
        self._forecaster = None if self._prices is None else Forecaster(state, self._prices)

    @property
    def has_work(self) -> bool:
        """True while any request lives."""
        return bool(self._state.requests)

    def add(self, request: EngineRequest, now: int) -> None:
        """Take a request into the waiting queue.

        Args:
            request: its id must be new.
            now: the clock, ns.

        Raises:
            RequestError: it can never run; the message holds the sum.
            QueueFullError: as many wait as may, or (TtftTargetError) its first token would come too late.
            ValueError: the id is in use, or it asks for more than one completion.
        """
        state = self._state
        if request.request_id in state.requests:
            raise ValueError(f"request id {request.request_id} is in use")
        if request.sampling.n != 1:
            raise ValueError(
                f"request {request.request_id} asks for n={request.sampling.n}; split it into siblings first"
            )
        check_possible(request, self.config, state.kv)
        limit = token_limit(request, self.config, state.kv)
        check_search(request, limit, state.kv, self.config.max_num_seqs)
        if state.num_waiting >= self.config.max_queued_requests:
            raise QueueFullError(
                f"{state.num_waiting} requests are waiting; the limit is {self.config.max_queued_requests} "
                "(--max-queued-requests)"
            )
        self._arrivals += 1
        priority = request.priority if self.config.scheduling_policy == "priority" else 0
        order = (priority, request.arrival_ns, self._arrivals)
        live = Request(request, order, limit, now, self.config.block_size)
        if self.config.enable_prefix_caching and live.root is not None:
            state.promises.prepare(live)
        if self._forecaster is not None:
            self._forecaster.check(live, self._planner.known_tokens(live))
        if state.served is not None:
            state.served.enter(live, state.decodes.tick)
        family = join_family(live, state.requests) if request.sibling else None
        state.requests[request.request_id] = live
        state.adapters.enter(request.adapter)
        if family is not None:
            state.families.park(live, family)
            return
        if request.sampling.beam is not None:
            live.family = Family(live)
        state.waiting.push(live)

    def abort(self, request_id: int, now: int) -> TokenOutput | None:
        """End a request in any state, and free what it holds; None, and nothing else, for one that is not live."""
        request = self._state.requests.get(request_id)
        return None if request is None else self._committer.finish(request, FinishReason.ABORT, now)

    def together(self, request_ids: Sequence[int]) -> list[int]:
        """The ids, and those of requests that can only end with one of them: the hypotheses of one search."""
        return self._state.families.together(request_ids)

    def schedule(self, now: int) -> StepPlan:
        """Plan the next step; one without rows has nothing to run until a commit or an arrival.

        Args:
            now: the clock, ns; goes into the plan and the requests' stamps.

        Raises:
            Exception: whatever planning raised. Nobody lives then: every request is forgotten, without an output, and
                all memory is free once the steps in flight are committed. New requests are served.
        """
        try:
            return self._planner.plan(now)
        except Exception:
            self._start_afresh()
            raise

    def like_steps(self) -> int:
        """How many of the next steps only decode, and decide nothing; 0 where that cannot be said. See `leaps`."""
        return like_steps(self._state, self._planner.is_full)

    def leap(self, count: int, now: int) -> tuple[list[int], list[TokenOutput]]:
        """Take so many of those steps at once, as ``schedule`` and ``commit`` would.

        Args:
            count: at most what ``like_steps`` says.
            now: the clock after them, ns.

        Returns:
            Blocks in use after each step, before what ended in it gave back its own; and what ended in the last.
        """
        used, ending = leap(self._state, count)
        self._planner.pass_steps(count)
        return used, [self._committer.end_virtual(request, now) for request in ending]

    def steady(self) -> tuple[int, int]:
        """The decodes' number, and their contexts together, before the next step."""
        decodes = self._state.decodes
        return len(decodes), decodes.context_tokens

    def longest_context(self) -> int:
        """Of the decodes, before the next step; there must be some."""
        return self._state.decodes.longest_context()

    def commit(self, plan: StepPlan, result: StepResult, now: int) -> list[TokenOutput]:
        """Append what a step sampled; plans are committed in their order.

        Returns:
            What is new, by request; in virtual time only the ends.

        Raises:
            ValueError: another step is the oldest in flight, or the result has another number of rows.
        """
        return self._committer.commit(plan, result, now)

    def fail(self, plan: StepPlan, message: str, now: int) -> list[TokenOutput]:
        """A step raised: end its requests with an error, and leave everybody else alone.

        Raises:
            Exception: as for ``schedule``; nobody lives then.
        """
        try:
            return self._committer.fail(plan, message, now)
        except Exception:
            self._start_afresh()
            raise

    def _start_afresh(self) -> None:
        planner = self._planner
        self._begin(fresh_state(self._state))
        self._planner.go_on_from(planner)

    def load(self) -> tuple[int, int]:
        """Requests that wait, and KV blocks that requests hold; O(1), for every step."""
        kv = self._state.kv
        return len(self._state.waiting), kv.num_usable - kv.num_free - kv.num_fenced

    def stats(self) -> SchedulerStats:
        """Counts as of now; O(1)."""
        state = self._state
        kv = state.kv
        cached = 0 if kv.host is None else len(kv.host)
        return SchedulerStats(
            num_running=state.num_running,
            num_waiting=state.num_waiting,
            decode_context_tokens=state.decodes.context_tokens,
            kv_blocks_total=kv.num_usable,
            kv_blocks_used=kv.num_usable - kv.num_free - kv.num_fenced,
            num_preemptions=state.counters.preemptions,
            recomputed_tokens=state.counters.recomputed_tokens,
            num_steps=state.counters.steps,
            kv_blocks_idle=kv.num_idle,
            prefix_queries=state.counters.prefix_queries,
            prefix_hits=state.counters.prefix_hits,
            host_hits=state.counters.host_hits,
            evicted_blocks=kv.evicted_blocks,
            offloaded_blocks=kv.offloaded_blocks,
            loaded_blocks=state.counters.loaded_blocks,
            num_swaps=state.counters.swaps,
            swap_out_bytes=state.counters.swap_out_bytes,
            swap_in_bytes=state.counters.swap_in_bytes,
            host_blocks_total=state.swap.pool.num_slots,
            host_blocks_used=state.swap.pool.num_used - cached,
            host_blocks_cached=cached,
            kv_blocks_shared=kv.num_shared_blocks,
            kv_unused_tokens=state.unused_tokens,
            forked_tokens=state.counters.forked_tokens,
            copied_blocks=state.counters.copied_blocks,
        )

    def kv_report(self) -> dict[str, Any]:
        """Who holds the KV memory, and what it keeps; see ``kv_report.kv_report``. O(blocks + requests)."""
        return kv_report(self._state)

    def reset_prefix_cache(self) -> int:
        """Forget every shared prefix, on the host too; running requests keep their blocks.

        Returns:
            How many blocks kept a prefix, those on the host alone included.
        """
        return self._state.kv.reset_prefixes()

    @property
    def adapters(self) -> AdapterSlots:
        """The LoRA adapters' slots. Not to be changed but by ``forget``."""
        return self._state.adapters

    def problems(self) -> list[str]:
        """The invariant check over scheduler and KV: a sentence for each thing that is wrong. O(requests + blocks)."""
        return self._state.problems()

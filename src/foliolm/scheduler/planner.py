"""Planning a step: decodes, prompts, admissions, and the reason for whatever does not run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from foliolm.core.adapter import AdapterRows
from foliolm.core.plan import (
    NOBODY,
    BlockCopy,
    Closed,
    Decision,
    DecisionKind,
    DecodeRows,
    Fork,
    LogitsAt,
    OwnBlock,
    Row,
    StepPlan,
)
from foliolm.core.plan import Admission as AdmissionNote
from foliolm.core.protocols import ChunkBudget, Prices
from foliolm.scheduler.admission import Admission, Attempt, Outcome
from foliolm.scheduler.budget import PrefillBudget
from foliolm.scheduler.offloading import Offloading
from foliolm.scheduler.request import Request, State
from foliolm.scheduler.state import Flight, SchedulerState
from foliolm.scheduler.treatments import Treatment, Treatments

ALL_DECODES = -1
"""Stands for a request id in a decision about every steady decode."""
MAX_SKIPS = 32
"""Requests that one step passes over before it stops looking: a bound on a step's work, not on anyone's wait."""
MOST_YIELDS = 4
"""Requests that give way in one step for a tenant whose turn it is."""
MAX_PROMPT_STEPS_IN_A_ROW = 16
"""Under prefill-first, after so many steps of prompts the running streams get one."""


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    step_id: int
    now: int
    decodes: DecodeRows = field(default_factory=DecodeRows)
    by_adapter: tuple[tuple[int, int], ...] = ()
    rows: list[Row] = field(default_factory=list)
    admissions: list[AdmissionNote] = field(default_factory=list)
    tables: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    ending: list[Request] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    own_blocks: list[OwnBlock] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    waits: dict[int, Decision] = field(default_factory=dict)
    closed: Closed = Closed.EMPTY
    preempted: bool = False
    yielded_to: Request | None = None
    stalled: bool = False


class Planner:
    """Makes one plan after another out of the scheduler's state.

    The four ways of batching differ in two things: whether a step holds prompts beside decodes, and whether a prompt
    may be cut. Everything else is common.

    Args:
        state: shared with the committer.
        chunks: bounds a step's prompt tokens while streams run; None: the token budget alone does.
        prices: predicts what giving way costs; None: nothing is compared.
    """

    def __init__(self, state: SchedulerState, chunks: ChunkBudget | None = None, prices: Prices | None = None) -> None:
        self._state = state
        self._chunks = chunks
        self._config = state.config
        self._kv = state.kv
        self._treatments = Treatments(state, prices)
        self._offloading = Offloading(state, prices)
        self._admission = Admission(
            state.config,
            state.kv,
            state.promises,
            state.swap,
            state.landed,
            state.adapters,
            self._treatments.waiting_or_computing,
            self._offloading.worth_copying,
        )
        self._step_id = 0
        self._prices = prices
        by_prefix = state.config.scheduling_policy == "prefix"
        if state.config.lora_grouping == "cost":
            state.waiting.rank_by(self._adapter_then_prefix if by_prefix else self._added_by_adapter)
        elif by_prefix:
            state.waiting.rank_by(self._admission.uncached_share)
        self._prompts_apart = state.config.mode in ("static", "prefill-first")
        self._whole_prompts = state.config.mode != "chunked"
        self._batch_open = True
        self._prompt_steps = 0
        self._evicted = self._offloaded = 0

    def plan(self, now: int) -> StepPlan:
        """The next step. One without rows need not be run: there is nothing to do, or nothing until a commit."""
        draft = _Draft(self._step_id + 1, now)
        self._state.waiting.now = now
        self._state.adapters.look_again()
        if self._state.searches and self._state.flights:
            return self._seal(draft)  # what hypotheses live on is known once the step in flight is committed
        if self._state.served is not None and len(self._state.waiting):
            self._yield_turn(draft)
        if self._prompts_apart:
            if self._prompts_may_run(draft):
                self._plan_prompts(draft, self._config.max_num_batched_tokens)
            if draft.rows:
                self._prompt_steps += 1
                self._skip_decodes(draft, self._config.mode.replace("-", "_"), 0)
            else:
                self._plan_decodes(draft)
        else:
            self._plan_decodes(draft)
            if not draft.stalled:
                self._plan_prompts(draft, self._config.max_num_batched_tokens - len(draft.decodes))
        return self._seal(draft)

    def _added_by_adapter(self, request: Request) -> float:
        """Predicted seconds that a waiting request's adapter adds to each step; 0 where it is read anyway."""
        load_id = request.source.adapter
        if load_id is None or self._state.adapters.is_running(load_id):
            return 0.0
        return 1.0 if self._prices is None else self._prices.adapter(load_id)

    def _adapter_then_prefix(self, request: Request) -> tuple[float, float]:
        return self._added_by_adapter(request), self._admission.uncached_share(request)

    def known_tokens(self, request: Request) -> int:
        """Leading tokens of a request that has arrived that it need not compute."""
        return self._admission.known_tokens(request)

    @property
    def is_full(self) -> bool:
        """True where nobody may join those who run until one of them leaves, and every step says so alike."""
        if self._config.mode == "static":
            return not self._batch_open
        return self._state.num_running >= self._config.max_num_seqs and not self._prompt_steps

    def go_on_from(self, old: Planner) -> None:
        """Take over the count of steps of the planner before, and the total of what its host tier kept."""
        self._step_id = old._step_id
        self._evicted = self._kv.evicted_blocks
        if self._kv.host is not None:
            self._offloaded = self._kv.host.kept_blocks = old._kv.offloaded_blocks

    def pass_steps(self, count: int) -> None:
        """So many steps of decodes alone were taken at once."""
        self._step_id += count
        self._prompt_steps = 0
        self._batch_open = False
        self._state.last_decode_step = self._step_id

    def _prompts_may_run(self, draft: _Draft) -> bool:
        """Where prompts have steps of their own: whether this may be one."""
        if self._config.mode == "static":
            self._batch_open = self._batch_open or not self._state.num_running
            if not self._batch_open:
                self._hold_back(draft, "batch_closed", Closed.SEQUENCES)
            return self._batch_open
        if self._prompt_steps >= MAX_PROMPT_STEPS_IN_A_ROW and self._state.decodes:
            self._hold_back(draft, "decodes_due", Closed.TOKENS)
            return False
        return True

    def _hold_back(self, draft: _Draft, reason: str, closed: Closed) -> None:
        head = self._state.waiting.head()
        if head is not None:
            running = self._state.num_running
            draft.waits[head.request_id] = Decision(
                DecisionKind.WAIT,
                head.request_id,
                reason,
                1,
                max(0, self._config.max_num_seqs - running),
                self._newest(),
            )
            draft.closed = closed

    def _skip_decodes(self, draft: _Draft, reason: str, available: int) -> None:
        if self._state.decodes:
            needed = len(self._state.decodes)
            draft.decisions.append(Decision(DecisionKind.SKIP, ALL_DECODES, reason, needed, available))

    # --- decodes

    def _plan_decodes(self, draft: _Draft) -> None:
        decodes = self._state.decodes
        self._prompt_steps = 0
        if not self._make_room(draft):
            draft.stalled = True
            return
        if not decodes:
            return
        if self._state.forked:
            self._own_blocks(draft)
        draft.by_adapter = decodes.by_adapter
        grow = self._kv.grow
        draft.decodes, draft.ending = decodes.run(tuple((rid, grow(rid)) for rid in decodes.crossing()))
        for request in draft.ending:
            request.last_step = draft.step_id
        self._state.last_decode_step = draft.step_id
        self._batch_open = False

    def _make_room(self, draft: _Draft) -> bool:
        """Blocks for every decode that crosses, by preemption if need be; False: only a commit can give them."""
        state = self._state
        while (needed := state.families.blocks_wanted()) > self._kv.num_free:
            if needed <= self._kv.num_free + self._kv.num_fenced:
                self._skip_decodes(draft, "fence", self._kv.num_free)
                return False
            treatment = self._treatments.choose()
            if treatment is None:
                if not state.flights:
                    raise RuntimeError(
                        f"the only running request lacks {needed} KV blocks; its limit should prevent that"
                    )
                self._skip_decodes(draft, "fence", self._kv.num_free)
                return False
            # Those who take blocks cross into new ones, or write where they share one.
            takers = (state.decodes.crossing() or state.forked).values()
            first = min(takers, key=lambda request: request.order)
            self._preempt(treatment, needed, first.request_id, draft)
        return True

    def _own_blocks(self, draft: _Draft) -> None:
        """Copy each shared block that a decode is about to write in; the last of its holders keeps it."""
        kv, size = self._kv, self._config.block_size
        for request, position in self._state.families.shared_positions():
            rid = request.request_id
            if not kv.is_shared(rid, position):
                continue
            blocks, copies = kv.own(rid, position)
            draft.copies.extend(copies)
            draft.own_blocks.append(OwnBlock(rid, position // size, blocks))
            self._state.counters.copied_blocks += 1
        self._state.forked.clear()

    def _yield_turn(self, draft: _Draft) -> None:
        """Where the tenant whose turn it is has less than its share of the batch, the one with the most gives way."""
        state = self._state
        for _ in range(MOST_YIELDS):
            head = state.waiting.head()
            if head is None or head.pending:
                return
            room = PrefillBudget(1 << 30, 1 << 30, 0.0, False)
            decision = self._admission.attempt(head, room, state.num_running + state.seats, None).decision
            if decision.reason not in ("kv_blocks", "sequences"):
                return
            if decision.reason == "kv_blocks" and decision.needed <= self._kv.num_free + self._kv.num_fenced:
                return
            counts = Counter(request.source.tenant for request in state.running())
            if not counts:
                return
            mine = head.source.tenant
            share = state.num_running / len({mine, *counts})
            richest = max(counts, key=lambda tenant: counts[tenant])
            if counts[mine] + 1 > share or counts[richest] - 1 < share or richest == mine:
                return
            treatment = self._treatments.choose(richest)
            if treatment is None:
                return
            draft.yielded_to = head
            self._preempt(treatment, decision.needed, head.request_id, draft)

    def _preempt(self, treatment: Treatment, needed: int, blocker: int, draft: _Draft) -> None:
        state, victim = self._state, treatment.victim
        available = self._kv.num_free
        victim.pending = state.pending(victim)
        if treatment.swap:
            state.swap_out(victim, treatment.num_computed)
        else:
            state.counters.recomputed_tokens += treatment.num_computed
        state.withdraw(victim)
        state.counters.preemptions += 1
        victim.num_preemptions += 1
        victim.num_computed = 0
        victim.state = State.WAITING
        state.waiting.push(victim)
        if victim.pending:
            state.owed[victim.request_id] = victim
        state.preempted.append(victim.request_id)
        draft.preempted = True
        draft.decisions.append(
            Decision(
                DecisionKind.PREEMPT,
                victim.request_id,
                treatment.reason,
                needed,
                available,
                blocker,
                treatment.predicted_s,
            )
        )

    # --- prompts

    def _plan_prompts(self, draft: _Draft, tokens: int) -> None:
        state, config = self._state, self._config
        if not state.prefilling and not len(state.waiting):
            return
        tokens, limit = self._bounded(draft, tokens)
        budget = PrefillBudget(
            tokens, config.long_prefill_token_threshold, config.short_prompt_share, self._whole_prompts
        )
        served = state.served
        if served is not None and not draft.preempted:
            self._admit(draft, budget, before_all=True)
        for request in self._in_turn():
            if not budget.granted(request.request_id):
                budget.grant(request.request_id, request.num_tokens - request.num_computed)
        passed_over = self._admit(draft, budget)
        budget.spread()
        if passed_over and budget.left > 0:
            self._admit(draft, budget)
        grants = budget.grants()
        for rid in state.prefilling:
            if rid not in grants:
                draft.decisions.append(Decision(DecisionKind.SKIP, rid, "token_budget", 1, budget.left))
        for rid, count in grants.items():
            draft.rows.append(self._row(state.prefilling[rid], count, draft))
        if draft.closed is Closed.EMPTY and state.prefilling:
            draft.closed = Closed.TOKENS
        if draft.closed is Closed.TOKENS and limit is not None:
            draft.closed = limit

    def _in_turn(self) -> list[Request]:
        """Partial prompts in order; the least served tenant's first where tenants take turns."""
        state, served = self._state, self._state.served
        if not state.prefilling:
            return []
        prefilling = sorted(state.prefilling.values(), key=lambda request: request.order)
        if served is not None:
            tick = state.decodes.tick
            prefilling.sort(key=lambda request: served.served(request.source.tenant, tick))
        return prefilling

    def _bounded(self, draft: _Draft, tokens: int) -> tuple[int, Closed | None]:
        """The step's prompt tokens, and what bounds them where that is not the token budget."""
        if self._chunks is None or not len(draft.decodes) or tokens <= 0:
            return tokens, None
        context = max((request.num_computed for request in self._state.prefilling.values()), default=0)
        return self._chunks.prompt_tokens(len(draft.decodes), draft.decodes.context_tokens, context, tokens)

    def _admit(self, draft: _Draft, budget: PrefillBudget, before_all: bool = False) -> bool:
        """Start whoever may; True if somebody was passed over for want of tokens while some were left.

        Args:
            draft: the plan in the making.
            budget: what prompts may have of it.
            before_all: only those whose tenant was served less than every tenant with a partial prompt.
        """
        waiting = self._state.waiting
        if draft.preempted and draft.yielded_to is None:
            self._hold_back(draft, "preempted_this_step", Closed.KV)
            return False
        passed_over: list[Request] = []
        for_tokens = False
        while len(passed_over) < MAX_SKIPS and (head := waiting.head()) is not None:
            if draft.preempted and head is not draft.yielded_to:
                break
            if before_all and not self._comes_before_all(head):
                break
            attempt = self._admission.attempt(head, budget, self._state.num_running + self._state.seats, self._newest())
            if attempt.outcome is Outcome.ADMIT:
                waiting.take(head)
                self._start(head, attempt, budget, draft)
                continue
            draft.waits[head.request_id] = attempt.decision
            draft.closed = attempt.closed
            if attempt.decision.reason == "adapter_slots":
                self._state.adapters.skipped(head, draft.now)
            if attempt.outcome is Outcome.STOP:
                break
            for_tokens = for_tokens or attempt.closed is Closed.TOKENS
            waiting.take(head)
            passed_over.append(head)
        for request in passed_over:
            waiting.push(request)
        return for_tokens

    def _comes_before_all(self, head: Request) -> bool:
        served, tick = self._state.served, self._state.decodes.tick
        assert served is not None
        mine = served.served(head.source.tenant, tick)
        others = {request.source.tenant for request in self._state.prefilling.values()}
        return bool(others) and all(mine < served.served(tenant, tick) for tenant in others)

    def _start(self, request: Request, attempt: Attempt, budget: PrefillBudget, draft: _Draft) -> None:
        rid = request.request_id
        match = self._admission.match(request)
        sharing = self._config.enable_prefix_caching
        root = request.root if sharing else None
        if self._state.swap.usable(rid, match):
            draft.tables[rid] = self._state.swap_in(request, match, root)
        else:
            if attempt.from_host:
                draft.tables[rid] = self._state.load_prefix(request, match, root)
            else:
                draft.tables[rid] = self._kv.allocate(rid, request.num_tokens, match, root)
                request.num_computed = match.num_tokens
            self._state.lose_swapped(request, request.num_computed)
        family = request.family
        if family is not None and family.beam is not None:
            self._kv.reserve(rid, family.spare_blocks(self._kv))
            family.seats = family.beam.width - 1
            self._state.seats += family.seats
        self._state.adapters.hold(request)
        draft.waits.pop(rid, None)
        draft.decisions.append(attempt.decision)
        draft.admissions.append(_note(request, request.num_computed))
        if sharing and request.root is not None:
            if not request.admitted_ns:
                request.num_cached = request.num_computed
                self._state.counters.prefix_queries += request.num_prompt
                self._state.counters.prefix_hits += request.num_cached
                self._state.counters.host_hits += request.num_cached - match.num_tokens
            self._state.promises.make(request, request.num_computed)
        if self._state.served is not None:
            self._state.served.charge(request, request.num_tokens - request.num_computed)
        request.state = State.PREFILLING
        request.resumed_at = request.num_tokens
        request.admitted_ns = request.admitted_ns or draft.now
        self._state.prefilling[rid] = request
        budget.grant(rid, request.num_tokens - request.num_computed)

    def _row(self, request: Request, count: int, draft: _Draft) -> Row:
        """A chunk; where it catches up with the tokens, the request samples, and decodes from the next step on."""
        rid, context = request.request_id, request.num_computed
        logits = LogitsAt.NONE
        forks: tuple[int, ...] = ()
        if request.wants_prompt_logprobs() and context < request.num_prompt:
            logits |= LogitsAt.ALL
        request.num_computed += count
        request.last_step = draft.step_id
        if request.num_computed == request.num_tokens:
            logits |= LogitsAt.LAST
            request.sample_step = draft.step_id
            request.num_tokens += 1
            del self._state.prefilling[rid]
            if request.family is not None:
                forks = self._fork(request, draft)
            if request.num_tokens >= request.limit:
                request.state = State.ENDING
                draft.ending.append(request)
            else:
                self._state.decodes.join(request)
        blocks = draft.tables.get(rid)
        return Row(
            rid, count, context, blocks or (), blocks is not None, logits, adapter=request.source.adapter, forks=forks
        )

    def _fork(self, leader: Request, draft: _Draft) -> tuple[int, ...]:
        """The siblings of a request whose prompt is computed in this step sample from its logits, and share blocks."""
        state = self._state
        assert leader.family is not None
        siblings = state.families.at_prompt_end(leader, leader.family, draft.step_id, draft.now)
        for request in siblings:
            rid = request.request_id
            draft.admissions.append(_note(request, request.num_prompt))
            draft.forks.append(Fork(rid, leader.request_id, request.num_prompt))
            draft.decisions.append(Decision(DecisionKind.ADMIT, rid, "forks", 0, self._kv.num_free, leader.request_id))
            if request.state is State.ENDING:
                draft.ending.append(request)
        return tuple(request.request_id for request in siblings)

    def _newest(self) -> int | None:
        """The request admitted last of those that run."""
        for requests in (self._state.prefilling, self._state.decodes.members):
            if requests:
                return next(reversed(requests))
        return None

    # --- the plan

    def _seal(self, draft: _Draft) -> StepPlan:
        state = self._state
        self._say_evicted(draft)
        decisions = (*draft.decisions, *draft.waits.values())
        if not draft.rows and not draft.decodes.request_ids:
            return StepPlan(draft.step_id, draft.now, decisions=decisions, closed=draft.closed)
        begun = [request for request in state.begun if request.request_id in state.requests]
        offloaded = state.take_offloaded()
        plan = StepPlan(
            step_id=draft.step_id,
            time_ns=draft.now,
            decodes=draft.decodes,
            rows=tuple(draft.rows),
            admissions=(*draft.admissions, *(_note(request, request.num_computed) for request in begun)),
            preempted=tuple(state.preempted),
            released=tuple(state.released),
            swaps_out=tuple(state.swaps_out),
            swaps_in=tuple(state.swaps_in),
            swapped=tuple(state.swap_notes),
            copies=tuple(draft.copies),
            forks=(*(fork for fork in state.forks if fork.request_id in state.requests), *draft.forks),
            own_blocks=tuple(draft.own_blocks),
            adapters=_by_adapter(draft),
            adapters_in=tuple(state.adapters.loads),
            adapters_out=tuple(state.adapters.outs),
            decisions=decisions,
            closed=draft.closed,
            pending_step=state.flights[-1].step_id if state.flights else None,
            padded_tokens=len(draft.decodes.request_ids) + sum(row.num_new_tokens for row in draft.rows),
        )
        state.adapters.seal()
        state.preempted.clear()
        state.released.clear()
        state.forks.clear()
        state.begun.clear()
        residencies = {}
        if self._config.enable_prefix_caching:
            for row in plan.rows:
                residencies[row.request_id] = state.requests[row.request_id].num_preemptions
        tick = draft.decodes.tick if draft.decodes.request_ids else -1
        flight = Flight(plan.step_id, tick, draft.ending, residencies, offloaded=offloaded)
        if plan.swapped:
            self._seal_swaps(flight)
        state.flights.append(flight)
        state.counters.steps += 1
        self._step_id = plan.step_id
        return plan

    def _say_evicted(self, draft: _Draft) -> None:
        """What room cost that nobody had to give way for: prefixes that are lost, and those that the host keeps."""
        kv = self._kv
        if kv.evicted_blocks == self._evicted:
            return
        kept = kv.offloaded_blocks - self._offloaded
        lost = kv.evicted_blocks - self._evicted - kept
        self._evicted, self._offloaded = kv.evicted_blocks, kv.offloaded_blocks
        if lost:
            draft.decisions.append(Decision(DecisionKind.EVICT, NOBODY, "idle_prefixes", lost, kv.num_free))
        if kept > 0:
            costs = self._offloading.take_costs()
            decision = Decision(
                DecisionKind.EVICT, NOBODY, "prefix_to_host", kept, self._state.swap.pool.num_free, None, costs
            )
            draft.decisions.append(decision)

    def _seal_swaps(self, flight: Flight) -> None:
        state = self._state
        for note in state.swap_notes:
            request = state.requests.get(note.request_id)
            if note.blocks_out and request is not None and request.is_swapped and not request.swap_step:
                request.swap_step = flight.step_id
                flight.swapped_out.append(note.request_id)
        state.swaps_out.clear()
        state.swaps_in.clear()
        state.swap_notes.clear()
        state.swap.pool.seal()


def _by_adapter(draft: _Draft) -> tuple[AdapterRows, ...]:
    """What each adapter has of a step."""
    if all(row.adapter is None for row in draft.rows):
        return tuple(AdapterRows(load_id, count, count, count) for load_id, count in draft.by_adapter)
    counts = {load_id: [count, count, count] for load_id, count in draft.by_adapter}
    for row in draft.rows:
        if row.adapter is not None:
            mine = counts.setdefault(row.adapter, [0, 0, 0])
            mine[0] += row.num_new_tokens
            mine[1] += 1 + len(row.forks) if row.logits & LogitsAt.LAST else 0
            mine[2] += 1
    return tuple(AdapterRows(load_id, *numbers) for load_id, numbers in counts.items())


def _note(request: Request, num_cached: int) -> AdmissionNote:
    """What the executor must know of a request that enters."""
    source = request.source
    return AdmissionNote(
        request.request_id,
        tuple(request.tokens),
        request.num_prompt,
        source.sampling,
        source.eos_token_ids,
        source.adapter,
        num_cached,
    )

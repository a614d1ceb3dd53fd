"""The ledger: what each step and each request cost, kept in bounded memory and, where asked, on disk."""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from foliolm.core.adapter import AdapterSize
from foliolm.core.machine import MachineLimits
from foliolm.core.plan import LogitsAt, StepPlan
from foliolm.core.record import RequestRecord, StepRecord, StepWork
from foliolm.core.request import EngineRequest, FinishReason, RequestStamps, TokenOutput
from foliolm.core.result import StepResult, StepSeconds
from foliolm.core.valueclass import valueclass
from foliolm.ledger.accounts import linear_flops, weight_bytes_per_step
from foliolm.ledger.journal import Journal
from foliolm.ledger.lines import AdapterLine, CostLine, RequestLine, StepLine
from foliolm.ledger.plan_cost import counts_of_plan
from foliolm.ledger.shares import Shares
from foliolm.ledger.step_cost import StepCost, StepCounts, StepTerms
from foliolm.ledger.timelines import Timelines

DEFAULT_CAPACITY = 4096
_NS = 1_000_000_000
_NO_WORK = StepWork()


@dataclass(slots=True)
class LedgerTotals:
    """Sums over the engine's whole life; they only rise.

    Attributes:
        num_steps, num_failed_steps: steps that ran to their end, and steps that raised.
        num_tokens: tokens computed, recomputed ones included.
        num_sampled: tokens sampled.
        step_seconds, predicted_seconds: measured and predicted seconds of all steps.
        adapter_bytes, adapter_loads: bytes of LoRA adapters that steps read, and copies of adapters into slots.
    """

    num_steps: int = 0
    num_failed_steps: int = 0
    num_tokens: int = 0
    num_sampled: int = 0
    step_seconds: float = 0.0
    predicted_seconds: float = 0.0
    adapter_bytes: float = 0.0
    adapter_loads: int = 0


@dataclass(slots=True)
class _Open:
    """What the ledger must remember of a request until it ends."""

    request: EngineRequest
    num_output_tokens: int = 0


@valueclass
class Load:
    """The scheduler's state at a commit: requests that wait, KV blocks in use."""

    num_waiting: int = 0
    kv_blocks_used: int = 0


@valueclass
class _Like:
    """What was predicted of a step of decodes alone; of the next it differs only by their contexts."""

    cost: StepCost
    num_decodes: int
    terms: StepTerms
    work: StepWork


class Ledger:
    """Keeps the newest steps and the newest ended requests, totals of all, and the open requests' timelines.

    ``on_step`` lists who is told of every step, in the engine's thread; ``adapters`` holds the sizes of LoRA adapters
    by load id.

    Args:
        engine: which engine of the client's list this is; part of every record's key.
        capacity: how many step records and how many request records are kept.
        cost: predicts steps and splits their time; None: nothing is predicted, and every token weighs the same.
        cost_source: where its coefficients come from: ``default``, ``startup``, ``file`` or ``calibrated``.
        journal: takes every record as a line; None: nothing is written.
        block_size: tokens a KV block, for the prefixes' hashes that a journal keeps.
        timelines: whether to keep where each request's time goes; without a journal nobody may want to know.
        limits: how fast the machine reads and multiplies; None: unknown.
    """

    def __init__(
        self,
        engine: int = 0,
        capacity: int = DEFAULT_CAPACITY,
        cost: StepCost | None = None,
        cost_source: str = "default",
        journal: Journal | None = None,
        block_size: int = 16,
        timelines: bool = True,
        limits: MachineLimits | None = None,
    ) -> None:
        self.engine = engine
        self.steps: deque[StepRecord] = deque(maxlen=capacity)
        self.requests: deque[RequestRecord] = deque(maxlen=capacity)
        self.totals = LedgerTotals()
        self.cost = cost
        self.cost_source = cost_source
        self.journal = journal
        self.limits = limits
        self.adapters: dict[int, AdapterSize] = {}
        self.on_step: list[Callable[[StepRecord], None]] = []
        self._block_size = block_size
        self._open: dict[int, _Open] = {}
        self._timelines = Timelines(Shares(cost)) if timelines or journal is not None else None
        self._known_version = -1
        self._tokens_are_known = True
        self._like: _Like | None = None

    def record(self, plan: StepPlan, result: StepResult, now: int, load: Load | None = None) -> StepRecord:
        """Book a step that ran.

        Args:
            plan: what ran.
            result: what came of it.
            now: the clock at its commit, ns.
            load: the scheduler's state.
        """
        # Where nobody reads steps one by one, nobody reads what was predicted of each.
        terms, work = (None, _NO_WORK) if self.takes_leaps else self._predicted(plan)
        record = self._step_record(plan, result.seconds, now, load or Load(), terms, work)
        self._tokens_are_known = result.tokens is not None
        if self._timelines is not None:
            self._timelines.book(plan, round(result.seconds.total * _NS), now, terms)
        self.steps.append(record)
        totals = self.totals
        totals.num_steps += 1
        totals.num_tokens += record.num_tokens
        totals.num_sampled += record.num_sampled
        totals.step_seconds += result.seconds.total
        totals.predicted_seconds += record.predicted_s
        totals.adapter_bytes += work.lora_bytes
        totals.adapter_loads += len(plan.adapters_in)
        if self.journal is not None:
            self.journal.write(StepLine(record))
        for take in self.on_step:
            take(record)
        return record

    @property
    def takes_leaps(self) -> bool:
        """Whether nobody reads steps one by one, so that runs of them may be booked at once."""
        return self._timelines is None and self.journal is None and not self.on_step

    def leap(self, num_decodes: int, count: int, busy_ns: int) -> None:
        """Book steps of the same decodes; they leave no records, and nothing was predicted of them."""
        totals = self.totals
        totals.num_steps += count
        totals.num_tokens += count * num_decodes
        totals.num_sampled += count * num_decodes
        totals.step_seconds += busy_ns / _NS

    def record_failure(self, plan: StepPlan | None, now: int) -> None:
        """Book a step that raised; ``plan`` is None where planning itself did."""
        self.totals.num_failed_steps += 1
        if plan is not None and self._timelines is not None:
            self._timelines.book(plan, max(0, now - plan.time_ns), now)

    def use_cost(self, cost: StepCost, source: str) -> None:
        """Predict with another step cost from the next step on."""
        self.cost, self.cost_source = cost, source
        if self._timelines is not None:
            self._timelines.use(Shares(cost))
        if self.journal is not None:
            self.journal.write(CostLine(self.engine, cost, source))

    def add_adapter(self, load_id: int, size: AdapterSize) -> None:
        """A LoRA adapter that steps may read from now on."""
        if self.adapters.get(load_id) != size:
            self.adapters[load_id] = size
            if self.journal is not None:
                self.journal.write(AdapterLine(load_id, size))

    def open(self, request: EngineRequest, now: int) -> None:
        """A request entered the engine's queue at ``now``."""
        self._open[request.request_id] = _Open(request)
        if self._timelines is not None:
            self._timelines.open(request, now)

    def note(self, output: TokenOutput, now: int, flying: StepPlan | None = None) -> RequestRecord | None:
        """Book what a request was given at ``now``; returns its record if this was its last output.

        Args:
            output: of the request.
            now: the clock of the commit, or of the abort.
            flying: the oldest step in flight, if there is one.
        """
        entry = self._open.get(output.request_id)
        if entry is None:
            return None
        entry.num_output_tokens += len(output.token_ids)
        if output.finish_reason is None:
            return None
        del self._open[output.request_id]
        request = entry.request
        timeline = None
        if self._timelines is None:
            if output.stamps is not None:
                entry.num_output_tokens = output.stamps.num_output_tokens
        else:
            if not self._tokens_are_known:
                entry.num_output_tokens = self._timelines.num_sampled(output.request_id)
            in_flight = None if flying is None else (flying, flying.time_ns)
            timeline = self._timelines.close(output.request_id, now, in_flight)
        record = RequestRecord(
            engine=self.engine,
            request_id=output.request_id,
            label=request.label,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=entry.num_output_tokens,
            finish_reason=FinishReason(output.finish_reason),
            stamps=output.stamps or RequestStamps(arrival_ns=request.arrival_ns),
            timeline=timeline,
            priority=request.priority,
            max_tokens=request.sampling.max_tokens,
            prefix=prefix_hashes(request, self._block_size) if self.journal is not None else (),
            adapter=request.adapter,
        )
        self.requests.append(record)
        if self.journal is not None:
            self.journal.write(RequestLine(record))
        return record

    @property
    def open_request_ids(self) -> tuple[int, ...]:
        """Requests that entered and have not ended, oldest first."""
        return tuple(self._open)

    def close(self) -> None:
        """Close the journal, if there is one."""
        if self.journal is not None:
            self.journal.close()

    def _step_record(
        self, plan: StepPlan, seconds: StepSeconds, now: int, load: Load, terms: StepTerms | None, work: StepWork
    ) -> StepRecord:
        decodes = plan.decodes
        # Who decodes is said when it changes: a steady step then costs the same at any batch.
        is_new = len(decodes) > 0 and decodes.version != self._known_version
        if is_new:
            self._known_version = decodes.version
        return StepRecord(
            engine=self.engine,
            step_id=plan.step_id,
            time_ns=plan.time_ns,
            num_rows=plan.num_rows,
            num_decodes=len(decodes),
            num_tokens=plan.num_tokens,
            num_sampled=plan.num_sampled,
            context_tokens=decodes.context_tokens + (sum(row.context for row in plan.rows) if plan.rows else 0),
            seconds=seconds,
            closed=plan.closed,
            decisions=plan.decisions,
            end_ns=now,
            rows=tuple(
                (
                    row.request_id,
                    row.num_new_tokens,
                    row.context,
                    1 + len(row.forks) if row.logits & LogitsAt.LAST else 0,
                )
                for row in plan.rows
            )
            if plan.rows
            else (),
            decode_version=decodes.version,
            decode_tick=decodes.tick,
            decode_ids=decodes.request_ids if is_new else None,
            decode_offsets=decodes.offsets if is_new else None,
            decode_context=decodes.context_tokens,
            predicted_s=0.0 if terms is None else terms.total,
            terms=() if terms is None else terms.values(),
            cost_source="" if terms is None else self.cost_source,
            work=work,
            num_waiting=load.num_waiting,
            kv_blocks_used=load.kv_blocks_used,
            swapped=plan.swapped,
            adapters=plan.adapters,
            adapter_loads=len(plan.adapters_in),
        )

    def _predicted(self, plan: StepPlan) -> tuple[StepTerms | None, StepWork]:
        cost = self.cost
        if cost is None:
            return None, StepWork()
        model, num_decodes = cost.model, len(plan.decodes)
        alone = num_decodes and not plan.rows and not plan.swapped and not plan.adapters
        if alone and plan.padded_tokens <= num_decodes and not any(spec.window for spec in model.kv):
            return self._predicted_like(cost, num_decodes, float(plan.decodes.context_tokens))
        counts = counts_of_plan(model, plan, self.adapters)
        return cost.terms(counts), _work(cost, counts)

    def _predicted_like(self, cost: StepCost, num_decodes: int, context: float) -> tuple[StepTerms, StepWork]:
        """Of a step of decodes alone, where no layer is windowed: all but their attention is as it was."""
        model, like = cost.model, self._like
        counts = StepCounts(num_decodes, num_decodes, num_decodes, (context,) * len(model.kv))
        if like is None or like.cost is not cost or like.num_decodes != num_decodes:
            like = self._like = _Like(cost, num_decodes, cost.terms(counts), _work(cost, counts))
            return like.terms, like.work
        work = StepWork(
            like.work.weight_bytes,
            _decode_bytes(cost, counts),
            linear_flops=like.work.linear_flops,
            decode_flops=cost.decode_attention_flops(counts),
        )
        return cost.with_contexts(like.terms, counts), work


def _decode_bytes(cost: StepCost, counts: StepCounts) -> float:
    """KV bytes that a step's decodes read."""
    pairs = zip(cost.model.kv, counts.decode_context, strict=True)
    return sum(spec.bytes_per_token * context for spec, context in pairs)


def _work(cost: StepCost, counts: StepCounts) -> StepWork:
    """Bytes and FLOPs of a step."""
    return StepWork(
        weight_bytes=weight_bytes_per_step(cost.model, counts.new_tokens, counts.sampled > 0),
        kv_bytes=_decode_bytes(cost, counts),
        prefix_bytes=cost.prefix_bytes(counts),
        linear_flops=linear_flops(cost.model, counts.new_tokens, counts.sampled),
        attention_flops=cost.prefill_attention_flops(counts),
        lora_bytes=counts.lora_bytes,
        lora_flops=counts.lora_flops,
        decode_flops=cost.decode_attention_flops(counts),
    )


def prefix_hashes(request: EngineRequest, block_size: int) -> tuple[int, ...]:
    """A hash for each full block of a prompt and all before it: equal prefixes have equal hashes."""
    if not request.share_prefix:
        return ()
    tokens = array("q", request.prompt_token_ids).tobytes()
    value = zlib.crc32(repr((request.adapter, request.cache_salt)).encode())
    size = 8 * block_size
    hashes = []
    for start in range(0, len(tokens) - size + 1, size):
        value = zlib.crc32(tokens[start : start + size], value)
        hashes.append(value)
    return tuple(hashes)

"""Exact timelines: every nanosecond of every request in exactly one part.

Commits cut time into intervals: from one commit to the next there is a *gap* (the host plans, commits and talks) and a
*step*. A request that runs books the gap as ``host`` and its share of the step as `shares` says; one that waits books
both as ``queue`` with the reason of that step's decisions; one that is preempted as ``preempted``; one that runs but
was left out of the step books the step as ``skipped`` with the reason. What a step spends on moving blocks to and from
the host is ``swap`` to those whose blocks they are and to those who run in it. A steady step touches no request: what a
request spent is worked out over arrays of steps when it ends.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from foliolm.core.plan import Decision, DecisionKind, Fork, LogitsAt, StepPlan
from foliolm.core.request import EngineRequest
from foliolm.core.timeline import RequestTimeline, ordered
from foliolm.ledger.columns import StepColumns
from foliolm.ledger.life import Life, Phase
from foliolm.ledger.plan_cost import counts_of_plan
from foliolm.ledger.shares import Ints, Shares
from foliolm.ledger.step_cost import StepTerms

ALL_DECODES = -1
MOST_STEPS = 4096
"""Steps kept for open requests; then all of them are brought up to date and the steps forgotten."""


class Timelines:
    """The books of all open requests.

    Args:
        shares: splits a step's time.
    """

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self.columns = StepColumns()
        self._lives: dict[int, Life] = {}
        self._reasons: list[str] = []
        self._codes: dict[str, int] = {}
        self._tick = 0
        self._last_wait = "scheduling"

    def open(self, request: EngineRequest, now: int) -> None:
        """The engine took a request into its waiting queue at ``now``."""
        life = self._lives[request.request_id] = Life(request, now, self.columns.count)
        last_end = self.columns.last_end
        if life.queued_ns < last_end:  # it came while a step ran; that step is booked already
            life.add("queue:step_in_flight", last_end - life.queued_ns)
            life.counted_ns = last_end

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._lives)

    def num_sampled(self, request_id: int) -> int:
        """Tokens that committed steps sampled for an open request."""
        life = self._lives[request_id]
        return life.num_sampled + self._decodes_since(life)

    def use(self, shares: Shares) -> None:
        """Split by another cost model from the next step on; what was before is booked by the old one."""
        self._settle_all()
        self.shares = shares

    def book(self, plan: StepPlan, time_ns: int, now: int, terms: StepTerms | None = None) -> None:
        """A step was committed.

        Args:
            plan: of the step.
            time_ns: what it took, from completion to completion where steps overlap.
            now: the clock at its commit, ns.
            terms: what was predicted of it, where that is known already.
        """
        if self.columns.count >= MOST_STEPS:
            self._settle_all()
        before = self.columns.last_end
        start = min(now, max(now - time_ns, before))
        if not (plan.rows or plan.decisions or plan.preempted or plan.swapped or plan.admissions or plan.forks):
            self._append(plan, before, start, now, {}, {}, terms)
            if len(plan.decodes):
                self._tick = plan.decodes.tick + 1
            return
        waits, skips = _reasons_of(plan.decisions)
        index = self._append(plan, before, start, now, waits, skips, terms)
        lives = self._lives
        for rid in plan.preempted:
            if rid in lives:
                self._preempt(lives[rid], index, plan)
        for swap in plan.swapped:
            if swap.blocks_out and swap.request_id in lives:
                total = sum(one.num_bytes for one in plan.swapped)
                lives[swap.request_id].moved = (index, swap.num_bytes / total)
        forks = {fork.request_id: fork for fork in plan.forks}
        for note in plan.admissions:
            if note.request_id in lives and note.request_id not in forks:
                self._admit(lives[note.request_id], index, before, start, plan.time_ns)
        next_tick = plan.decodes.tick + 1 if len(plan.decodes) else self._tick
        for row in plan.rows:
            life = lives.get(row.request_id)
            if life is not None:
                sampled = bool(row.logits & LogitsAt.LAST)
                life.rows.append((index, row.num_new_tokens, row.context, int(sampled)))
                life.computed = row.context + row.num_new_tokens
                if sampled:
                    self._settle(life, index + 1)
                    life.decode_from(index + 1, life.computed - next_tick)
        for rid, fork in forks.items():
            if rid in lives and lives[rid].phase is Phase.WAITING:
                self._part(lives[rid], fork, index, plan)
        self._tick = next_tick
        for rid, reason in (*waits.items(), *skips.items()):
            if rid in lives:
                lives[rid].named[index] = self._code(reason)

    def close(self, request_id: int, now: int, flying: tuple[StepPlan, int] | None = None) -> RequestTimeline | None:
        """A request ended at ``now``; None for one that is not open.

        Args:
            request_id: whose timeline.
            now: the clock: of the commit that ended it, or of its abort.
            flying: the oldest step in flight and when it was submitted, if there is one.
        """
        life = self._lives.pop(request_id, None)
        if life is None:
            return None
        self._settle(life, self.columns.count)
        self._tail(life, now, flying)
        end = max(now, life.queued_ns)
        parts = dict(life.parts)
        parts["http"] = parts.get("http", 0) + life.queued_ns - life.start_ns
        if not self._lives:
            self.columns.clear()
        by = sorted(life.prefill_of.items(), key=lambda pair: -pair[1])
        return RequestTimeline(life.start_ns, end, ordered(parts), tuple(pair for pair in by if pair[1]))

    # --- a step

    def _append(
        self,
        plan: StepPlan,
        before: int,
        start: int,
        now: int,
        waits: dict[int, str],
        skips: dict[int, str],
        terms: StepTerms | None = None,
    ) -> int:
        shares, rows, decodes = self.shares, plan.rows, plan.decodes
        count = len(decodes)
        if waits:
            self._last_wait = next(iter(waits.values()))
        elif ALL_DECODES in skips:
            self._last_wait = skips[ALL_DECODES]
        chunks = tokens = samples = 0
        prompt_s = mixed_s = 0.0
        if rows or terms is None:
            chunks = sum(1 for row in rows if row.num_new_tokens > 1)
            tokens = sum(row.num_new_tokens for row in rows)
            samples = sum(1 + len(row.forks) for row in rows if row.logits)
            decode_s, mixed_s = self._decode_attention(plan)
            if rows:
                new, context = [row.num_new_tokens for row in rows], [row.context for row in rows]
                prompt_s = float(shares.chunk_attention(new, context, chunks > 0).sum())
            base = shares.base([count + tokens, count], [count + samples, count], [count + len(rows), count])
            whole = float(base[0]) + (mixed_s if chunks else decode_s) + prompt_s
            no_prompts = float(base[1]) + decode_s
        else:  # a steady step: its terms are known, and there are no prompts
            whole = no_prompts = terms.total
            decode_s = terms.decode_attention
        swap_s = 0.0
        if plan.swapped and shares.cost is not None:
            swap_s = shares.cost.terms(counts_of_plan(shares.cost.model, plan)).swap
            if not rows and terms is not None:
                whole = no_prompts = terms.total - terms.swap
        return self.columns.append(
            tuple((row.request_id, row.num_new_tokens) for row in rows) if rows else (),
            start=start,
            end=now,
            gap=start - before if before else 0,
            time=now - start,
            tick=decodes.tick,
            decodes=count,
            prompt_tokens=tokens,
            prompt_samples=samples,
            prompt_rows=len(rows),
            chunks=chunks,
            wait=self._code(next(iter(waits.values()), self._last_wait)),
            skip=self._code(skips.get(ALL_DECODES, "not_planned")),
            whole=whole,
            no_prompts=no_prompts,
            decode_s=decode_s,
            decode_mixed_s=mixed_s,
            prompt_s=prompt_s,
            swap_s=swap_s,
        )

    def _decode_attention(self, plan: StepPlan) -> tuple[float, float]:
        """Attention of all steady decodes, in a step without and with chunks."""
        decodes, shares = plan.decodes, self.shares
        if not len(decodes):
            return 0.0, 0.0
        contexts: Iterable[int] = (decodes.context_tokens,)
        if shares.windowed:
            contexts = np.asarray(decodes.offsets) + decodes.tick
        mixed = shares.decode_attention(contexts, True).sum() if plan.rows else 0.0
        return float(shares.decode_attention(contexts, False).sum()), float(mixed)

    def _preempt(self, life: Life, index: int, plan: StepPlan) -> None:
        self._settle(life, index)
        if life.phase is Phase.DECODE:
            life.computed = life.offset + (plan.decodes.tick if len(plan.decodes) else self._tick)
        life.lost = max(life.lost, life.computed)
        life.computed = 0
        life.enter(Phase.PREEMPTED, index)

    def _admit(self, life: Life, index: int, before: int, start: int, planned: int) -> None:
        """The gap before its first step: it waits until the plan is made, then the host prepares the step."""
        self._settle(life, index)
        begin = max(before, life.counted_ns)
        planned = min(max(planned, begin), max(start, begin))
        life.add("preempted" if life.phase is Phase.PREEMPTED else "queue:scheduling", planned - begin)
        life.add("host", max(start, begin) - planned)
        life.enter(Phase.PREFILL, index)
        life.gaps_from = index + 1

    def _part(self, life: Life, fork: Fork, index: int, plan: StepPlan) -> None:
        """A sibling that waited for its leader decodes from here on.

        One whose first token this step samples has waited for the whole of it; one whose first token was chosen at the
        commit before (a hypothesis of a search) decodes in it.
        """
        in_step = fork.token_id is None
        until = index + in_step
        life.named.update(dict.fromkeys(range(life.since, until), self._code("sibling")))
        self._settle(life, until)
        life.computed = fork.num_tokens
        life.num_sampled += 1
        tick = plan.decodes.tick if len(plan.decodes) else self._tick
        life.decode_from(until, life.computed - tick - (in_step and len(plan.decodes) > 0))

    def _code(self, reason: str) -> int:
        code = self._codes.get(reason)
        if code is None:
            code = self._codes[reason] = len(self._reasons)
            self._reasons.append(reason)
        return code

    # --- a request

    def _settle_all(self) -> None:
        for life in self._lives.values():
            self._settle(life, self.columns.count)
            life.since = life.gaps_from = 0
        self.columns.clear()

    def _decodes_since(self, life: Life) -> int:
        if life.phase is not Phase.DECODE:
            return 0
        return int(np.count_nonzero(self.columns["decodes"][life.since :]))

    def _settle(self, life: Life, until: int) -> None:
        """Book the steps from ``life.since`` to before ``until``."""
        first = life.since
        if until > first:
            if life.phase in (Phase.WAITING, Phase.PREEMPTED):
                self._settle_waiting(life, first, until)
            else:
                gaps = self.columns["gap"][max(first, life.gaps_from) : until]
                life.add("host", int(gaps.sum()))
                if life.phase is Phase.DECODE:
                    self._settle_decode(life, first, until)
                else:
                    self._settle_prefill(life, first, until)
        life.since = max(life.since, until)
        life.named.clear()
        if life.moved[0] < until:
            life.moved = (-1, 0.0)

    def _settle_waiting(self, life: Life, first: int, until: int) -> None:
        columns = self.columns
        ends = columns["end"][first:until]
        before = columns["end"][first - 1] if first else columns.first_end
        begins = np.concatenate(([max(int(before), life.counted_ns)], ends[:-1]))
        times = np.maximum(0, ends - begins)
        if life.phase is Phase.PREEMPTED:
            moving = self._moving_out(life, first, until)
            life.add("swap", moving)
            life.add("preempted", int(times.sum()) - moving)
            return
        codes = columns["wait"][first:until].copy()
        for index, code in life.named.items():
            codes[index - first] = code
        if columns["start"][first] < life.counted_ns:
            codes[0] = self._code("step_in_flight")  # it came while that step ran
        self._add_by_reason(life, "queue", codes, times)

    def _moving_out(self, life: Life, first: int, until: int) -> int:
        """Nanoseconds of its own KV's way to the host, out of the step that moved it."""
        index, share = life.moved
        if not first <= index < until:
            return 0
        return int(self.columns.swap_times(np.array([index]))[0] * share)

    def _settle_decode(self, life: Life, first: int, until: int) -> None:
        columns, shares = self.columns, self.shares
        ran = columns["decodes"][first:until] > 0
        times = columns["time"][first:until]
        if not ran.all():
            codes = columns["skip"][first:until]
            self._add_by_reason(life, "skipped", codes[~ran], times[~ran])
        at = np.flatnonzero(ran) + first
        if not at.size:
            return
        life.num_sampled += at.size
        contexts = columns["tick"][at] + life.offset
        mixed = columns["chunks"][at] > 0
        mine = shares.decode_attention(contexts, False)
        whole = columns.seconds("whole")[at]
        others = columns["prompt_tokens"][at], columns["prompt_samples"][at], columns["prompt_rows"][at]
        if others[2].any():
            beside = np.where(mixed, shares.decode_attention(contexts, True), mine)
            # The prompts and this row, without the other decodes.
            lonely = shares.base(others[0] + 1, others[1] + 1, others[2] + 1) + columns.seconds("prompt_s")[at] + beside
            without_prefill = np.where(others[2] > 0, columns.seconds("no_prompts")[at], whole)
        else:
            lonely = shares.base(1, 1, 1) + mine
            without_prefill = whole
        without_decode = np.where(columns["decodes"][at] > 1, lonely, whole)
        swapping = columns.swap_times(at)
        life.add("swap", int(swapping.sum()))
        times = columns["time"][at] - swapping
        parts = shares.split(times, whole, shares.base(1, 1, 1) + mine, without_prefill, without_decode)
        life.add("own_decode", int(parts.own.sum()))
        life.add("others_decode", int(parts.others_decode.sum()))
        self._add_others_prefill(life, at, parts.others_prefill)

    def _settle_prefill(self, life: Life, first: int, until: int) -> None:
        columns, shares = self.columns, self.shares
        left_out = np.ones(until - first, dtype=bool)
        rows = [row for row in life.rows if first <= row[0] < until]
        life.rows = [row for row in life.rows if row[0] >= until]
        if rows:
            at, new, context, sampled = (np.array(column) for column in zip(*rows, strict=True))
            left_out[at - first] = False
            life.num_sampled += int(sampled.sum())
            whole = columns.seconds("whole")[at]
            chunk = new > 1
            mine = shares.chunk_attention(new, context, True)
            alone = shares.base(new, sampled, 1) + np.where(chunk, mine, shares.chunk_attention(new, context, False))
            decodes = columns["decodes"][at]
            beside = np.where(chunk, columns.seconds("decode_mixed_s")[at], columns.seconds("decode_s")[at])
            no_others = shares.base(decodes + new, decodes + sampled, decodes + 1) + beside + mine
            no_decodes = (
                shares.base(columns["prompt_tokens"][at], columns["prompt_samples"][at], columns["prompt_rows"][at])
                + columns.seconds("prompt_s")[at]
            )
            swapping = columns.swap_times(at)
            life.add("swap", int(swapping.sum()))
            parts = shares.split(
                columns["time"][at] - swapping,
                whole,
                alone,
                np.where(columns["prompt_rows"][at] > 1, no_others, whole),
                np.where(decodes > 0, no_decodes, whole),
            )
            again = np.clip(life.lost - context, 0, new)
            recomputed = np.rint(parts.own * (again / new)).astype(np.int64)
            life.add("recompute", int(recomputed.sum()))
            life.add("own_prefill", int((parts.own - recomputed).sum()))
            life.add("others_decode", int(parts.others_decode.sum()))
            self._add_others_prefill(life, at, parts.others_prefill)
        if left_out.any():
            codes = np.full(until - first, self._code("not_planned"))
            for index, code in life.named.items():
                codes[index - first] = code
            times = columns["time"][first:until]
            self._add_by_reason(life, "skipped", codes[left_out], times[left_out])

    def _add_others_prefill(self, life: Life, at: Ints, times: Ints) -> None:
        total = int(times.sum())
        if not total:
            return
        life.add("others_prefill", total)
        for index, time in zip(at[times > 0].tolist(), times[times > 0].tolist(), strict=True):
            others = [(rid, new) for rid, new in self.columns.rows[index] if rid != life.request_id]
            tokens = sum(new for _, new in others)
            for rid, new in others:
                life.prefill_of[rid] = life.prefill_of.get(rid, 0) + round(time * new / tokens)

    def _add_by_reason(self, life: Life, kind: str, codes: Ints, times: Ints) -> None:
        for code in set(codes.tolist()):
            life.add(f"{kind}:{self._reasons[code]}", int(times[codes == code].sum()))

    def _tail(self, life: Life, now: int, flying: tuple[StepPlan, int] | None) -> None:
        """From the newest commit to ``now``, for a request that ended between two commits."""
        begin = max(self.columns.last_end, life.counted_ns)
        if now <= begin:
            return
        if life.phase is Phase.WAITING:
            life.add(f"queue:{self._last_wait if self.columns.count else 'scheduling'}", now - begin)
        elif life.phase is Phase.PREEMPTED:
            life.add("preempted", now - begin)
        elif flying is None or not _takes_part(flying[0], life.request_id):
            life.add("host", now - begin)
        else:
            plan, submitted = flying
            start = min(now, max(begin, submitted))
            life.add("host", start - begin)
            self._tail_of_step(life, plan, start, now)

    def _tail_of_step(self, life: Life, plan: StepPlan, start: int, now: int) -> None:
        """A step that was still running: its time so far, split as the whole will be."""
        index = self._append(plan, start, start, now, *_reasons_of(plan.decisions))
        for row in plan.rows:
            if row.request_id == life.request_id:
                life.rows.append((index, row.num_new_tokens, row.context, 0))
        sampled = life.num_sampled
        life.since, life.gaps_from = index, index + 1
        self._settle(life, index + 1)
        life.num_sampled = sampled
        self.columns.drop_last()


def _takes_part(plan: StepPlan, request_id: int) -> bool:
    return request_id in plan.decodes.request_ids or any(row.request_id == request_id for row in plan.rows)


def _reasons_of(decisions: tuple[Decision, ...]) -> tuple[dict[int, str], dict[int, str]]:
    """Reasons of those who wait, and of those who run and were left out, by request id."""
    waits = {one.request_id: one.reason for one in decisions if one.kind is DecisionKind.WAIT}
    skips = {one.request_id: one.reason for one in decisions if one.kind is DecisionKind.SKIP}
    return waits, skips

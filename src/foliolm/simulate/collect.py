"""What a virtual run comes to: collected as it goes, in memory that grows by a few numbers a request."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foliolm.core.plan import DecisionKind
from foliolm.core.record import RequestRecord, StepRecord
from foliolm.simulate.run import Leap
from foliolm.simulate.spread import Gaps, summary

_S = 1e-9
BOUNDS = {"kv_blocks": "kv", "token_budget": "tokens", "sequences": "sequences", "preempted_this_step": "kv"}
"""What a reason of waiting says about the engine; other reasons are named as they are."""
IDLE_SHARE = 0.05
"""Where requests wait for less of the time than this, the arrivals are what bounds the run."""
CURVE_POINTS = 2000


@dataclass(slots=True)
class Curve:
    """(time, running, waiting, share of the KV pool in use) at most ``CURVE_POINTS`` of them, evenly thinned."""

    points: list[tuple[int, int, int, float]]
    every: int = 1
    seen: int = 0

    def add(self, point: tuple[int, int, int, float]) -> None:
        """Keep the point if its turn has come."""
        if self.seen % self.every == 0:
            self.points.append(point)
            if len(self.points) > CURVE_POINTS:
                del self.points[1::2]
                self.every *= 2
        self.seen += 1

    def add_leap(
        self, first: int, gaps: Sequence[int], running: int, waiting: int, kv_blocks: Sequence[int], pool: int
    ) -> None:
        """As ``add`` for each step of a leap: the first ends at ``first``, each other so much after the one before."""
        count, at = len(kv_blocks), -self.seen % self.every
        while at < count:
            self.points.append((first + sum(gaps[:at]), running, waiting, kv_blocks[at] / pool))
            if len(self.points) > CURVE_POINTS:
                del self.points[1::2]
                self.every *= 2
            at += self.every - (self.seen + at) % self.every
        self.seen += count


class Collector:
    """A `Watch` that keeps what the report needs.

    Args:
        kv_blocks: usable blocks a group.
        delivery_ns: from a token's commit until its client has it.
    """

    def __init__(self, kv_blocks: int, delivery_ns: int = 0) -> None:
        self.kv_blocks, self.delivery_ns = kv_blocks, delivery_ns
        self.steps = 0
        self.num_ended = self.num_refused = self.num_aborted = 0
        self.prompt_tokens = self.output_tokens = 0
        self.ttft, self.tpot, self.e2e, self.queue = array("q"), array("d"), array("q"), array("q")
        self.gaps = Gaps()
        self.busy_ns = self.kv_ns = self.kv_max = 0
        self.wait_ns: dict[str, int] = {}
        self.first_ns: int | None = None
        self.last_ns = 0
        self.first_refusal = ""
        self.curve = Curve([])
        self._step_end = 0
        self._last_decode = 0
        self._fresh: dict[int, int] = {}
        self._torn: dict[int, int] = {}

    # --- a Watch

    def stepped(self, record: StepRecord) -> None:
        """A step was committed."""
        self.steps += 1
        end = record.end_ns
        spent = end - max(self._step_end, record.time_ns)
        waiting = record.num_waiting
        self._book(spent, record.kv_blocks_used)
        if record.decisions:
            self._read_decisions(record, spent)
        self._step_end = end
        decodes = record.num_decodes
        if decodes:
            fresh = self._fresh
            others = decodes - len(fresh)
            if others > 0:
                self.gaps.add(end - self._last_decode, others)
            if fresh:
                for first in fresh.values():
                    self.gaps.add(end - first, 1)
                fresh.clear()
            self._last_decode = end
        for rid, _, _, sampled in record.rows:
            if sampled:
                self._fresh[rid] = end
                torn = self._torn.pop(rid, None)
                if torn is not None:
                    self.gaps.add(end - torn, 1)
        if waiting or decodes or record.rows:
            self.curve.add((end, record.num_rows, waiting, record.kv_blocks_used / self.kv_blocks))

    def leapt(self, leap: Leap) -> None:
        """Decode steps of the same rows were committed: the first ends a gap that began before them."""
        times, host = leap.times_ns, leap.host_ns
        self.steps += len(times)
        count, end = leap.num_decodes, leap.end_ns
        first = leap.start_ns + host + times[0]
        others = count - len(self._fresh)
        if others > 0:
            self.gaps.add(first - self._last_decode, others)
        for start in self._fresh.values():
            self.gaps.add(first - start, 1)
        self._fresh.clear()
        gaps = [host + time for time in times[1:]] if host else times[1:]
        # Contexts only grow, so that each step takes at least as long as the one before it.
        self.gaps.add_rising(gaps, count, end - first)
        used, spent = leap.kv_blocks_used, end - leap.start_ns
        self.curve.add_leap(first, gaps, count, leap.num_waiting, used, self.kv_blocks)
        self.busy_ns += spent
        # Blocks are only taken here.
        most = used[-1]
        self.kv_ns += spent * most if used[0] == most else sum(map(operator.mul, times, used)) + host * sum(used)
        if most > self.kv_max:
            self.kv_max = most
        if leap.num_waiting:
            self.wait_ns[leap.reason] = self.wait_ns.get(leap.reason, 0) + spent
        self._step_end = self._last_decode = end

    def ended(self, record: RequestRecord) -> None:
        """A request ended."""
        rid = record.request_id
        self._fresh.pop(rid, None)
        self._torn.pop(rid, None)
        self.num_ended += 1
        stamps = record.stamps
        start = stamps.arrival_ns
        if self.first_ns is None or start < self.first_ns:
            self.first_ns = start
        self.last_ns = max(self.last_ns, stamps.last_token_ns + self.delivery_ns)
        self.prompt_tokens += record.num_prompt_tokens
        self.output_tokens += record.num_output_tokens
        if not stamps.first_token_ns:
            self.num_aborted += 1
            return
        self.ttft.append(stamps.first_token_ns + self.delivery_ns - start)
        self.e2e.append(stamps.last_token_ns + self.delivery_ns - start)
        self.queue.append(stamps.admitted_ns - start)
        if record.num_output_tokens > 1:
            self.tpot.append((stamps.last_token_ns - stamps.first_token_ns) / (record.num_output_tokens - 1))

    def refused(self, request_id: int, why: str, now: int) -> None:
        """The scheduler did not take a request."""
        self.num_refused += 1
        self.first_refusal = self.first_refusal or why

    # --- what came of it

    @property
    def simulated_s(self) -> float:
        """From the first arrival to the last token."""
        return 0.0 if self.first_ns is None else (self.last_ns - self.first_ns) * _S

    @property
    def bound(self) -> str:
        """What kept the run from being faster; ``arrivals``: nobody waited to speak of."""
        whole = self.simulated_s / _S
        if not self.wait_ns or sum(self.wait_ns.values()) < IDLE_SHARE * whole:
            return "arrivals"
        reason = max(sorted(self.wait_ns), key=lambda name: self.wait_ns[name])
        return BOUNDS.get(reason, reason)

    def report(self) -> dict[str, Any]:
        """The run's numbers; seconds are floats, counts are whole."""
        span = self.simulated_s
        return {
            "requests": self.num_ended,
            "simulated_s": span,
            "steps": self.steps,
            "ttft_s": summary(np.asarray(self.ttft, dtype=np.float64) * _S),
            "tpot_s": summary(np.asarray(self.tpot, dtype=np.float64) * _S),
            "itl_s": self.gaps.summary(),
            "e2e_s": summary(np.asarray(self.e2e, dtype=np.float64) * _S),
            "queue_s": summary(np.asarray(self.queue, dtype=np.float64) * _S),
            "output_tokens_per_s": self.output_tokens / span if span else 0.0,
            "requests_per_s": self.num_ended / span if span else 0.0,
            "kv_usage": {
                "mean": self.kv_ns / self.busy_ns / self.kv_blocks if self.busy_ns else 0.0,
                "max": self.kv_max / self.kv_blocks,
            },
            "refused": self.num_refused,
            "bound": self.bound,
            "waiting_share": {name: value * _S / span for name, value in sorted(self.wait_ns.items()) if span},
            "busy_share": self.busy_ns * _S / span if span else 0.0,
        }

    def _book(self, spent: int, blocks: int) -> None:
        self.busy_ns += spent
        self.kv_ns += spent * blocks
        self.kv_max = max(self.kv_max, blocks)

    def _read_decisions(self, record: StepRecord, spent: int) -> None:
        named = False
        for decision in record.decisions:
            if decision.kind is DecisionKind.WAIT and not named and record.num_waiting:
                named = True
                self.wait_ns[decision.reason] = self.wait_ns.get(decision.reason, 0) + spent
            elif decision.kind is DecisionKind.PREEMPT:
                rid = decision.request_id
                self._torn[rid] = self._fresh.pop(rid, self._last_decode)

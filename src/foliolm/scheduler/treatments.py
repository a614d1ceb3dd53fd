"""Who gives way when KV blocks run out, and how: swapped to the host or given up, by predicted cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foliolm.core.protocols import Prices
from foliolm.scheduler.families import is_search
from foliolm.scheduler.preemption import eligible_victims
from foliolm.scheduler.request import Request, State
from foliolm.scheduler.state import SchedulerState

MOST_PRICED = 16
"""Candidates, from the last in order on, whose treatments are compared: a bound on a step's work."""


@dataclass(frozen=True, slots=True)
class Treatment:
    """What is done to whom.

    Attributes:
        victim: the request.
        swap: True: its KV moves to the host; False: it is given up.
        reason: ``swap``, ``recompute``, or ``host_full``: swap was wanted and has no room.
        num_computed: tokens whose KV it has.
        predicted_s: seconds by treatment, where they are known.
    """

    victim: Request
    swap: bool
    reason: str
    num_computed: int
    predicted_s: tuple[tuple[str, float], ...] = ()


class Treatments:
    """Chooses victims and prices what may be done to them.

    Args:
        state: the scheduler's.
        prices: predicts; None: nothing can be compared, and ``auto`` gives KV up.
    """

    def __init__(self, state: SchedulerState, prices: Prices | None) -> None:
        self._state = state
        self._config = state.config
        self._prices = prices

    def choose(self, tenant: str | None = None) -> Treatment | None:
        """The next request that gives way (of one tenant), and how; None where nobody may be asked to."""
        state = self._state
        running: Iterable[Request] = state.running()
        if state.searches:  # what a search may need was kept for it: it never gives way
            running = [request for request in running if not is_search(request)]
        candidates = eligible_victims(running, self._config, state.decodes.tick)
        if tenant is not None:
            candidates = [request for request in candidates if request.source.tenant == tenant]
        elif not candidates and state.searches and not state.flights:
            candidates = list(running)  # the search gets on anyway, so that even the first in order may wait for it
        if not candidates:
            return None
        policy = self._config.preemption_victim
        if policy == "least-computed":
            return self._treat(min(reversed(candidates), key=lambda request: self._computed(request)))
        if policy == "last" or self._prices is None or not self._prices.known:
            return self._treat(candidates[-1])
        return self._cheapest(candidates)

    def waiting_or_computing(self, known: int, awaited: int, uncached: int) -> tuple[tuple[str, float], ...]:
        """Seconds to compute a prompt's uncached tokens now, and to let another compute the first of them.

        Who waits needs a step more: the price of that is a chunk of one token.
        """
        if self._prices is None or not self._prices.known:
            return ()
        streams, context = len(self._state.decodes), self._state.decodes.context_tokens
        price = self._prices.recompute
        step = price(known + 1, known, streams, context)
        rest = price(known + uncached, known + awaited, streams, context)
        return (("wait", step + rest), ("compute", price(known + uncached, known, streams, context)))

    def _cheapest(self, candidates: Sequence[Request]) -> Treatment:
        """The least seconds for each block that becomes free, among the last in order of the least important."""
        worst = candidates[-1].order[0]
        last = [request for request in candidates[-MOST_PRICED:] if request.order[0] == worst]
        best, best_price = None, float("inf")
        for request in reversed(last):
            freed = self._state.kv.holds(request.request_id) - self._state.kv.num_shared(request.request_id)
            if not freed:
                continue
            treatment = self._treat(request)
            costs = dict(treatment.predicted_s)
            price = costs.get("swap" if treatment.swap else "recompute", 0.0) / freed
            if price < best_price:
                best, best_price = treatment, price
        return best or self._treat(candidates[-1])

    def _treat(self, victim: Request) -> Treatment:
        """Price both treatments of one request, and take the cheaper, or what the mode says."""
        swap, mode = self._state.swap, self._config.preemption_mode
        computed = self._computed(victim)
        blocks = swap.slots_for(victim.request_id, computed)
        has_room = 0 < blocks <= self._state.host_room(blocks)
        predicted: tuple[tuple[str, float], ...] = ()
        cheaper = False
        if self._prices is not None and self._prices.known:
            back = self._given_back(victim, computed)
            # What is still on the device when it returns need not be copied back.
            copied_back = self._state.kv.blocks_for(computed) - back // self._config.block_size
            swap_s = (self._prices.swap(blocks) + self._prices.swap(min(blocks, copied_back))) / 2
            recompute_s = self._recompute_s(victim, computed, back)
            cheaper = swap_s <= recompute_s
            predicted = (("recompute", recompute_s),)
            if swap.pool.num_slots and swap_s < float("inf"):
                predicted = (("swap", swap_s), *predicted)
        wanted = blocks > 0 and bool(swap.pool.num_slots) and (mode == "swap" or (mode == "auto" and cheaper))
        if wanted and has_room:
            return Treatment(victim, True, "swap", computed, predicted)
        return Treatment(victim, False, "host_full" if wanted else "recompute", computed, predicted)

    def _recompute_s(self, victim: Request, computed: int, back: int) -> float:
        """Seconds that the others' steps take longer because it is computed again, less what the cache gives back.

        The difference between computing all its tokens from what the cache gives back and from where it stands: what
        of its prompt is still to come, and the step for its next token, are to be paid either way, and a few tokens
        more in a chunk that reads its whole context anyway cost little.
        """
        assert self._prices is not None
        decodes = self._state.decodes
        count, context = len(decodes), decodes.context_tokens
        if victim.state is State.DECODING:
            count, context = count - 1, context - computed
        to_compute = max(victim.num_tokens, computed + 1)
        again = self._prices.recompute(to_compute, back, count, context)
        return max(0.0, again - self._prices.recompute(to_compute, computed, count, context))

    def _given_back(self, victim: Request, computed: int) -> int:
        """Tokens that the prefix cache is likely to give back when it returns.

        What others hold stays. Its own published blocks become idle, the newest of all idle ones: until some running
        request ends and makes room for it, the others grow into what is free, which its blocks without a whole block's
        tokens now are too (most of them, where its prompt is being computed), and then into these, tail first.
        """
        kv = self._state.kv
        size = self._config.block_size
        published = kv.num_published(victim.request_id)
        if not published:
            return 0
        shared = kv.num_shared(victim.request_id)
        others = [request for request in self._state.decodes.members.values() if request is not victim]
        first_end = min((request.end_tick for request in others), default=0)
        growth = sum(
            max(0, kv.blocks_for(request.offset + first_end + 1) - kv.holds(request.request_id)) for request in others
        )
        lost = max(0, growth - kv.num_free - (kv.holds(victim.request_id) - published))
        return min(computed, size * max(shared, published - lost))

    def _computed(self, request: Request) -> int:
        if request.state is State.DECODING:
            return request.offset + self._state.decodes.tick
        return request.num_computed

"""Whether a waiting request may start: an attempt answers admit, skip or stop, with its reason."""

from __future__ import annotations

import enum
from collections.abc import Callable

from foliolm.core.errors import RequestError
from foliolm.core.plan import Closed, Decision, DecisionKind
from foliolm.core.request import EngineRequest
from foliolm.core.resolve import SchedulerConfig
from foliolm.core.valueclass import valueclass
from foliolm.kv import NO_MATCH, KVManager, PrefixMatch, SwapSpace
from foliolm.scheduler.adapters import AdapterSlots
from foliolm.scheduler.budget import PrefillBudget
from foliolm.scheduler.promises import PrefixPromises
from foliolm.scheduler.request import Request

Costs = tuple[tuple[str, float], ...]
"""Predicted seconds by what might be done."""


class Outcome(enum.Enum):
    """ADMIT: it runs in this step. SKIP: those behind it may try. STOP: nobody behind it may overtake."""

    ADMIT = "admit"
    SKIP = "skip"
    STOP = "stop"


@valueclass
class Attempt:
    """An answer.

    Attributes:
        outcome: see ``Outcome``.
        decision: the reason.
        closed: for STOP and SKIP: what closed the step for it.
        from_host: for ADMIT: what the host has of its prompt is copied.
    """

    outcome: Outcome
    decision: Decision
    closed: Closed = Closed.EMPTY
    from_host: bool = False


def check_possible(request: EngineRequest, config: SchedulerConfig, kv: KVManager) -> None:
    """Refuse at arrival what can never run.

    Raises:
        RequestError: with the sum.
    """
    prompt = len(request.prompt_token_ids)
    if prompt < 1:
        raise RequestError("the prompt is empty; it must hold at least one token", "prompt")
    if prompt >= config.max_model_len:
        raise RequestError(
            f"the prompt has {prompt} tokens; with at least one token of output that is more than the model length of "
            f"{config.max_model_len} tokens",
            "prompt",
            "context_length_exceeded",
        )
    needed = kv.blocks_for(prompt + 1)
    if needed > kv.num_usable:
        raise RequestError(
            f"the prompt can never fit: its {prompt} tokens and one of output need "
            f"ceil({prompt + 1}/{kv.block_size}) = {needed} KV blocks, and the pool has {kv.num_usable} "
            f"({kv.num_usable * kv.block_size} tokens); shorten the prompt or enlarge the pool",
            "prompt",
            "context_length_exceeded",
        )


def token_limit(request: EngineRequest, config: SchedulerConfig, kv: KVManager) -> int:
    """Most tokens that a request may ever have, prompt included.

    The pool's own ``usable blocks × block size`` tokens bound it as the model's length does; so that a request which
    outgrows the pool, alone in it, ends with reason ``length``, and never waits for room that cannot come.
    """
    limit = min(config.max_model_len, kv.num_usable * kv.block_size)
    if request.sampling.max_tokens is not None:
        limit = min(limit, len(request.prompt_token_ids) + request.sampling.max_tokens)
    return limit


class Admission:
    """Tries requests against sequences, KV room and tokens; the whole prompt counts, not its first chunk.

    Args:
        config: the scheduler's settings.
        kv: the manager that would give the blocks.
        promises: prefixes that running requests are computing.
        swap: requests whose KV waits on the host.
        landed: whether a step has been committed.
        adapters: slots of LoRA adapters.
        worth: predicted seconds of waiting for a prefix and of computing it, by known, awaited and uncached tokens;
            empty where nothing is known.
        worth_copying: whether a request whose match goes on on the host takes that, and the predicted seconds.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        promises: PrefixPromises,
        swap: SwapSpace,
        landed: Callable[[int], bool],
        adapters: AdapterSlots,
        worth: Callable[[int, int, int], Costs],
        worth_copying: Callable[[Request], tuple[bool, Costs]],
    ) -> None:
        self._config = config
        self._kv = kv
        self._promises = promises
        self._swap = swap
        self._landed = landed
        self._adapters = adapters
        self._worth = worth
        self._worth_copying = worth_copying

    def match(self, request: Request) -> PrefixMatch:
        """The known prefix of a waiting request; looked up again whenever the index has changed."""
        if not self._shares(request):
            return NO_MATCH
        generation = self._kv.prefix_generation
        if request.match_generation == generation:
            request.match = self._kv.recounted(request.match)
        else:
            request.match = self._kv.match(request.root, request.keys, len(request.tokens), request.match)
            request.match_generation = generation
        return request.match

    def known_tokens(self, request: Request) -> int:
        """Leading tokens of a waiting request that it need not compute: cached, or worth copying from the host."""
        match = self.match(request)
        from_host = match.on_host and self._worth_copying(request)[0]
        return match.num_tokens + (len(match.on_host) * self._kv.block_size if from_host else 0)

    def uncached_share(self, request: Request) -> float:
        """Share of its tokens that a waiting request would have to compute, 0 to 1."""
        return 1.0 - self.match(request).num_tokens / request.num_tokens

    def _shares(self, request: Request) -> bool:
        """One that reports prompt logprobs needs the logits of its whole prompt, so it takes no prefix."""
        return self._config.enable_prefix_caching and request.root is not None and not request.wants_prompt_logprobs()

    def attempt(self, request: Request, budget: PrefillBudget, num_running: int, newest: int | None) -> Attempt:
        """Whether ``request`` may start now. Changes nothing.

        Args:
            request: who.
            budget: what is left of the step's tokens.
            num_running: requests that run, those admitted in this step included.
            newest: id of the request admitted last before it, to be named as the blocker.
        """
        rid = request.request_id
        if request.is_swapped and (request.pending or not self._landed(request.swap_step)):
            # Whether its KV reached the host is known once that step is committed; nobody takes its place till then.
            return Attempt(Outcome.STOP, Decision(DecisionKind.WAIT, rid, "in_flight", request.pending), Closed.KV)
        if request.pending:
            # Its newest token is still being sampled: what it would have to compute is not known yet.
            return Attempt(Outcome.SKIP, Decision(DecisionKind.SKIP, rid, "in_flight", request.pending), Closed.EMPTY)
        family = request.family
        seats = 1 if family is None or family.beam is None else family.beam.width
        if num_running + seats > self._config.max_num_seqs:
            wait = Decision(DecisionKind.WAIT, rid, "sequences", seats, self._config.max_num_seqs - num_running, newest)
            return Attempt(Outcome.STOP, wait, Closed.SEQUENCES)
        if request.source.adapter is not None:
            held_up = self._for_adapter(request, request.source.adapter, newest)
            if held_up is not None:
                return Attempt(Outcome.SKIP, held_up, Closed.SEQUENCES)
        # Headroom lets those who run grow before somebody must be preempted. With nobody running there is nobody to
        # protect, and insisting on it could make the request wait for ever.
        headroom = self._config.watermark_blocks if num_running else 0
        match = self.match(request)
        held = self._swap.get(rid) if self._swap.usable(rid, match) else None
        from_host, costs = self._worth_copying(request) if match.on_host and held is None else (False, ())
        known = match.num_tokens + (len(match.on_host) * self._kv.block_size if from_host else 0)
        uncached = request.num_tokens - (known if held is None else held.num_tokens)
        awaited = self._awaited(request, known, uncached) if held is None else None
        if awaited is not None:
            return Attempt(Outcome.SKIP, awaited, Closed.EMPTY)
        needed = self._kv.blocks_for(request.num_tokens) - len(match.nodes) + match.num_idle
        # With nobody running, room for copies too could be asked for in vain; then siblings do not fork.
        if family is not None and (num_running or family.beam is not None):
            needed += family.spare_blocks(self._kv)
        available = self._kv.num_free
        if needed + headroom > available:
            return Attempt(
                Outcome.STOP,
                Decision(DecisionKind.WAIT, rid, "kv_blocks", needed + headroom, available, newest),
                Closed.KV,
            )
        if not budget.offer(uncached):
            wait = Decision(DecisionKind.WAIT, rid, "token_budget", uncached, budget.left, newest)
            # Only a long prompt can be turned away with tokens left over: those are for short ones behind it.
            outcome = Outcome.SKIP if budget.left > 0 and budget.reserves_for_short else Outcome.STOP
            return Attempt(outcome, wait, Closed.TOKENS)
        reason = "prefix_from_host" if from_host else "fits" if held is None else "swapped_in"
        admit = Decision(DecisionKind.ADMIT, rid, reason, needed, available, predicted_s=costs)
        return Attempt(Outcome.ADMIT, admit, from_host=from_host)

    def _for_adapter(self, request: Request, load_id: int, newest: int | None) -> Decision | None:
        """The reason to wait for a slot, one's own adapter's or that of somebody who waited too long; or None."""
        adapters, rid = self._adapters, request.request_id
        starved = adapters.passes_by(request)
        if starved is not None:
            return Decision(DecisionKind.SKIP, rid, "adapter_drain", 1, 0, starved)
        if not adapters.has_room(load_id):
            return Decision(DecisionKind.SKIP, rid, "adapter_slots", 1, 0, newest)
        return None

    def _awaited(self, request: Request, known: int, uncached: int) -> Decision | None:
        """The reason to wait for tokens that somebody else is computing for it right now, or None.

        Whoever computes them is ahead, so that waiting takes no longer than computing the same tokens out of the same
        budget would, but for one more step; and it leaves that budget to others. Where prices are known they decide;
        where not, one waits for what is most of what it lacks.
        """
        if not self._shares(request):
            return None
        awaited, owner = self._promises.ahead(request, known)
        if owner is None:
            return None
        predicted = self._worth(known, awaited, uncached)
        costs = dict(predicted)
        if costs["wait"] >= costs["compute"] if costs else 2 * awaited < uncached:
            return None
        skip, rid = DecisionKind.SKIP, request.request_id
        return Decision(skip, rid, "prefix_in_flight", awaited, known, owner, predicted)

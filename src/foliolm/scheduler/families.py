"""Completions of one prompt: one computes it, the others wait for that and share its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from foliolm.core.errors import NO_ROOM_IN_POOL, RequestError
from foliolm.core.plan import Fork
from foliolm.core.request import EngineRequest
from foliolm.core.sampling import BeamSearch
from foliolm.kv import KVManager
from foliolm.scheduler.beams import BeamScorer
from foliolm.scheduler.request import Request, State

if TYPE_CHECKING:
    from foliolm.scheduler.state import SchedulerState


class Family:
    """Siblings. The leader is an ordinary request; the others are parked until it has computed the prompt.

    Attributes:
        leader: see above.
        parked: by id, those that have not begun.
        members: all, by place; of a beam search, hypothesis i is in the end the answer of member i.
        beam: of a beam search, else None.
        scorer: of a beam search that has begun.
        holders: of a beam search, who holds the KV of each hypothesis that lives, in the scorer's order.
        seats: places among the running that are kept for those that are parked.
    """

    __slots__ = ("beam", "holders", "leader", "members", "parked", "scorer", "seats")

    def __init__(self, leader: Request) -> None:
        self.leader = leader
        self.parked: dict[int, Request] = {}
        self.members = [leader]
        self.beam = leader.source.sampling.beam
        self.scorer: BeamScorer | None = None
        self.holders: list[Request] = []
        self.seats = 0

    def spare_blocks(self, kv: KVManager) -> int:
        """Blocks that must be free beside those of the leader's prompt, so that all can go on from it.

        Those who sample need one for each shared block that is not full, since all but one of them copy it. A search
        gets as many as it can ever need: its hypotheses live and die together.
        """
        tokens = self.leader.num_prompt
        if self.beam is not None:
            return search_blocks(self.beam, tokens, self.leader.limit, kv) - kv.blocks_for(tokens)
        return len(self.parked) if tokens % kv.block_size else 0


def search_blocks(beam: BeamSearch, num_prompt: int, limit: int, kv: KVManager) -> int:
    """Most blocks that a search can hold: the prompt's full blocks once, all behind them once a hypothesis."""
    full = num_prompt // kv.block_size
    return full + beam.width * (kv.blocks_for(limit) - full)


def check_search(request: EngineRequest, limit: int, kv: KVManager, max_num_seqs: int) -> None:
    """Refuse a search that can never run.

    Raises:
        RequestError: with the sum.
    """
    beam, prompt = request.sampling.beam, len(request.prompt_token_ids)
    if beam is None:
        return
    if beam.width > max_num_seqs:
        raise RequestError(
            f"the search keeps {beam.width} hypotheses (best_of, else n); at most {max_num_seqs} sequences run at once "
            "(--max-num-seqs)",
            "best_of",
        )
    needed = search_blocks(beam, prompt, limit, kv)
    if needed > kv.num_usable:
        full = prompt // kv.block_size
        raise RequestError(
            f"the search can never fit: {beam.width} hypotheses of up to {limit} tokens need {full} + {beam.width} · "
            f"{kv.blocks_for(limit) - full} = {needed} KV blocks, and the pool has {kv.num_usable}; lower max_tokens "
            "or the width",
            "max_tokens",
            NO_ROOM_IN_POOL,
        )


def join_family(request: Request, requests: dict[int, Request]) -> Family | None:
    """The family that a new sibling belongs to; None: it goes its own way.

    Raises:
        ValueError: a hypothesis of a search whose leader is not there.
    """
    source = request.source
    leader = requests.get(source.request_id - source.sibling)
    beam = source.sampling.beam
    fits = (
        leader is not None
        and leader.state is State.WAITING
        and not leader.num_preemptions
        and leader.source.sibling == 0
        and leader.source.prompt_token_ids == source.prompt_token_ids
        and (leader.source.adapter, leader.source.cache_salt) == (source.adapter, source.cache_salt)
        and leader.source.sampling.beam == beam
    )
    # One with a form of its own, or with logprobs of the prompt, has more to do at its first token than to draw it.
    sampling = source.sampling
    if beam is None and (sampling.grammar is not None or sampling.prompt_logprobs is not None):
        return None
    if not fits or leader is None:
        if beam is not None:
            raise ValueError(f"request {source.request_id} is a hypothesis of a search that is not there")
        return None
    family = leader.family
    if family is None:
        family = leader.family = Family(leader)
    return family


class Families:
    """What planning and committing do about families. Keeps no state but the scheduler's.

    Args:
        state: shared with planner and committer.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def park(self, request: Request, family: Family) -> None:
        """A new sibling waits for its leader."""
        request.family = family
        request.state = State.PARKED
        family.parked[request.request_id] = request
        family.members.append(request)
        self._state.parked[request.request_id] = request

    def unpark(self, family: Family) -> None:
        """Its siblings wait no longer for the leader: each goes its own way."""
        state = self._state
        for request in list(family.parked.values()):
            self._leave_park(request)
            request.state = State.WAITING
            request.family = None
            state.waiting.push(request)

    def _leave_park(self, request: Request) -> None:
        del self._state.parked[request.request_id]
        if request.family is not None:
            del request.family.parked[request.request_id]

    # --- planning

    def at_prompt_end(self, leader: Request, family: Family, step_id: int, now: int) -> list[Request]:
        """The leader's prompt is computed in this step: its siblings fork, all of them or none.

        Returns:
            Those that sample their first token from the leader's logits.
        """
        state, kv = self._state, self._state.kv
        if family.beam is not None:
            state.searches[leader.request_id] = family
            return []
        if not family.parked:
            return []
        siblings = list(family.parked.values())
        room = kv.num_free >= family.spare_blocks(kv)
        if not room or state.num_running + state.seats + 1 + len(siblings) > state.config.max_num_seqs:
            self.unpark(family)
            return []
        for request in siblings:
            self._leave_park(request)
            kv.fork(request.request_id, leader.request_id, leader.num_prompt)
            request.num_computed = leader.num_prompt
            request.num_tokens = request.resumed_at = leader.num_prompt + 1
            request.num_cached = leader.num_cached
            request.last_step = request.sample_step = step_id
            request.admitted_ns = now
            state.adapters.hold(request)
            state.counters.forked_tokens += leader.num_prompt
            if request.num_tokens >= request.limit:
                request.state = State.ENDING
            else:
                state.decodes.join(request)
                state.forked[request.request_id] = request
        state.forked[leader.request_id] = leader
        return siblings

    def shared_positions(self) -> list[tuple[Request, int]]:
        """Decodes that would write into a block that somebody else holds too, and where."""
        state, size = self._state, self._state.config.block_size
        found = []
        for request in list(state.forked.values()):
            if request.state is not State.DECODING:
                del state.forked[request.request_id]
                continue
            position = request.offset + state.decodes.tick
            if position % size and state.kv.is_shared(request.request_id, position):
                found.append((request, position))
        return found

    def blocks_wanted(self) -> int:
        """Blocks, of those free for everybody, that the next decode step takes: for crossings and for copies."""
        state = self._state
        crossing = state.decodes.crossing()
        if not state.forked and not state.searches:
            return len(crossing)
        wanted = sum(1 for request in crossing.values() if not is_search(request))
        writers: dict[int, int] = {}
        for request, position in self.shared_positions():
            if not is_search(request):
                block = state.kv.table(request.request_id)[0][position // state.config.block_size]
                writers[block] = writers.get(block, 0) + 1
        # Of those who alone hold a block the last one writes in it.
        return wanted + sum(count - (state.kv.holders(block) == count) for block, count in writers.items())

    # --- committing

    def begin_search(self, family: Family) -> None:
        """The leader's prompt is computed and its candidates are known: the hypotheses may part."""
        leader = family.leader
        self._state.kv.keep_private(leader.request_id)
        end_ids, room = leader.stop_ids, leader.limit - leader.num_prompt
        assert family.beam is not None
        family.scorer = BeamScorer(family.beam, end_ids, room, leader.source.sampling.logprobs)
        family.holders = [leader]

    def part(self, family: Family, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Give each hypothesis that lives now the KV of the one that it continues.

        A hypothesis with continuations hands its own table to the first of them; the tables of those without any, and
        at the beginning of those who were parked, are made anew for the others.

        Args:
            family: of the search.
            parents: by hypothesis that lives now, the place of the one before it.
            tokens: their newest.
        """
        state, kv = self._state, self._state.kv
        before = family.holders
        heirs: set[int] = set()
        spare = [one for place, one in enumerate(before) if place not in set(parents)]
        spare += family.parked.values()
        after: list[Request] = []
        for parent, token in zip(parents, tokens, strict=True):
            source = before[parent]
            num_tokens = source.offset + state.decodes.tick
            holder = source
            if parent in heirs:
                holder = spare.pop(0)
                if holder.state is State.PARKED:
                    self._begin(holder, source, num_tokens)
                else:
                    kv.refork(holder.request_id, source.request_id, num_tokens)
            heirs.add(parent)
            after.append(holder)
            state.forked[holder.request_id] = holder
            state.forks.append(Fork(holder.request_id, source.request_id, num_tokens, token))
        family.holders = after
        state.seats -= family.seats
        family.seats = 0

    def _begin(self, request: Request, source: Request, num_tokens: int) -> None:
        state = self._state
        self._leave_park(request)
        state.kv.fork(request.request_id, source.request_id, num_tokens, is_public=False)
        request.num_computed = num_tokens
        request.num_tokens = num_tokens + 1
        request.first_token_ns = source.first_token_ns
        state.adapters.hold(request)
        request.admitted_ns = source.admitted_ns
        request.num_cached = source.num_cached
        state.counters.forked_tokens += num_tokens
        state.decodes.join(request)
        state.begun.append(request)

    # --- ends

    def together(self, request_ids: Iterable[int]) -> list[int]:
        """The ids, and those of requests that can only end with one of them."""
        found: dict[int, None] = {}
        for request_id in request_ids:
            found[request_id] = None
            request = self._state.requests.get(request_id)
            if request is not None and request.family is not None and request.family.beam is not None:
                found.update(dict.fromkeys(member.request_id for member in request.family.members))
        return list(found)

    def withdraw(self, request: Request, family: Family) -> None:
        """A member leaves its place, for good or because it is preempted."""
        if request.state is State.PARKED:
            self._leave_park(request)
        if request is family.leader and family.seats:
            self._state.seats -= family.seats
            family.seats = 0

    def retire(self, request: Request, family: Family) -> None:
        """A member has ended."""
        self._state.searches.pop(request.request_id, None)
        if request is family.leader and family.beam is None and family.parked:
            self.unpark(family)


def is_search(request: Request) -> bool:
    """True for a hypothesis of a search: its blocks are reserved, and it cannot be preempted once it decodes."""
    return request.family is not None and request.family.beam is not None

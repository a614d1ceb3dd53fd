"""Committing the steps of beam searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foliolm.core.request import FinishReason, TokenLogprobs, TokenOutput
from foliolm.scheduler.families import Family
from foliolm.scheduler.request import Request
from foliolm.scheduler.state import SchedulerState

Finish = Callable[..., TokenOutput]


class Searches:
    """Takes what a step found for each hypothesis, and says who lives on.

    Args:
        state: shared with planner and committer.
        finish: ends a request, and says so.
    """

    def __init__(self, state: SchedulerState, finish: Finish) -> None:
        self._state = state
        self._finish = finish

    def advance(self, leader_id: int, rows: dict[int, TokenLogprobs], now: int) -> list[TokenOutput]:
        """A step of a search is committed.

        Args:
            leader_id: whose search.
            rows: by holder's id, the log-probabilities of what may follow its hypothesis.
            now: the clock, ns.
        """
        family = self._state.searches.get(leader_id)
        if family is None:
            return []
        if family.scorer is None:
            family.leader.first_token_ns = now
            self._state.families.begin_search(family)
        scorer = family.scorer
        assert scorer is not None
        parents = scorer.advance([rows[holder.request_id].top for holder in family.holders])
        if scorer.done:
            return self._end(family, now)
        newest = [hypothesis.logprobs[-1].token_id for hypothesis in scorer.live]
        self._state.families.part(family, parents, newest)
        return []

    def advance_virtual(self, leader_id: int, now: int) -> None:
        """Where tokens have no content: all hypotheses part at once, and go on to the greatest length."""
        family = self._state.searches.get(leader_id)
        if family is None or family.holders:
            return
        family.leader.first_token_ns = now
        family.holders = [family.leader]
        assert family.beam is not None
        if family.parked:
            self._state.families.part(family, [0] * family.beam.width, [0] * family.beam.width)

    def fail(self, leader_id: int, error: str, now: int) -> list[TokenOutput]:
        """A hypothesis could not be computed: the whole search ends."""
        family = self._state.searches.get(leader_id)
        return (
            []
            if family is None
            else self._all(family, lambda one: self._finish(one, FinishReason.ERROR, now, error=error))
        )

    def _end(self, family: Family, now: int) -> list[TokenOutput]:
        scorer = family.scorer
        assert scorer is not None
        results = scorer.results()

        def answer(member: Request) -> TokenOutput:
            hypothesis = results[member.source.sibling]
            stopped = scorer.is_stopped(hypothesis)
            member.last_token_ns = now
            reported = member.source.sampling.logprobs is not None
            return self._finish(
                member,
                FinishReason.STOP if stopped else FinishReason.LENGTH,
                now,
                hypothesis.token_ids,
                hypothesis.logprobs if reported else (),
                stop_reason=hypothesis.token_ids[-1] if stopped else None,
            )

        return self._all(family, answer)

    def _all(self, family: Family, end: Callable[[Request], TokenOutput]) -> list[TokenOutput]:
        """End every member that lives; the leader first, since with it falls what was kept for them all."""
        requests: Sequence[Request] = [one for one in family.members if one.request_id in self._state.requests]
        return [end(member) for member in requests]

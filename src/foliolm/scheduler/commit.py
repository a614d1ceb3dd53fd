"""Committing a step: tokens are appended, requests end, fences fall."""

from __future__ import annotations

from foliolm.core.plan import LogitsAt, Row, StepPlan
from foliolm.core.request import FinishReason, RequestStamps, TokenLogprobs, TokenOutput
from foliolm.core.result import StepResult
from foliolm.scheduler.families import is_search
from foliolm.scheduler.request import Request, State
from foliolm.scheduler.searching import Searches
from foliolm.scheduler.state import Flight, SchedulerState


class Committer:
    """Takes steps' results, strictly in the order in which the steps were planned.

    Args:
        state: shared with the planner.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._searches = Searches(state, self.finish)

    def commit(self, plan: StepPlan, result: StepResult, now: int) -> list[TokenOutput]:
        """Append the tokens of a step.

        Results of requests that have ended since the step was planned are dropped.
        """
        flight = self._land(plan)
        if flight.offloaded and self._state.kv.host is not None:
            self._state.kv.host.written(flight.offloaded)
        if self._state.config.enable_prefix_caching:
            self._publish(plan, flight)
        outputs: list[TokenOutput] = []
        owing = self._state.owing(plan)
        if result.tokens is None:
            self._commit_virtual(plan, flight, now, outputs)
        else:
            self._commit_tokens(plan, result, now, outputs)
        for request in owing:
            request.pending -= 1
        for request in flight.ending:
            if request.state is State.ENDING:
                raise RuntimeError(f"request {request.request_id} was to end in step {plan.step_id} and did not")
        return outputs

    def fail(self, plan: StepPlan, message: str, now: int) -> list[TokenOutput]:
        """A step raised: its requests end with an error; nobody else is touched."""
        flight = self._land(plan)
        if flight.offloaded and self._state.kv.host is not None:
            self._state.kv.host.failed(flight.offloaded)
        for rid in flight.swapped_out:
            request = self._state.requests.get(rid)
            if request is not None and request.is_swapped and request.swap_step == plan.step_id:
                self._state.lose_swapped(request)
        for row in plan.rows:
            request = self._state.requests.get(row.request_id)
            if request is not None:
                self._state.promises.withdraw(request)
        ids = [*plan.decodes.request_ids, *(rid for row in plan.rows for rid in (row.request_id, *row.forks))]
        ids = self._state.families.together(ids)
        requests = [self._state.requests[rid] for rid in ids if rid in self._state.requests]
        outputs = [self.finish(request, FinishReason.ERROR, now, error=message) for request in requests]
        self._state.adapters.lost(plan.adapters_in)
        return outputs

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        now: int,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs | None, ...] = (),
        stop_reason: int | None = None,
        error: str | None = None,
    ) -> TokenOutput:
        """End a request, wherever it is, and say so."""
        self._state.retire(request)
        stamps = RequestStamps(
            arrival_ns=request.source.arrival_ns,
            queued_ns=request.queued_ns,
            admitted_ns=request.admitted_ns,
            first_token_ns=request.first_token_ns,
            last_token_ns=request.last_token_ns,
            num_preemptions=request.num_preemptions,
            num_cached_tokens=request.num_cached,
            num_output_tokens=max(request.num_tokens, len(request.tokens)) - request.num_prompt,
        )
        return TokenOutput(request.request_id, token_ids, logprobs, prompt_logprobs, reason, stop_reason, error, stamps)

    def _land(self, plan: StepPlan) -> Flight:
        flights = self._state.flights
        if not flights or flights[0].step_id != plan.step_id:
            expected = flights[0].step_id if flights else "none"
            raise ValueError(f"step {plan.step_id} is committed, but the oldest step in flight is {expected}")
        flight = flights.popleft()
        self._state.kv.complete(plan.step_id)
        return flight

    def _publish(self, plan: StepPlan, flight: Flight) -> None:
        """What the step wrote is there now: its full blocks can be found by others."""
        state = self._state
        for row in plan.rows:
            request = state.requests.get(row.request_id)
            if request is None or request.num_preemptions != flight.residencies[row.request_id]:
                continue
            state.kv.publish(request.request_id, request.keys, row.context + row.num_new_tokens)
            if row.logits & LogitsAt.LAST:
                state.promises.withdraw(request)
        if flight.tick >= 0:
            for request in state.decodes.filled(flight.tick):
                state.kv.publish(request.request_id, request.keys, request.offset + flight.tick + 1)
        for request in flight.ending:
            if request.state is State.ENDING:
                state.kv.publish(request.request_id, request.keys, request.num_computed)

    def _commit_tokens(self, plan: StepPlan, result: StepResult, now: int, outputs: list[TokenOutput]) -> None:
        tokens = result.tokens
        assert tokens is not None
        if len(tokens) != plan.num_rows:
            raise ValueError(f"step {plan.step_id} has {plan.num_rows} rows, its result has {len(tokens)}")
        requests, logprobs, errors, ended = self._state.requests, result.logprobs, result.errors, result.ended
        searching = bool(self._state.searches)
        if searching:
            outputs.extend(self._advance_searches(plan, result, now))
        for index, rid in enumerate(plan.decodes.request_ids):
            request = requests.get(rid)
            if request is None or (searching and is_search(request)):
                continue
            if errors and index in errors:
                outputs.append(self.finish(request, FinishReason.ERROR, now, error=errors[index]))
                continue
            reported = tuple(logprobs[index]) if logprobs and index in logprobs else ()
            outputs.append(self._append(request, tokens[index][0], reported, (), now, index in ended))
        for index, row in enumerate(plan.rows, len(plan.decodes.request_ids)):
            request = requests.get(row.request_id)
            if row.forks:
                self._commit_forks(row.forks, index, result, now, outputs)
            if request is None or (is_search(request) and row.logits & LogitsAt.LAST):
                continue
            if index in errors:
                outputs.append(self.finish(request, FinishReason.ERROR, now, error=errors[index]))
                continue
            prompt = self._new_prompt_logprobs(request, row, result.prompt_logprobs.get(index))
            if row.logits & LogitsAt.LAST:
                reported = tuple(logprobs[index][:1]) if index in logprobs else ()
                outputs.append(self._append(request, tokens[index][0], reported, prompt, now, index in ended))
            elif prompt:
                outputs.append(TokenOutput(request.request_id, prompt_logprobs=prompt))

    def _commit_forks(
        self, forks: tuple[int, ...], index: int, result: StepResult, now: int, outputs: list[TokenOutput]
    ) -> None:
        """Siblings that sampled from a row's logits too, behind the row's own token."""
        tokens = result.tokens
        assert tokens is not None
        for place, rid in enumerate(forks, 1):
            request = self._state.requests.get(rid)
            if request is None:
                continue
            if index in result.errors:
                outputs.append(self.finish(request, FinishReason.ERROR, now, error=result.errors[index]))
                continue
            reported = (result.logprobs[index][place],) if index in result.logprobs else ()
            outputs.append(self._append(request, tokens[index][place], reported, (), now, False))

    def _advance_searches(self, plan: StepPlan, result: StepResult, now: int) -> list[TokenOutput]:
        """What came of each search that took part in the step."""
        found: dict[int, dict[int, TokenLogprobs]] = {}
        failed: dict[int, str] = {}
        last = [row.request_id if row.logits & LogitsAt.LAST else -1 for row in plan.rows]
        for index, rid in enumerate((*plan.decodes.request_ids, *last)):
            request = self._state.requests.get(rid)
            if request is None or request.family is None or request.family.beam is None:
                continue
            leader = request.family.leader.request_id
            if index in result.errors:
                failed[leader] = result.errors[index]
            else:
                found.setdefault(leader, {})[rid] = result.logprobs[index][0]
        outputs: list[TokenOutput] = []
        for leader, error in failed.items():
            outputs += self._searches.fail(leader, error, now)
        for leader, rows in found.items():
            outputs += self._searches.advance(leader, rows, now)
        return outputs

    def _append(
        self,
        request: Request,
        token: int,
        logprobs: tuple[TokenLogprobs, ...],
        prompt_logprobs: tuple[TokenLogprobs | None, ...],
        now: int,
        ended: bool,
    ) -> TokenOutput:
        """One more token: the end token, the grammar's last, the last allowed one, or one of many."""
        request.tokens.append(token)
        request.first_token_ns = request.first_token_ns or now
        request.last_token_ns = now
        count = len(request.tokens)
        if token in request.stop_ids and count > request.min_tokens_at:
            return self.finish(request, FinishReason.STOP, now, (token,), logprobs, prompt_logprobs, stop_reason=token)
        if ended:
            return self.finish(request, FinishReason.STOP, now, (token,), logprobs, prompt_logprobs)
        if count >= request.limit:
            return self.finish(request, FinishReason.LENGTH, now, (token,), logprobs, prompt_logprobs)
        cached = request.num_cached if count == request.num_prompt + 1 else 0
        return TokenOutput(request.request_id, (token,), logprobs, prompt_logprobs, num_cached_tokens=cached)

    def _commit_virtual(self, plan: StepPlan, flight: Flight, now: int, outputs: list[TokenOutput]) -> None:
        """In virtual time tokens have no content: only those who begin to answer, or end, are touched."""
        requests = self._state.requests
        for row in plan.rows:
            request = requests.get(row.request_id)
            if request is not None and row.logits & LogitsAt.LAST:
                request.first_token_ns = request.first_token_ns or now
                self._searches.advance_virtual(row.request_id, now)
            for rid in row.forks:
                if rid in requests:
                    requests[rid].first_token_ns = requests[rid].first_token_ns or now
        for request in flight.ending:
            if request.state is State.ENDING:
                outputs.append(self.end_virtual(request, now))

    def end_virtual(self, request: Request, now: int) -> TokenOutput:
        """A request has sampled its last token, of which only the number is known."""
        request.last_token_ns = now
        return self.finish(request, FinishReason.LENGTH, now)

    def _new_prompt_logprobs(
        self, request: Request, row: Row, entries: list[TokenLogprobs | None] | None
    ) -> tuple[TokenLogprobs | None, ...]:
        """Those not delivered before: a prompt that is computed again after a preemption reports nothing twice."""
        if not entries:
            return ()
        start = 0 if row.context == 0 else row.context + 1
        fresh = entries[max(0, request.prompt_logprobs_sent - start) :]
        request.prompt_logprobs_sent = max(request.prompt_logprobs_sent, start + len(entries))
        return tuple(fresh)

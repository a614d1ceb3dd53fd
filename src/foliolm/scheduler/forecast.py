"""When a request that arrives now would get its first token, as far as it can be foreseen."""

from __future__ import annotations

from dataclasses import dataclass

from foliolm.core.errors import TtftTargetError
from foliolm.core.protocols import Prices
from foliolm.scheduler.families import search_blocks
from foliolm.scheduler.request import Request
from foliolm.scheduler.state import SchedulerState


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds to a first token, and what they are made of.

    Attributes:
        room_s: until there are blocks and a place in the batch for it and those before it.
        compute_s: until its prompt and those before it are computed, beside the streams.
        tokens_ahead, requests_ahead: prompt tokens that must be computed before its own, and of how many requests.
    """

    room_s: float
    compute_s: float
    tokens_ahead: int
    requests_ahead: int

    @property
    def seconds(self) -> float:
        """To the first token."""
        return self.room_s + self.compute_s


class Forecaster:
    """Looks ahead by the prices of steps.

    Args:
        state: the scheduler's.
        prices: predicts.
    """

    def __init__(self, state: SchedulerState, prices: Prices) -> None:
        self._state = state
        self._prices = prices

    def check(self, request: Request, cached: int) -> None:
        """Refuse a request whose target cannot be kept; one without a target, or without prices, passes.

        Args:
            request: it has arrived, and is not in the queue yet.
            cached: leading tokens of it that are known.

        Raises:
            TtftTargetError: with the numbers.
        """
        own, servers = request.source.ttft_target_s, self._state.config.ttft_target_s
        target = min((value for value in (own, servers) if value is not None), default=None)
        if target is None or not self._prices.known:
            return
        forecast = self.forecast(request, cached)
        if forecast.seconds > target:
            whose = "ttft_target_ms" if own == target else "--ttft-target-ms"
            raise TtftTargetError(
                f"the first token is predicted to take {forecast.seconds * 1e3:.0f} ms, more than the "
                f"{target * 1e3:.0f} ms of {whose}: {forecast.room_s * 1e3:.0f} ms until there is room, "
                f"{forecast.compute_s * 1e3:.0f} ms to compute {forecast.tokens_ahead} prompt tokens of "
                f"{forecast.requests_ahead} requests before it and {request.num_tokens - cached} of its own",
                max(1, round(forecast.seconds - target)),
            )

    def forecast(self, request: Request, cached: int) -> Forecast:
        """Look ahead for a request that arrives now."""
        state = self._state
        ahead = [one for one in state.waiting if one.order < request.order]
        tokens = sum(max(1, one.num_tokens - one.match.num_tokens) for one in ahead if not one.is_swapped)
        tokens += sum(one.num_tokens - one.num_computed for one in state.prefilling.values())
        count = len(ahead) + len(state.prefilling)
        own = request.num_tokens - cached
        return Forecast(self._room_s(ahead, request), self._compute_s(tokens, count, own, cached), tokens, count)

    def _compute_s(self, tokens: int, count: int, own: int, cached: int) -> float:
        """Prompts one after another in what streams leave of the budget; others' as if all were equally long."""
        decodes = self._state.decodes
        streams, context = len(decodes), decodes.context_tokens
        prices = self._prices
        seconds = prices.recompute(own + cached, cached, streams, context)
        if count and tokens:
            seconds += count * prices.recompute(max(1, tokens // count), 0, streams, context)
        chunk = max(1, self._state.config.max_num_batched_tokens - streams)
        return seconds + -(-(tokens + own) // chunk) * prices.decode_step(streams, context)

    def _blocks(self, request: Request) -> int:
        """That must be free for it to be admitted: a search reserves all that it can ever need."""
        kv, beam = self._state.kv, request.source.sampling.beam
        if beam is None:
            return kv.blocks_for(request.num_tokens)
        return search_blocks(beam, request.num_prompt, request.limit, kv) if not request.source.sibling else 0

    def _room_s(self, ahead: list[Request], request: Request) -> float:
        """Until enough running requests have ended, each at its limit, for those before it and itself to fit.

        Those who wait run in their turn: what the running ones do not free takes as many further rounds as it fills.
        """
        state, config, kv = self._state, self._state.config, self._state.kv
        decodes = state.decodes
        headroom = config.watermark_blocks if state.num_running else 0
        blocks = sum(self._blocks(one) for one in [*ahead, request]) + headroom
        blocks -= kv.num_free + kv.num_fenced
        places = len(ahead) + 1 + state.num_running - config.max_num_seqs
        if blocks <= 0 and places <= 0:
            return 0.0
        step = self._prices.decode_step(max(1, len(decodes)), max(1, decodes.context_tokens))
        ends = sorted((one.end_tick - decodes.tick + 1, kv.holds(one.request_id)) for one in decodes.members.values())
        ticks = 0
        for ticks, freed in ends:
            blocks, places = blocks - freed, places - 1
            if blocks <= 0 and places <= 0:
                return ticks * step
        everyone = [*state.running(), *ahead, request]
        mean = sum(one.limit - one.num_prompt for one in everyone) / len(everyone)
        rounds = max(blocks / kv.num_usable, places / config.max_num_seqs)
        return (ticks + rounds * mean) * step

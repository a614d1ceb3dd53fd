"""Who may be asked to give way when KV blocks run out."""

from __future__ import annotations

from collections.abc import Iterable

from foliolm.core.resolve import SchedulerConfig
from foliolm.scheduler.request import Request, State


def eligible_victims(running: Iterable[Request], config: SchedulerConfig, tick: int) -> list[Request]:
    """Those who may give way, in order; the last of them is the first choice. Empty: nobody may be asked to.

    The first in order is never a victim, so that it always gets on and the whole cannot livelock. One that was
    preempted before and has not got on by a block since is passed over while another will do, so that no request is
    thrown back again and again without progress; and so is one that gave way ``max_preemptions`` times: when all did,
    those who did least often are asked.

    Args:
        running: those who hold blocks and are not about to end.
        config: the scheduler's settings.
        tick: the decode set's, for the counts of those who decode.
    """
    ranked = sorted(running, key=lambda request: request.order)[1:]
    ready = [
        request for request in ranked if not request.num_preemptions or _progress(request, tick) >= config.block_size
    ]
    spared = [request for request in ready if request.num_preemptions < config.max_preemptions]
    if spared or not ready:
        return spared or ranked[-1:]
    fewest = min(request.num_preemptions for request in ready)
    return [request for request in ready if request.num_preemptions == fewest]


def _progress(request: Request, tick: int) -> int:
    """Tokens gained since the last admission."""
    num_tokens = request.num_tokens
    if request.state is State.DECODING:
        num_tokens = request.offset + tick + 1
    return num_tokens - request.resumed_at

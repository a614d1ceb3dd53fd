"""Who gives way when KV blocks run out."""

from __future__ import annotations

from collections.abc import Iterable

from foliolm.scheduler.request import Request, State


def choose_victim(running: Iterable[Request], block_size: int, tick: int) -> Request | None:
    """The request that gives way, or None where nobody may be asked to.

    The first in order is never a victim, so that it always gets on and the whole cannot livelock. Of the others the
    last in order goes; but one that was preempted before and has not got on by a block since is passed over while
    another will do, so that no request is thrown back again and again without progress.

    Args:
        running: those who hold blocks and are not about to end.
        block_size: tokens a block, the progress that is asked for.
        tick: the decode set's, for the counts of those who decode.
    """
    ranked = sorted(running, key=lambda request: request.order)[1:]
    if not ranked:
        return None
    for request in reversed(ranked):
        if not request.num_preemptions or _progress(request, tick) >= block_size:
            return request
    return ranked[-1]


def _progress(request: Request, tick: int) -> int:
    """Tokens gained since the last admission."""
    num_tokens = request.num_tokens
    if request.state is State.DECODING:
        num_tokens = request.offset + tick + 1
    return num_tokens - request.resumed_at

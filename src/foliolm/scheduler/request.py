"""A request as the scheduler sees it."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from foliolm.core.request import EngineRequest
from foliolm.kv import NO_MATCH, BlockKeys

if TYPE_CHECKING:
    from foliolm.scheduler.families import Family


class State(enum.Enum):
    """Where a request is; the scheduler keeps each live one in exactly one place."""

    WAITING = "waiting"
    PARKED = "parked"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDING = "ending"
    FINISHED = "finished"


class Request:
    """One request's books.

    "Computed catches up with tokens": ``num_tokens`` counts the tokens that exist or are being sampled by a step in
    flight; ``num_computed`` those whose KV is written, or will be by the steps planned so far. While DECODING both
    follow from the decode set's tick (``offset + tick``), so that a steady step need not touch the request.

    Attributes:
        source: as it arrived.
        order: sort key; smaller runs earlier. Kept through preemption.
        state: where it is.
        tokens: prompt and committed outputs; in virtual time the prompt alone.
        content: what its blocks are known by once they are written: ``tokens`` themselves, and in virtual time those
            of an answer that is known before.
        keys: of the content's full blocks.
        num_prompt, num_tokens, num_computed: counts, see above.
        limit: most tokens that it may ever have, prompt included.
        offset, join_tick, end_tick: while DECODING: context minus tick; its first tick; the tick that samples its last
            token.
        pending: while WAITING after a preemption: sampled tokens that steps in flight still owe.
        last_step: newest step planned with it (for DECODING, as of when it left the decode set).
        sample_step: the step whose row other than a decode sampled for it last.
        stop_ids: token ids that end it.
        min_tokens_at: no end token counts before it has this many tokens.
        num_preemptions: how often it gave way.
        queue_entry: number of its place in the waiting queue; 0: it has none.
        is_swapped, swap_step: its KV lies on the host; the step that moves it there, 0 before that is planned.
        family: the completions of its prompt, where there are several; None: it is alone.
        resumed_at: ``num_tokens`` when it was last admitted.
        prompt_logprobs_sent: entries delivered so far.
        root: under which its prefixes are shared; None: they are not.
        match, match_generation: the last look for a known prefix, and the index's generation then.
        holds_adapter: it runs, and its adapter keeps a slot for it.
        num_cached: tokens that its first admission took from shared prefixes.
        chain_hashes: a hash for each full block of its tokens and all before it, as far as they were needed.
        promised: those of them that others may wait for, while it computes them.
        queued_ns, admitted_ns, first_token_ns, last_token_ns: clock stamps; 0 where not reached.
    """

    __slots__ = (
        "admitted_ns",
        "chain_hashes",
        "content",
        "end_tick",
        "family",
        "first_token_ns",
        "holds_adapter",
        "is_swapped",
        "join_tick",
        "keys",
        "last_step",
        "last_token_ns",
        "limit",
        "match",
        "match_generation",
        "min_tokens_at",
        "num_cached",
        "num_computed",
        "num_preemptions",
        "num_prompt",
        "num_tokens",
        "offset",
        "order",
        "pending",
        "promised",
        "prompt_logprobs_sent",
        "queue_entry",
        "queued_ns",
        "request_id",
        "resumed_at",
        "root",
        "sample_step",
        "source",
        "state",
        "stop_ids",
        "swap_step",
        "tokens",
    )

    def __init__(
        self, source: EngineRequest, order: tuple[int, int, int], limit: int, now: int, block_size: int
    ) -> None:
        sampling = source.sampling
        self.source = source
        self.request_id = source.request_id
        self.order = order
        self.state = State.WAITING
        self.tokens = list(source.prompt_token_ids)
        self.content = [*self.tokens, *source.answer_token_ids] if source.answer_token_ids else self.tokens
        self.keys = BlockKeys(self.content, block_size)
        self.num_prompt = len(self.tokens)
        self.num_tokens = self.num_prompt
        self.num_computed = 0
        self.limit = limit
        self.offset = self.join_tick = self.end_tick = 0
        self.pending = 0
        self.last_step = self.sample_step = 0
        self.stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self.stop_ids |= frozenset(source.eos_token_ids)
        self.min_tokens_at = self.num_prompt + sampling.min_tokens
        self.family: Family | None = None
        self.num_preemptions = 0
        self.queue_entry = 0
        self.is_swapped = False
        self.swap_step = 0
        self.resumed_at = 0
        self.holds_adapter = False
        self.prompt_logprobs_sent = 0
        self.root = (source.adapter, source.cache_salt) if source.share_prefix else None
        self.match = NO_MATCH
        self.match_generation = -1
        self.num_cached = 0
        self.chain_hashes: list[int] = []
        self.promised: list[int] = []
        self.queued_ns = now
        self.admitted_ns = self.first_token_ns = self.last_token_ns = 0

    def wants_prompt_logprobs(self) -> bool:
        """True while some of the prompt's logprobs have not been delivered."""
        return self.source.sampling.prompt_logprobs is not None and self.prompt_logprobs_sent < self.num_prompt

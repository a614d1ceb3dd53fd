"""A request as the engine takes it, and what comes back of it."""

from __future__ import annotations

import enum
from dataclasses import field

from foliolm.core.sampling import SamplingParams
from foliolm.core.timeline import RequestTimeline
from foliolm.core.valueclass import valueclass


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@valueclass
class EngineRequest:
    """One completion of one prompt. Immutable, and plain data: it crosses processes.

    Attributes:
        request_id: unique within an engine for ever; given by the engine's client, never by a user.
        prompt_token_ids: at least one token.
        sampling: with ``n == 1``.
        eos_token_ids: the model's end tokens; ignored where ``sampling.ignore_eos``.
        arrival_ns: the monotonic clock at HTTP accept (or at the call), in nanoseconds.
        sent_ns: the same clock when it was handed to the engine, which may take it only once a step has ended;
            0: not known, it waits from when the engine takes it.
        priority: lower runs earlier, under the priority policy.
        label: the user's name for it, for logs and records only; need not be unique.
        adapter: load id of a LoRA adapter, or None for the bare model.
        cache_salt: keeps prefixes apart between those who give different salts.
        ttft_target_s: it is refused at arrival if its first token is predicted to take longer; None: the server's.
        tenant: whose it is, where tenants are treated fairly.
        sibling: its place among the completions of one prompt, which are added together and have consecutive ids: 0
            leads, the others fork from it once it has computed the prompt. Beams of one search are siblings too.
        share_prefix: its prefix may be found by, and taken from, others; False where token ids have no meaning.
        answer_token_ids: what it will have been answered, where a virtual run knows that: tokens sampled there have no
            content, and blocks of an answer are shared only if it is given here. A real engine samples its own.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos_token_ids: tuple[int, ...] = ()
    arrival_ns: int = 0
    priority: int = 0
    label: str = ""
    adapter: int | None = None
    cache_salt: str | None = None
    share_prefix: bool = True
    sent_ns: int = 0
    answer_token_ids: tuple[int, ...] = ()
    ttft_target_s: float | None = None
    tenant: str = ""
    sibling: int = 0


@valueclass
class TokenLogprobs:
    """Log-probabilities at one position: log-softmax of the model's raw logits, natural log.

    Attributes:
        token_id, logprob, rank: of the token that stands there; rank 1 is the likeliest.
        top: (token id, logprob) pairs, likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@valueclass
class RequestStamps:
    """Monotonic nanoseconds at the turns of a request's life inside the engine; 0 where not reached.

    Attributes:
        arrival_ns: HTTP accept.
        queued_ns: entered the waiting queue.
        admitted_ns: first admitted.
        first_token_ns, last_token_ns: its first and last tokens were committed.
        num_preemptions, num_cached_tokens: counts.
        num_output_tokens: sampled by the end, those of steps in flight included.
    """

    arrival_ns: int = 0
    queued_ns: int = 0
    admitted_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


@valueclass
class TokenOutput:
    """What one step gave one request.

    Attributes:
        request_id: whose.
        token_ids: newly committed tokens, end token included; may be empty (an abort, an error).
        logprobs: one a token, where asked for.
        prompt_logprobs: for newly computed prompt positions, where asked for; None stands at position 0.
        finish_reason: set on the last output of a request.
        stop_reason: the end or stop token's id, where that ended it.
        error: a sentence, where finish_reason is ``error`` or the engine itself ended it.
        stamps: on the last output.
        timeline: on the last output: where the time went inside the engine.
        num_cached_tokens: on the output with its first token: prompt tokens that were found computed.
    """

    request_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    stamps: RequestStamps | None = None
    timeline: RequestTimeline | None = None
    num_cached_tokens: int = 0

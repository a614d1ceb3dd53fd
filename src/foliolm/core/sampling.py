"""Sampling parameters: what a client may ask of each token, checked once, where they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from foliolm.core.errors import RequestError
from foliolm.core.grammar import GrammarSpec

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_IDS = {"stop_token_ids": 1024, "logit_bias": 1024, "bad_words": 1024, "allowed_token_ids": 1 << 16}
"""Most entries of what a step looks through for each token."""
MAX_N = 128
BEAM_REFUSES = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "prompt_logprobs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words_token_ids",
    "grammar",
)
"""What has no part in a beam search; only the neutral value goes with it."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Beam search over a prompt's continuations; scores are sums of log-probabilities.

    Attributes:
        width: hypotheses that are kept alive.
        length_penalty: a finished hypothesis counts ``sum / tokens ** length_penalty``: above 0 favours longer ones.
        early_stopping: True: end as soon as ``width`` hypotheses have finished. False: end when the best live one, at
            its present length, is no better than the worst finished one. ``never``: as False, but at the greatest
            length where that would help it.

    Raises:
        RequestError: a value is out of range.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def num_candidates(self, num_end_ids: int) -> int:
        """Continuations that a step looks at: enough that ``width`` go on whichever of them end."""
        return max(2, 1 + num_end_ids) * self.width

    def __post_init__(self) -> None:
        _integer("best_of", self.width, 1, MAX_N)
        _number("length_penalty", self.length_penalty, -10.0, 10.0)
        if self.early_stopping not in (True, False, "never"):
            raise RequestError(
                f"early_stopping is {self.early_stopping!r:.80}; it must be true, false or 'never'", "early_stopping"
            )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    Attributes:
        n: how many completions of the prompt; each is an engine request of its own.
        max_tokens: most tokens to generate; None: up to the model's length.
        min_tokens: end tokens and stop strings are not honoured before this many tokens. It never beats max_tokens.
        temperature: 0 is greedy; else logits are divided by it.
        top_p: keep the smallest set of tokens whose probabilities sum to at least this; 1 keeps all.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this share of the likeliest; 0 keeps all.
        presence_penalty, frequency_penalty: subtracted from the logits of generated tokens, once or by count.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the output.
        seed: seeds this request's own generator; None draws fresh entropy.
        stop: strings that end the text; found where text is made, not in the engine.
        stop_token_ids: token ids that end the request, besides the model's end tokens.
        ignore_eos: the model's end tokens are ordinary tokens.
        include_stop_str_in_output: keep the matched stop string (or stop token's text) in the text.
        logprobs: how many alternatives to report a generated token (0: the chosen token alone); None: no logprobs.
        prompt_logprobs: the same for each prompt token; such a request never reads cached KV.
        logit_bias: (token id, bias) pairs added to the logits.
        allowed_token_ids: if given, no other token can be sampled.
        bad_words_token_ids: token sequences whose last token is forbidden where the rest has just been generated.
        skip_special_tokens: leave special tokens out of the text.
        grammar: what the text must follow; the request ends where it ends, whatever ``min_tokens`` says.
        beam: search in place of sampling; goes with none of the fields that shape or cut the choice of a token.

    Raises:
        RequestError: a value is out of range; the message holds the field, the value and the limit.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    skip_special_tokens: bool = True
    grammar: GrammarSpec | None = None
    beam: BeamSearch | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "logit_bias"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        object.__setattr__(self, "bad_words_token_ids", tuple(tuple(w) for w in self.bad_words_token_ids))
        _integer("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, -1, None)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop has {len(self.stop)} strings; the limit is {MAX_STOP_STRINGS}", "stop")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(
                    f"stop holds {text!r}; each entry must be a string of at least one character", "stop"
                )
            if len(text) > MAX_STOP_CHARACTERS:
                raise RequestError(
                    f"stop holds a string of {len(text)} characters; the limit is {MAX_STOP_CHARACTERS}", "stop"
                )
        self._check_counts()
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                _integer(name, token, 0, None)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids is an empty list; it must hold at least one token id", "allowed_token_ids"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        self._check_beam()
        for pair in self.logit_bias:
            _integer("logit_bias", pair[0], 0, None)
            _number("logit_bias", pair[1], -100.0, 100.0)

    def _check_beam(self) -> None:
        if self.beam is None:
            return
        if self.n > self.beam.width:
            raise RequestError(
                f"n is {self.n} of a beam search of width {self.beam.width}; it may be at most that", "n"
            )
        neutral = SamplingParams()
        for name in BEAM_REFUSES:
            value = getattr(self, name)
            if value != getattr(neutral, name) and not (name == "temperature" and self.greedy):
                raise RequestError(f"{name} is {value!r:.80}; beam search does not serve it", name)

    def _check_counts(self) -> None:
        for name, limit in MAX_IDS.items():
            entries = self.bad_words_token_ids if name == "bad_words" else getattr(self, name)
            if entries is not None and len(entries) > limit:
                raise RequestError(f"{name} has {len(entries)} entries; the limit is {limit}", name)

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is always chosen."""
        return self.temperature < 1e-5

    @property
    def num_sequences(self) -> int:
        """Engine requests that it takes: one a completion, or one a hypothesis of a beam search."""
        return self.n if self.beam is None else self.beam.width

    @property
    def needs_history(self) -> bool:
        """True if a token's logits depend on the tokens before it other than through the model."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.bad_words_token_ids
        )

    def child(self, index: int) -> SamplingParams:
        """The parameters of completion ``index`` of ``n``: alone, and with a seed of its own."""
        if self.n == 1:
            return self
        return replace(self, n=1, seed=None if self.seed is None else self.seed + index)


def _integer(field: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{field} is {value!r}; it must be an integer", field)
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{field} is {value}; it must be {limit}", field)


def _number(field: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{field} is {value!r}; it must be a finite number", field)
    if value < low or value > high or (open_low and value == low):
        bound = "above" if open_low else "from"
        raise RequestError(f"{field} is {value}; it must be {bound} {low} to {high}", field)

"""Grammars of answers, compiled by llguidance: which tokens may come next is a question of microseconds.

It was chosen over xgrammar because it needs no torch, compiles lazily (a schema takes about a millisecond, where the
other walks the vocabulary first), bounds the work of compiling and of every step by fuel instead of by hope, and
refuses JSON schema keywords that it does not enforce instead of passing over them.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from foliolm.core.errors import ConfigError, RequestError
from foliolm.core.grammar import GrammarSpec, GrammarState

if TYPE_CHECKING:
    import llguidance

    from foliolm.text.tokenizer import Tokenizer

MOST_KEPT = 64
"""Compiled grammars that are kept for the next request that brings the same one."""
WHITESPACE = r" |\n[ \t]{0,40}"
"""Unbounded whitespace lets a small model fill its whole answer with line breaks."""
MOST_GBNF = 32 << 10
"""Its translation to Lark is Python's work, which nobody bounds."""
_SHOWN = 300
_LIMITS = {
    # What a grammar may cost, in llguidance's units: about 20 ms to build its lexer, 15 ms a step, 50 MB of states.
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2000,
    "max_lexer_states": 25_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


def checked_grammar(spec: GrammarSpec) -> GrammarSpec:
    """A grammar that is right by itself, ready to be compiled for a vocabulary; takes milliseconds.

    Raises:
        RequestError: names the field and what is wrong.
    """
    if spec.kind == "grammar":
        spec = replace(spec, source=_lark(spec))
    wrong, messages = _library().LLMatcher.validate_grammar_with_warnings(_source(spec), limits=_limits())
    if wrong:
        raise _refused(spec, messages[0])
    return spec


class CompiledGrammars:
    """Grammars compiled for one tokenizer. Safe to use from several threads; the work releases the interpreter lock.

    Args:
        tokenizer: of the model.
        eos_token_ids: tokens that may end an answer.

    Raises:
        ConfigError: llguidance is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        library = _library()
        self._vocabulary = _Vocabulary(tokenizer, eos_token_ids)
        self._tokenizer = library.LLTokenizer(
            self._vocabulary, n_vocab=len(self._vocabulary.tokens), eos_token=list(self._vocabulary.ends)
        )
        self._vocabulary.backend = self._tokenizer
        self._executor = library.LLExecutor(min(4, len(os.sched_getaffinity(0))))
        self._words = -(-len(self._vocabulary.tokens) // 32)
        self._lock = threading.Lock()
        self._kept: OrderedDict[GrammarSpec, llguidance.LLMatcher] = OrderedDict()

    def read_ahead(self) -> None:
        """Nothing: the vocabulary is there."""

    def prepare(self, spec: GrammarSpec) -> None:
        """Compile a grammar, or find that it is compiled already.

        Raises:
            RequestError: it is wrong, too large, or allows nothing.
        """
        self._compiled(spec)

    def begin(self, spec: GrammarSpec) -> GrammarProgress:
        """The state before the first token. Raises as ``prepare``."""
        return GrammarProgress(self._compiled(spec).deep_copy())

    def masks(self, states: Sequence[GrammarState]) -> bytes:
        """Which tokens may come next, a row of 32-bit words a state; see ``core.grammar.Grammars``."""
        mask = np.zeros((len(states), self._words), np.int32)
        matchers = []
        for row, state in enumerate(states):
            assert isinstance(state, GrammarProgress)
            matchers.append((state.matcher, row))
        if len(matchers) == 1:
            matchers[0][0].unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        else:
            self._executor.unsafe_compute_mask_ptr(matchers, mask.ctypes.data, 4 * self._words, len(states))
        for state in states:
            assert isinstance(state, GrammarProgress)
            state.note()
        return mask.tobytes()

    def _compiled(self, spec: GrammarSpec) -> llguidance.LLMatcher:
        with self._lock:
            kept = self._kept.get(spec)
            if kept is not None:
                self._kept.move_to_end(spec)
                return kept
        matcher: llguidance.LLMatcher = _library().LLMatcher(
            self._tokenizer, _source(spec), log_level=0, limits=_limits()
        )
        if matcher.is_error():
            raise _refused(spec, matcher.get_error())
        probe = matcher.deep_copy()
        probe.compute_bitmask()
        if probe.is_error():
            raise _refused(spec, "it allows no text at all, or more than can be looked at: " + probe.get_error())
        with self._lock:
            self._kept[spec] = matcher
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return matcher


class GrammarsOnDemand:
    """Grammars of a vocabulary that is read when the first one is asked for. Safe to use from several threads.

    Args:
        load: reads it; called once, unless it raises.
    """

    def __init__(self, load: Callable[[], CompiledGrammars]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._loaded: CompiledGrammars | None = None

    def read_ahead(self) -> None:
        """Read the vocabulary now. Raises what ``load`` raises; the first grammar will then try again."""
        self._grammars()

    def prepare(self, spec: GrammarSpec) -> None:
        """As ``CompiledGrammars.prepare``."""
        self._grammars().prepare(spec)

    def begin(self, spec: GrammarSpec) -> GrammarProgress:
        """As ``CompiledGrammars.begin``."""
        return self._grammars().begin(spec)

    def masks(self, states: Sequence[GrammarState]) -> bytes:
        """As ``CompiledGrammars.masks``."""
        return self._grammars().masks(states)

    def _grammars(self) -> CompiledGrammars:
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded


class GrammarProgress:
    """How far one answer has come in its grammar; a ``core.grammar.GrammarState``.

    Args:
        matcher: in its first state, and this object's own.
    """

    __slots__ = ("ended", "error", "matcher", "num_accepted")

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.matcher = matcher
        self.num_accepted = 0
        self.error: str | None = None
        self.ended = False

    def accept(self, token_id: int) -> None:
        """Take the next token. After the end, and after an error, it does nothing."""
        if self.ended or self.error is not None:
            return
        self.matcher.consume_token(token_id)
        self.num_accepted += 1
        self.note()

    def restart(self, token_ids: Sequence[int]) -> None:
        """Begin again with these tokens."""
        self.matcher.reset()
        self.num_accepted, self.error, self.ended = 0, None, False
        for token_id in token_ids:
            self.accept(token_id)

    def note(self) -> None:
        """Look at what the last call led to."""
        if self.matcher.is_error():
            self.error = f"the grammar cannot go on: {_first_line(self.matcher.get_error())}"
        elif self.matcher.is_stopped() and self.num_accepted:
            self.ended = True


class _Vocabulary:
    """The tokenizer as llguidance wants to see it: bytes of each token, and a function from text to tokens."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.num_tokens)]
        self.ends = tuple(dict.fromkeys(eos_token_ids))
        if not self.ends:
            # A model without an end token: one that it can never sample stands for the end.
            self.ends = (len(self.tokens),)
            self.tokens.append(b"")
        self.eos_token_id = self.ends[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted({*tokenizer.special_ids, *self.ends})
        self.backend: llguidance.LLTokenizer | None = None
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """How the model would write a stretch of text that the grammar leaves no choice about."""
        raw = text if isinstance(text, bytes) else text.encode()
        ids = self._tokenizer.encode_run(raw.decode("utf-8", "replace"), at_start=False)
        if self.backend is not None and b"".join(self.tokens[token] for token in ids) != raw:
            # Some tokenizers add a space or normalise; here the bytes must be the very ones.
            return self.backend.greedy_tokenize(raw.decode("utf-8", "replace"))
        return ids


def _source(spec: GrammarSpec) -> str:
    """A grammar in llguidance's own form."""
    matcher = _library().LLMatcher
    grammar: str
    if spec.kind == "json":
        flexible = spec.whitespace != ""
        options: dict[str, Any] = {"whitespace_flexible": flexible}
        if flexible:
            options["whitespace_pattern"] = spec.whitespace or WHITESPACE
        try:
            grammar = matcher.grammar_from_json_schema(spec.source, defaults=options)
        except ValueError as error:
            raise _refused(spec, str(error)) from None
    elif spec.kind == "regex":
        grammar = matcher.grammar_from_regex(spec.source)
    elif spec.kind == "choice":
        choices = " | ".join(json.dumps(choice) for choice in json.loads(spec.source))
        grammar = matcher.grammar_from_lark(f"start: {choices}")
    else:
        grammar = matcher.grammar_from_lark(_lark(spec))
    return grammar


def _lark(spec: GrammarSpec) -> str:
    """GBNF as Lark, Lark as it is."""
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if is_lark_syntax(spec.source):
        return spec.source
    if len(spec.source) > MOST_GBNF:
        raise _refused(spec, f"GBNF of {len(spec.source)} characters; the limit is {MOST_GBNF} (Lark may be longer)")
    try:
        return gbnf_to_lark(spec.source)
    except Exception as error:  # its parser raises whatever it stumbles over
        raise _refused(spec, f"{type(error).__name__}: {error}") from None


def _refused(spec: GrammarSpec, message: str) -> RequestError:
    kind = {"json": "JSON schema", "regex": "regular expression", "choice": "choice", "grammar": "grammar"}[spec.kind]
    return RequestError(f"{spec.field}: the {kind} cannot be used: {_first_line(message)}", spec.field, "bad_grammar")


def _first_line(message: str) -> str:
    shown = " ".join(message.replace("<non-verbose/>", "").split())
    return shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"


def _limits() -> llguidance.LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(**_LIMITS)  # type: ignore[arg-type]


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ConfigError("structured output needs llguidance; pip install 'foliolm[serve]' brings it") from None
    return llguidance

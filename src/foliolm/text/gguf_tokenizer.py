"""A tokenizer from the metadata of a GGUF file, written as a ``tokenizer.json`` would hold it."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from foliolm.core.errors import ModelError
from foliolm.text.pretokenizers import pre_tokenizer, split_rule

logger = logging.getLogger(__name__)

_SPACE = "▁"


class _Kind(enum.IntEnum):
    """What a token is, by the numbers in ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The content of a ``tokenizer.json`` that encodes as the model's own tokenizer does.

    Byte-level BPE (``gpt2``) splits by the file's ``tokenizer.ggml.pre``. SentencePiece BPE (``llama``) carries scores
    instead of merges: the merges are recovered from them, since merging the best-scored pair first is all they decide.

    Raises:
        ModelError: there is no tokenizer in the file, or it is of an unknown kind.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{source} holds no tokenizer (tokenizer.ggml.tokens)")
    kinds = _kinds(metadata, len(tokens), source)
    if model == "gpt2":
        spec, adds_bos = _byte_level(metadata, tokens, kinds, source)
    elif model == "llama":
        spec, adds_bos = _sentencepiece(metadata, tokens, kinds, source), True
    else:
        raise ModelError(f"{source}: tokenizer.ggml.model is {model!r}; gpt2 (byte-level BPE) and llama are supported")
    spec["post_processor"] = _post_processor(metadata, tokens, adds_bos, source)
    return spec


def _kinds(metadata: Mapping[str, Any], count: int, source: str) -> Sequence[int]:
    kinds = metadata.get("tokenizer.ggml.token_type")
    if kinds is None:
        return [_Kind.NORMAL] * count
    if len(kinds) != count:
        raise ModelError(f"{source}: tokenizer.ggml.token_type has {len(kinds)} entries, tokenizer.ggml.tokens {count}")
    return [int(kind) for kind in kinds]


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], kinds: Sequence[int], source: str
) -> tuple[dict[str, Any], bool]:
    rule = split_rule(metadata.get("tokenizer.ggml.pre"), source)
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelError(f"{source} holds no tokenizer.ggml.merges, which byte-level BPE needs")
    bpe = {
        "type": "BPE",
        "vocab": _vocab(tokens, source),
        "merges": merges,
        "ignore_merges": rule.whole_words,
    }
    spec = {
        "version": "1.0",
        "added_tokens": _added_tokens(tokens, kinds),
        "normalizer": {"type": "NFC"} if rule.nfc else None,
        "pre_tokenizer": pre_tokenizer(rule),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": bpe,
    }
    return spec, rule.adds_bos


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], kinds: Sequence[int], source: str) -> dict[str, Any]:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        count = "none" if scores is None else str(len(scores))
        raise ModelError(
            f"{source}: tokenizer.ggml.scores: a score a token is needed, {len(tokens)} in all; it has {count}"
        )
    vocab = _vocab(tokens, source)
    unknown = next((tokens[i] for i, kind in enumerate(kinds) if kind == _Kind.UNKNOWN), None)
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": _SPACE}] if prefixed else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(tokens, kinds),
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": _merges_from_scores(tokens, kinds, [float(score) for score in scores]),
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": unknown,
        },
    }


def _merges_from_scores(tokens: list[str], kinds: Sequence[int], scores: Sequence[float]) -> list[list[str]]:
    """Every way to build a normal token from two others, best-scored result first."""
    pieces = {token: scores[i] for i, token in enumerate(tokens) if kinds[i] == _Kind.NORMAL}
    found: list[tuple[float, str, str]] = []
    for token, score in pieces.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                found.append((-score, left, right))
    found.sort(key=lambda merge: merge[0])
    return [[left, right] for _, left, right in found]


def _vocab(tokens: list[str], source: str) -> dict[str, int]:
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if token in vocab:
            logger.warning("%s: tokens %d and %d are both spelt %r", source, vocab[token], token_id, token)
            # The later one cannot be written; it keeps an id, since ids must not move.
            token = f"{token} duplicate {token_id}"
        vocab[token] = token_id
    return vocab


def _added_tokens(tokens: list[str], kinds: Sequence[int]) -> list[dict[str, Any]]:
    """Tokens that are found in text as they stand: control tokens, and those that the model's makers added."""
    added = []
    for token_id, kind in enumerate(kinds):
        if kind in (_Kind.CONTROL, _Kind.UNKNOWN, _Kind.USER_DEFINED) and tokens[token_id]:
            added.append(
                {
                    "id": token_id,
                    "content": tokens[token_id],
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": kind == _Kind.USER_DEFINED and _SPACE in tokens[token_id],
                    "special": kind != _Kind.USER_DEFINED,
                }
            )
    return added


def _post_processor(
    metadata: Mapping[str, Any], tokens: list[str], adds_bos: bool, source: str
) -> dict[str, Any] | None:
    def token(name: str, wanted: bool) -> tuple[str, int] | None:
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if not wanted or token_id is None:
            return None
        if not 0 <= token_id < len(tokens):
            raise ModelError(f"{source}: tokenizer.ggml.{name}_token_id is {token_id}; there are {len(tokens)} tokens")
        return tokens[token_id], token_id

    return template_processing(
        token("bos", metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        token("eos", metadata.get("tokenizer.ggml.add_eos_token", False)),
    )


def template_processing(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> dict[str, Any] | None:
    """A ``tokenizer.json`` post-processor that sets these tokens around a text, or None where there are none."""
    around = [token for token in (bos, eos) if token is not None]
    if not around:
        return None

    def special(token: tuple[str, int]) -> dict[str, Any]:
        return {"SpecialToken": {"id": token[0], "type_id": 0}}

    sequence = [{"Sequence": {"id": "A", "type_id": 0}}]
    single = [*([special(bos)] if bos else []), *sequence, *([special(eos)] if eos else [])]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    tokens = {name: {"id": name, "ids": [token_id], "tokens": [name]} for name, token_id in around}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}

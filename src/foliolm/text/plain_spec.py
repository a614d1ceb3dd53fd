"""A tokenizer to which control tokens are ordinary characters, made from one that knows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foliolm.core.errors import ModelError


def plain_spec(
    spec: Mapping[str, Any], control: Mapping[str, int], added: Mapping[int, str], source: str
) -> dict[str, Any]:
    """The content of a ``tokenizer.json`` that cannot produce a control token from any text.

    Taking the control tokens from the list of added tokens is not enough: their spellings stand in the vocabulary of
    many models too, where merges, or a whole word, may lead to them. There they are renamed to something that no text
    can contain after normalising, so that all ids stay where they are.

    Args:
        spec: the content of the model's ``tokenizer.json``.
        control: ids of the control tokens by spelling.
        added: spellings of all added tokens by id.
        source: for the errors' text.

    Raises:
        ModelError: the model is neither BPE nor Unigram.
    """
    model = dict(spec["model"])
    kind = model.get("type") or ("BPE" if "merges" in model else None)
    if kind == "BPE":
        model.update(_plain_bpe(model, control, added))
    elif kind == "Unigram":
        model["vocab"] = [
            [_hidden(control[piece]) if piece in control else piece, score] for piece, score in model["vocab"]
        ]
        for token_id in sorted(set(added)):
            if token_id == len(model["vocab"]):
                name = added[token_id]
                model["vocab"].append([_hidden(token_id) if name in control else name, 0.0])
    else:
        raise ModelError(f"{source}: a tokenizer model of type {kind!r} is not supported; BPE and Unigram are")
    kept = [token for token in spec.get("added_tokens") or [] if token["content"] not in control]
    return {**spec, "model": model, "added_tokens": kept}


def _plain_bpe(model: Mapping[str, Any], control: Mapping[str, int], added: Mapping[int, str]) -> dict[str, Any]:
    vocab = {_hidden(token_id) if token in control else token: token_id for token, token_id in model["vocab"].items()}
    for token_id, token in added.items():  # those outside the vocabulary would be numbered anew
        vocab.setdefault(_hidden(token_id) if token in control else token, token_id)
    unknown = model.get("unk_token")
    return {
        "vocab": vocab,
        "merges": [merge for merge in model["merges"] if not _touches(merge, control)],
        "unk_token": _hidden(control[unknown]) if unknown is not None and unknown in control else unknown,
    }


def _touches(merge: str | list[str], control: Mapping[str, int]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left + right in control or left in control or right in control


def _hidden(token_id: int) -> str:
    # Byte-level text has neither NUL nor space left when it reaches the vocabulary, SentencePiece text no space.
    return f"\0 control {token_id}"

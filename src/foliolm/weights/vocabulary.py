"""How many tokens the tokenizer in a folder knows, without building it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from foliolm.core.errors import ModelError
from foliolm.weights.jsonfile import read_json, read_json_if_there


def count_tokens(folder: Path) -> int | None:
    """The highest token id that the tokenizer's files name, plus one; None where no file lists the tokens.

    Raises:
        ModelError: a file is damaged.
    """
    ids = _from_tokenizer_json(folder / "tokenizer.json") or _from_vocab_json(folder)
    return max(ids) + 1 if ids else None


def _from_tokenizer_json(path: Path) -> list[int]:
    if not path.exists():
        return []
    content = read_json(path)
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict | list):
        raise ModelError(f"{path} has no model.vocab")
    ids = _ids(vocab.values(), path) if isinstance(vocab, dict) else list(range(len(vocab)))
    added = content.get("added_tokens") or []
    return ids + _ids((token.get("id") for token in added if isinstance(token, dict)), path)


def _from_vocab_json(folder: Path) -> list[int]:
    if not (folder / "vocab.json").exists():
        return []
    ids = _ids(read_json(folder / "vocab.json").values(), folder / "vocab.json")
    ids += _ids(read_json_if_there(folder / "added_tokens.json").values(), folder / "added_tokens.json")
    decoder: Any = read_json_if_there(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    return ids + [int(token) for token in decoder if str(token).isdigit()]


def _ids(values: Iterable[Any], path: Path) -> list[int]:
    ids = []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(f"{path} gives a token the id {value!r}; it must be an integer of at least 0")
        ids.append(value)
    return ids

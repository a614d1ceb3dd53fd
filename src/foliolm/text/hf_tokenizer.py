"""The tokenizer of a Hugging Face folder: its ``tokenizer.json`` and what ``tokenizer_config.json`` adds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foliolm.core.errors import ModelError
from foliolm.text.gguf_tokenizer import template_processing
from foliolm.weights.jsonfile import read_json, read_json_if_there


@dataclass(frozen=True, slots=True)
class FolderTokenizer:
    """What a folder says of its tokenizer.

    Attributes:
        spec: the content of ``tokenizer.json``, with tokens that only the config lists.
        special: spelling of ``bos_token``, ``eos_token`` and the like, by that name.
    """

    spec: dict[str, Any]
    special: dict[str, str]


def tokenizer_from_folder(folder: Path) -> FolderTokenizer:
    """Read a folder's tokenizer; one without ``tokenizer.json`` is converted by transformers.

    Raises:
        ModelError: there is none, or a file is damaged.
    """
    config = read_json_if_there(folder / "tokenizer_config.json")
    spec = read_json(folder / "tokenizer.json") if (folder / "tokenizer.json").exists() else _converted(folder)
    if not isinstance(spec.get("model"), dict):
        raise ModelError(f"{folder / 'tokenizer.json'} has no model")
    special = _special(read_json_if_there(folder / "special_tokens_map.json")) | _special(config)
    ids = _ids(spec)
    _add_missing(spec, config, ids)
    _set_around(spec, config, special, ids)
    return FolderTokenizer(spec, special)


def _converted(folder: Path) -> dict[str, Any]:
    """Older folders hold a SentencePiece model or a vocabulary and merges."""
    if not any((folder / name).exists() for name in ("tokenizer.model", "vocab.json", "spiece.model")):
        raise ModelError(f"{folder} holds no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    except Exception as error:  # transformers raises whatever its parts raise
        raise ModelError(f"{folder}: the tokenizer cannot be converted to a tokenizer.json: {error}") from None
    spec: dict[str, Any] = json.loads(backend.to_str())
    return spec


def _special(config: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str) and value:
            found[name] = value
    return found


def _ids(spec: dict[str, Any]) -> dict[str, int]:
    vocab = spec["model"].get("vocab") or {}
    ids = dict(vocab) if isinstance(vocab, dict) else {piece: n for n, (piece, _) in enumerate(vocab)}
    return ids | {token["content"]: token["id"] for token in spec.get("added_tokens") or []}


def _add_missing(spec: dict[str, Any], config: dict[str, Any], ids: dict[str, int]) -> None:
    """Some folders list an added token in ``tokenizer_config.json`` alone."""
    decoder = config.get("added_tokens_decoder")
    known = {token["content"] for token in spec.get("added_tokens") or []}
    missing = [
        {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, **token, "id": int(token_id)}
        for token_id, token in (decoder.items() if isinstance(decoder, dict) else ())
        if isinstance(token, dict) and token.get("content") not in known and str(token_id).isdigit()
    ]
    for token in sorted(missing, key=lambda token: token["id"]):
        token.pop("__type", None)
        token.setdefault("special", False)
        spec.setdefault("added_tokens", []).append(token)
        ids[token["content"]] = token["id"]


def _set_around(spec: dict[str, Any], config: dict[str, Any], special: dict[str, str], ids: dict[str, int]) -> None:
    """``add_bos_token`` and ``add_eos_token``, where the config has them, decide over the post-processor."""
    wanted = [config.get(f"add_{name}_token") for name in ("bos", "eos")]
    if not any(isinstance(value, bool) for value in wanted):
        return
    around = []
    for name, value in zip(("bos_token", "eos_token"), wanted, strict=True):
        token = special.get(name)
        around.append((token, ids[token]) if value and token in ids else None)
    if any(around) or "TemplateProcessing" in json.dumps(spec.get("post_processor")):
        spec["post_processor"] = template_processing(*around)

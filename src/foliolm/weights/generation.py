"""What a model's author set for generating: sampling defaults, and the tokens that end a text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from foliolm.core.errors import ModelError

_DEFAULTS: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0.0, 100.0),
    "top_p": (float, 0.0, 1.0),
    "top_k": (int, -1, math.inf),
    "min_p": (float, 0.0, 1.0),
    "repetition_penalty": (float, 0.0, 100.0),
    "max_new_tokens": (int, 1, math.inf),
}
_GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_END_TEXTS = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
)
_CONTROL = 3


def defaults_from_generation_config(config: Mapping[str, Any], source: str) -> dict[str, float | int]:
    """The sampling defaults of a ``generation_config.json``, by the name of the sampling parameter.

    Null counts as absent; ``max_new_tokens`` becomes ``max_tokens``; ``do_sample`` is not read, since a server samples
    by temperature.

    Raises:
        ModelError: a value is out of range; the message names the file, the field and the value.
    """
    defaults: dict[str, float | int] = {}
    for key, (kind, low, high) in _DEFAULTS.items():
        value = config.get(key)
        if value is None:
            continue
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or not low <= value <= high or (kind is int and value != int(value)):
            raise ModelError(f"{source} has {key} {value!r}; it must be a number from {low:g} to {high:g}")
        defaults["max_tokens" if key == "max_new_tokens" else key] = kind(value)
    return defaults


def defaults_from_gguf(metadata: Mapping[str, Any], source: str) -> dict[str, float | int]:
    """The sampling defaults in a GGUF file's metadata, by the name of the sampling parameter."""
    config = {name: metadata[key] for key, name in _GGUF_KEYS.items() if key in metadata}
    return defaults_from_generation_config(config, source)


def end_tokens_from_configs(configs: Mapping[str, Mapping[str, Any]]) -> tuple[int, ...]:
    """Ids of all end tokens named in any of the files, the first file's first, without repeats.

    Args:
        configs: parsed file by name.

    Raises:
        ModelError: an ``eos_token_id`` is not an id or a list of ids.
    """
    ids: dict[int, None] = {}
    for source, config in configs.items():
        value = config.get("eos_token_id")
        if value is None:
            continue
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ModelError(f"{source} has eos_token_id {value!r}; it must be a token id or a list of them")
            ids[token] = None
    return tuple(ids)


def end_tokens_from_gguf(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids of all end tokens of a GGUF file.

    The file names one end of text, and sometimes an end of turn and of message. Control tokens that are spelt like a
    well-known end mark are end tokens too: converters keep only one of the several that the model was published with.
    """
    ids: dict[int, None] = {}
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        value = metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(value, int) and not isinstance(value, bool):
            ids[value] = None
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if tokens is not None and kinds is not None:
        for token in (int(i) for i in (kinds == _CONTROL).nonzero()[0]):
            if token < len(tokens) and tokens[token] in _END_TEXTS:
                ids[token] = None
    return tuple(ids)

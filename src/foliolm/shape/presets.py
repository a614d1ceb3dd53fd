"""Models and devices by name, from the data files beside this module (each entry has its source and confidence)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from foliolm.core.errors import ConfigError
from foliolm.shape.device import Device, device_from_dict
from foliolm.shape.families import with_family_traits
from foliolm.shape.model import MLAShape, ModelShape, MoEShape


@dataclass(frozen=True, slots=True)
class ModelPreset:
    """A model's shape and where it comes from.

    Attributes:
        shape: the sizes.
        published_params: the count its hub page gives, or None where it was not checked.
        confidence: ``high`` where the shape's own count equals that number.
        source: where the values were read.
    """

    shape: ModelShape
    published_params: int | None
    confidence: str
    source: str


def model_preset(name: str) -> ModelPreset:
    """A model by its Hub id or that id's last part, in any case.

    Raises:
        ConfigError: no such preset; the nearest is suggested.
    """
    presets = _models()
    key = name.lower()
    if key in presets:
        return presets[key]
    raise ConfigError(_no_such("model", name, presets))


def device_preset(name: str) -> Device:
    """A device by its id, in any case.

    Raises:
        ConfigError: no such preset; the nearest is suggested.
    """
    devices = _devices()
    if name.lower() in devices:
        return devices[name.lower()]
    raise ConfigError(_no_such("device", name, devices))


def model_names() -> list[str]:
    """The presets' Hub ids."""
    return sorted({preset.shape.name for preset in _models().values()})


def device_names() -> list[str]:
    """The presets' ids."""
    return sorted(_devices())


def model_from_preset_entry(entry: dict[str, Any]) -> ModelShape:
    """Turn an entry of ``data/models.json`` into a shape."""
    pattern = entry["layer_types_pattern"]
    windowed = () if pattern == "all_full" else tuple(i for i, kind in enumerate(pattern) if kind == "S")
    family = entry["model_type"]
    dtype = entry["native_quantization"] or "bfloat16"
    shape = ModelShape(
        name=entry["id"],
        family=family,
        num_layers=entry["num_layers"],
        hidden_size=entry["hidden_size"],
        num_heads=entry["num_attention_heads"],
        num_kv_heads=entry["num_kv_heads"],
        head_dim=entry["head_dim"],
        intermediate_size=entry["intermediate_size"],
        vocab_size=entry["vocab_size"],
        max_position_embeddings=entry["max_position_embeddings"],
        tie_word_embeddings=entry["tie_word_embeddings"],
        qkv_bias=entry["attention_bias"],
        o_bias=entry["attention_bias"] and family == "gpt_oss",
        qk_norm=entry["qk_norm"],
        sliding_window=entry["sliding_window"],
        windowed_layers=windowed,
        moe=_moe(entry["moe"]) if entry["moe"] else None,
        mla=MLAShape(**entry["mla"]) if entry["mla"] else None,
        weight_dtype=dtype,
        weight_bits={"bfloat16": 16.0, "fp8": 8.0, "mxfp4": 4.25}[dtype],
    )
    return with_family_traits(shape)


def _moe(entry: dict[str, Any]) -> MoEShape:
    width = entry["moe_intermediate_size"]
    return MoEShape(
        num_experts=entry["num_experts"],
        experts_per_token=entry["experts_per_token"],
        intermediate_size=width,
        num_shared_experts=entry["num_shared_experts"],
        shared_intermediate_size=entry["num_shared_experts"] * width,
        first_dense_layers=entry["first_dense_layers"],
    )


@lru_cache(maxsize=1)
def _models() -> dict[str, ModelPreset]:
    presets: dict[str, ModelPreset] = {}
    for entry in _data("models.json"):
        preset = ModelPreset(
            model_from_preset_entry(entry), entry["published_params"], entry["confidence"], entry["source"]
        )
        presets[entry["id"].lower()] = preset
        presets[entry["id"].lower().split("/")[-1]] = preset
    return presets


@lru_cache(maxsize=1)
def _devices() -> dict[str, Device]:
    return {entry["id"].lower(): device_from_dict(entry, f"preset {entry['id']}") for entry in _data("devices.json")}


def _data(name: str) -> Any:
    return json.loads(resources.files("foliolm.shape").joinpath("data", name).read_text(encoding="utf-8"))


def _no_such(what: str, name: str, known: dict[str, Any]) -> str:
    import difflib  # only needed to word an error

    near = difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=0.5)
    if near:
        return f"{what} {name!r} is not a preset and not a file; did you mean {' or '.join(near)}?"
    short = sorted(key for key in known if "/" not in key)
    return f"{what} {name!r} is not a preset and not a file; presets: {', '.join(short)}"

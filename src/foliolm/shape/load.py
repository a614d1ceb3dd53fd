"""A model or a device from what a user names: a preset, a file or a folder."""

from __future__ import annotations

import json
from pathlib import Path

from foliolm.core.errors import ConfigError
from foliolm.shape.device import Device, device_from_file
from foliolm.shape.families import with_family_traits
from foliolm.shape.model import ModelShape
from foliolm.shape.presets import device_preset, model_preset
from foliolm.shape.probed import probed_device

THIS_MACHINE = "this-machine"


def load_model_shape(name: str) -> ModelShape:
    """A model's shape from a preset's name, a ``config.json`` or a folder that holds one.

    A GGUF file's header is not read here: that is the weights' room.

    Raises:
        ConfigError: no such preset or file, or the file is not JSON.
        ModelError: the file lacks a field, or a field is wrong.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ConfigError(f"model folder {name} has no config.json")
    if path.is_file():
        return _from_config(path)
    if path.suffix.lower() == ".json":
        raise ConfigError(f"model file {name} does not exist")
    return model_preset(name).shape


def load_device(name: str) -> Device:
    """A device from a preset's name, a JSON file, or ``this-machine``: what ``foliolm probe`` measured.

    Raises:
        ConfigError: no such preset or file, a wrong field, or this machine was not probed yet.
    """
    if name.lower() == THIS_MACHINE:
        return probed_device()
    path = Path(name).expanduser()
    if path.suffix.lower() == ".json" or path.is_file():
        return device_from_file(path)
    return device_preset(name)


def _from_config(path: Path) -> ModelShape:
    from foliolm.shape.hf_config import shape_from_config

    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"model file {path}: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model file {path} must hold one JSON object")
    return with_family_traits(shape_from_config(config, str(path.parent if path.name == "config.json" else path)))

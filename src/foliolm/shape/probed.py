"""Where a machine's measured device lies: ``foliolm probe`` writes it, the planner reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from foliolm.core.errors import ConfigError
from foliolm.shape.device import Device, device_from_file


def cache_home() -> Path:
    """FolioLM's folder of things fetched and measured: ``FOLIOLM_HOME``, else ``~/.cache/foliolm``."""
    home = os.environ.get("FOLIOLM_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "foliolm"


def probe_path() -> Path:
    """The file of this machine's measured device."""
    return cache_home() / "device.json"


def probed_device() -> Device:
    """This machine as it was measured.

    Raises:
        ConfigError: it was not measured yet, or the file is damaged.
    """
    path = probe_path()
    if not path.is_file():
        raise ConfigError(f"device this-machine is not measured yet ({path} does not exist); run: foliolm probe")
    return device_from_file(path)


def save_probed(device: Device) -> Path:
    """Write the measured device whole, never by halves; returns its path.

    Raises:
        ConfigError: the folder cannot be written.
    """
    path = probe_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".json.partial")
        draft.write_text(json.dumps(device.to_dict(), indent=1) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from None
    return path

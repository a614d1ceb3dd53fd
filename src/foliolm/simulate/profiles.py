"""Folders of measured kernel times: ``DEVICE/MODEL/VARIANT/tpN/*.csv``."""

from __future__ import annotations

import re
from pathlib import Path

from foliolm.core.errors import ConfigError
from foliolm.ledger.kernel_tables import KernelTables, read_kernel_tables
from foliolm.shape.load import load_device
from foliolm.shape.model import ModelShape
from foliolm.shape.presets import device_names

DEVICES = {
    "rtxpro6000": "rtx-pro-6000-server",
    "a100": "a100-80g-sxm",
    "h100": "h100-sxm",
    "h200": "h200-sxm",
    "b200": "b200-sxm",
}
"""Folders' names, letters and digits alone, of devices that have a longer id: the one meant where no more is said."""
_SAYS_NOTHING = ("nvidia", "amd", "geforce", "tesla", "instinct")
_MEMORY = re.compile(r"(\d+)gb?$")


def device_of_folder(name: str) -> str | None:
    """The preset device that a folder is named after, or None: ``H100``, ``A100-SXM4-80GB``, ``NVIDIA_L40S``.

    Where a name says chip, socket or memory, the device must have them; of several that do, the one in ``DEVICES``,
    else the only one.
    """
    plain = _plain(name)
    by_name = {_plain(device): device for device in device_names()}
    known = DEVICES.get(plain) or by_name.get(plain)
    if known is not None:
        return known
    words = {word for word in re.split(r"[^a-z0-9]+", name.lower()) if word and word not in _SAYS_NOTHING}
    words = {re.sub(r"^sxm\d$", "sxm", word) for word in words if not re.fullmatch(r"hbm\d?e?", word)}
    memory = {int(found[1]) for word in words if (found := _MEMORY.match(word))}
    words = {word for word in words if not _MEMORY.match(word)}
    fitting = [device for device in device_names() if words and words <= set(device.split("-"))]
    if memory:
        fitting = [device for device in fitting if {round(load_device(device).memory_gb)} == memory]
    usual = [device for device in fitting if device in DEVICES.values()]
    found_devices = usual if len(usual) == 1 else fitting
    return found_devices[0] if len(found_devices) == 1 else None


def find_profile(folder: Path, device: str, shape: ModelShape, tensor_parallel_size: int) -> KernelTables:
    """The tables of a device, a model and a degree of tensor parallelism.

    Args:
        folder: of all profiles.
        device: a preset's id, or a folder's own name.
        shape: the model; its name is that of its folder, with or without the organisation's.
        tensor_parallel_size: devices that share the model.

    Raises:
        ConfigError: there is none; the message lists those that there are.
    """
    if not folder.is_dir():
        raise ConfigError(f"--kernels {folder}: there is no such folder")
    known = sorted(path.parent for path in folder.rglob("dense.csv"))
    wanted = _plain(shape.name.split("/")[-1])
    for path in known:
        parts = path.relative_to(folder).parts
        if len(parts) < 4:
            continue
        hardware, model, parallel = parts[0], parts[-3], parts[-1]
        right_device = device in (hardware, device_of_folder(hardware))
        if right_device and _same_model(_plain(model), wanted) and parallel == f"tp{tensor_parallel_size}":
            return read_kernel_tables(path)
    listed = ", ".join(str(path.relative_to(folder)) for path in known) or "none"
    raise ConfigError(
        f"--kernels {folder} has no profile of {shape.name} on {device} with tensor parallelism "
        f"{tensor_parallel_size}; it has {listed}"
    )


def _same_model(folder: str, wanted: str) -> bool:
    """Releases of one shape have names that begin alike: Qwen3-30B-A3B and Qwen3-30B-A3B-Instruct-2507."""
    return folder == wanted or folder.startswith(f"{wanted}instruct") or wanted.startswith(f"{folder}instruct")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())

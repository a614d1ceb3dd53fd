"""What a device is: its memory, its bandwidth, and its rates by number type."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from foliolm.core.errors import ConfigError

GIGA = 1e9
TERA = 1e12


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one machine's CPU. Rates are dense peaks, or measured where ``confidence`` says so.

    Attributes:
        id, name: short and long.
        kind: ``gpu``, ``cpu`` or ``unified`` (a GPU that shares the host's memory).
        memory_gb: memory in units of 2^30 bytes, as sold.
        memory_reported_mib: what the driver reports, in MiB, where known; it beats ``memory_gb``.
        bandwidth_gbps: memory read bandwidth, 1e9 bytes a second.
        bf16_tflops_dense, fp16_tflops_dense, fp32_tflops, fp8_tflops_dense, int8_tops_dense, fp4_tflops_dense: 1e12
            operations a second; None where the device has no such arithmetic or it is not known.
        host_link_gbps_one_way: to host memory, 1e9 bytes a second; None: memory is the host's, or unknown.
        peer_link_gbps_one_way: to another such device.
        sm: CUDA compute capability times ten.
        tdp_w: watts.
        confidence: ``high``, ``medium``, ``low`` or ``measured``.
        source: where the numbers come from.
        host_link_note: about ``host_link_gbps_one_way``.
    """

    id: str
    name: str
    memory_gb: float
    bandwidth_gbps: float
    bf16_tflops_dense: float | None = None
    kind: str = "gpu"
    memory_reported_mib: float | None = None
    fp16_tflops_dense: float | None = None
    fp32_tflops: float | None = None
    fp8_tflops_dense: float | None = None
    int8_tops_dense: float | None = None
    fp4_tflops_dense: float | None = None
    host_link_gbps_one_way: float | None = None
    peer_link_gbps_one_way: float | None = None
    sm: int | None = None
    tdp_w: float | None = None
    confidence: str = "low"
    source: str = ""
    host_link_note: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("gpu", "cpu", "unified"):
            raise ConfigError(f"device {self.id}: kind is {self.kind!r}; it must be gpu, cpu or unified")
        for name in ("memory_gb", "bandwidth_gbps"):
            _positive(self.id, name, getattr(self, name))
        for name in _OPTIONAL_RATES:
            if getattr(self, name) is not None:
                _positive(self.id, name, getattr(self, name))
        if all(getattr(self, name) is None for name in ("bf16_tflops_dense", "fp16_tflops_dense", "fp32_tflops")):
            raise ConfigError(f"device {self.id}: it needs bf16_tflops_dense, fp16_tflops_dense or fp32_tflops")

    @property
    def memory_bytes(self) -> int:
        """Bytes: ``memory_reported_mib · 2^20`` where known, else ``memory_gb · 2^30``."""
        if self.memory_reported_mib is not None:
            return int(self.memory_reported_mib * 2**20)
        return int(self.memory_gb * 2**30)

    @property
    def bandwidth(self) -> float:
        """Read bandwidth, bytes a second."""
        return self.bandwidth_gbps * GIGA

    @property
    def host_link(self) -> float | None:
        """Bytes a second to host memory, one way; None where there is no link."""
        return None if self.host_link_gbps_one_way is None else self.host_link_gbps_one_way * GIGA

    @property
    def peer_link(self) -> float | None:
        """Bytes a second to another such device, one way; None where there is no link."""
        return None if self.peer_link_gbps_one_way is None else self.peer_link_gbps_one_way * GIGA

    def flops(self, compute: str = "bf16") -> float:
        """Peak operations a second in ``bf16``, ``fp8``, ``int8`` or ``fp32``.

        A type that the device does not have (or whose rate is not known) runs as 16-bit, and 16-bit as float32 where
        that is faster: a CPU without 16-bit arithmetic widens first.
        """
        sixteen = max(self.bf16_tflops_dense or self.fp16_tflops_dense or 0.0, self.fp32_tflops or 0.0)
        rate = {
            "bf16": sixteen,
            "fp8": self.fp8_tflops_dense or sixteen,
            "int8": self.int8_tops_dense or sixteen,
            "fp32": self.fp32_tflops or sixteen,
        }[compute]
        return rate * TERA

    def to_dict(self) -> dict[str, Any]:
        """The device as its JSON file holds it."""
        return asdict(self)


_OPTIONAL_RATES = (
    "memory_reported_mib",
    "bf16_tflops_dense",
    "fp16_tflops_dense",
    "fp32_tflops",
    "fp8_tflops_dense",
    "int8_tops_dense",
    "fp4_tflops_dense",
    "host_link_gbps_one_way",
    "peer_link_gbps_one_way",
    "tdp_w",
)


def device_from_dict(entry: dict[str, Any], where: str = "device") -> Device:
    """Build a device from the fields of a JSON file (those of `Device`).

    Raises:
        ConfigError: a field is missing, unknown or out of range; the message names it and ``where``.
    """
    names = {field.name for field in fields(Device)}
    extra = sorted(set(entry) - names)
    if extra:
        raise ConfigError(f"{where}: unknown field {extra[0]!r}; known: {', '.join(sorted(names))}")
    for name in ("id", "memory_gb", "bandwidth_gbps"):
        if entry.get(name) is None:
            raise ConfigError(f"{where}: field {name!r} is missing")
    for name in ("id", "name", "kind", "confidence", "source", "host_link_note"):
        if not isinstance(entry.get(name, ""), str):
            raise ConfigError(f"{where}: {name} is {entry[name]!r}; it must be a string")
    return Device(**{"name": entry["id"], **entry})


def device_from_file(path: Path) -> Device:
    """Read a device from a JSON file.

    Raises:
        ConfigError: the file cannot be read, is not JSON, or a field is wrong.
    """
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"device file {path}: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"device file {path} is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ConfigError(f"device file {path} must hold one JSON object")
    return device_from_dict(entry, str(path))


def _positive(device: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"device {device}: {name} is {value!r}; it must be a finite number above 0")

"""How many KV blocks fit: weights + activations + reserve + KV = limit, spelled out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from foliolm.core.errors import ConfigError
from foliolm.executor.torch.grouping import BUFFER_BYTES
from foliolm.executor.torch.kv_tensors import device_kv_specs
from foliolm.model.decoder import Model

CPU_KV_BYTES = 4 << 30
"""Most that the pool takes on a CPU unless the user says otherwise."""
CPU_KV_SHARE = 4
"""The pool takes at most one part in so many of the memory that is there."""
SWAP_BYTES = 4 << 30
"""Most host memory for KV that gives way unless the user says otherwise."""
CPU_SWAP_SHARE = 8
"""On a CPU, where the host's memory is the device's, it is at most one part in so many of what is there."""
CUDA_SLACK = 256 << 20
"""Left to the device's libraries and to fragmentation."""


@dataclass(frozen=True, slots=True)
class MemorySum:
    """Bytes of a device, by what they are for; the parts sum to ``limit``.

    Attributes:
        device: ``cpu`` or ``cuda``.
        weights: all weights, laid out.
        activations: of the largest step.
        reserve: what the engine leaves alone.
        kv: the KV pool.
        limit: what the engine may use in all.
        num_blocks: KV blocks a group, the null block included.
        block_size: tokens a block.
        bytes_per_token: KV bytes a token, all groups together.
        max_model_len: longest request, tokens.
        reason: where the size of the pool comes from.
    """

    device: str
    weights: int
    activations: int
    reserve: int
    kv: int
    limit: int
    num_blocks: int
    block_size: int
    bytes_per_token: int
    max_model_len: int
    reason: str

    @property
    def num_tokens(self) -> int:
        """Tokens that requests can keep."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def num_full_requests(self) -> float:
        """Requests of ``max_model_len`` that fit at once."""
        needed = -(-self.max_model_len // self.block_size)
        return (self.num_blocks - 1) / needed

    def describe(self) -> str:
        """The sum, and what it holds, for people."""
        parts = " + ".join(
            f"{name} {_size(getattr(self, name))}" for name in ("weights", "activations", "reserve", "kv")
        )
        return (
            f"memory ({self.device}): {parts} = {_size(self.limit)}\n"
            f"KV pool: {self.num_blocks - 1} blocks of {self.block_size} tokens = {self.num_tokens} tokens "
            f"({self.bytes_per_token} bytes each), {self.num_full_requests:.1f} requests of {self.max_model_len} "
            f"({self.reason})"
        )


def size_kv_pool(
    model: Model,
    *,
    block_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    kv_cache_memory_bytes: int | None = None,
    num_gpu_blocks_override: int | None = None,
    gpu_memory_utilization: float = 0.9,
) -> MemorySum:
    """Size the pool for a loaded model.

    Args:
        model: loaded, so that what is left is known.
        block_size: tokens a block.
        max_model_len: longest request, tokens.
        max_num_batched_tokens, max_num_seqs: the largest step's.
        kv_cache_memory_bytes: bytes of the pool; None: derived.
        num_gpu_blocks_override: usable blocks a group, whatever the memory says.
        gpu_memory_utilization: share of a CUDA device's memory that is the limit.

    Raises:
        ConfigError: one request of ``max_model_len`` does not fit (names the longest that would), or the pool asked
            for exceeds the memory that is there.
    """
    specs = device_kv_specs(model.shape, model.kv_dtype)
    per_token = sum(spec.bytes_per_token for spec in specs)
    per_block = per_token * block_size
    weights = model.weight_bytes
    activations = activation_bytes(model, max_num_batched_tokens, max_num_seqs)
    if model.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(model.device)
        limit = int(total * gpu_memory_utilization)
        used_by_others = total - free - torch.cuda.memory_reserved(model.device)
        reserve = used_by_others + CUDA_SLACK
        room = limit - weights - activations - reserve
        kv, reason = room, f"{gpu_memory_utilization:.0%} of the device less everything else"
    else:
        free = available_memory()
        limit = weights + free
        room = free - activations
        kv = min(CPU_KV_BYTES, free // CPU_KV_SHARE)
        reason = f"the smaller of {_size(CPU_KV_BYTES)} and a quarter of the {_size(free)} available"
    if num_gpu_blocks_override is not None:
        kv, reason = (num_gpu_blocks_override + 1) * per_block, "by --num-gpu-blocks-override"
    elif kv_cache_memory_bytes is not None:
        kv, reason = kv_cache_memory_bytes, "by --kv-cache-memory-bytes"
    num_blocks = max(0, kv) // per_block
    kv = num_blocks * per_block
    longest = max(0, num_blocks - 1) * block_size
    if longest < max_model_len:
        raise ConfigError(
            f"the KV pool of {_size(kv)} ({reason}) holds {longest} tokens of {per_token} bytes, fewer than one "
            f"request of --max-model-len {max_model_len}; the largest that fits is {longest}"
        )
    if kv > room:
        raise ConfigError(
            f"the KV pool of {_size(kv)} ({reason}) exceeds the {_size(max(0, room))} that weights {_size(weights)} "
            f"and activations {_size(activations)} leave of {_size(limit)}"
        )
    return MemorySum(
        device=model.device.type,
        weights=weights,
        activations=activations,
        reserve=limit - weights - activations - kv,
        kv=kv,
        limit=limit,
        num_blocks=num_blocks,
        block_size=block_size,
        bytes_per_token=per_token,
        max_model_len=max_model_len,
        reason=reason,
    )


def size_host_pool(memory: MemorySum, swap_space: float | None) -> tuple[int, str]:
    """Slots of the host pool, and a sentence about it.

    Args:
        memory: the device's; the pool is never larger than the KV pool unless the user says so.
        swap_space: GiB, as the user said; None: derived.

    Raises:
        ConfigError: more is asked for than the host has.
    """
    free = available_memory() - (memory.kv if memory.device == "cpu" else 0)
    if swap_space is not None:
        size = int(swap_space * 2**30)
        if size > free:
            raise ConfigError(
                f"--swap-space is {swap_space:g} GiB; the host has {_size(max(0, free))} of memory to spare for it"
            )
        reason = "by --swap-space"
    else:
        size = min(SWAP_BYTES, memory.kv)
        reason = f"the smaller of {_size(SWAP_BYTES)} and the KV pool"
        if memory.device == "cpu" and free // CPU_SWAP_SHARE < size:
            size = max(0, free // CPU_SWAP_SHARE)
            reason = "an eighth of the memory available"
    slots = size // (memory.bytes_per_token * memory.block_size)
    return slots, f"host pool: {slots} blocks for KV that gives way, {_size(size)} ({reason})"


def activation_bytes(model: Model, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Bytes of temporary tensors in the largest step: the widest point of a layer, attention's scratch, the logits.

    A layer at its widest holds the residual stream and a norm (3 hidden), and queries, keys and values twice (before
    and after rotation) or gate, up and their product; sampling holds up to six float32 copies of the logits.
    """
    shape, size = model.shape, model.dtype.itemsize
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    widest = 3 * shape.hidden_size + max(2 * qkv + shape.num_heads * shape.head_dim, 3 * shape.intermediate_size)
    scratch = 0 if model.device.type == "cuda" else 3 * BUFFER_BYTES
    return max_num_batched_tokens * widest * size + 6 * max_num_seqs * model.num_tokens * 4 + scratch


def available_memory() -> int:
    """Bytes that this process may still take: the system's available memory, within the cgroup's limit (v1, v2)."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    rooms = [available]
    for limit, usage, stat in _cgroup_files():
        room = _cgroup_room(limit, usage, stat)
        if room is not None:
            rooms.append(room)
    return max(0, min(rooms))


def _cgroup_files() -> list[tuple[Path, Path, Path]]:
    """(limit, usage, stat) of this process's cgroup and those around it: the tightest counts."""
    root = Path("/sys/fs/cgroup")
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = base / path.lstrip("/")
        # Inside a container the path may be the host's, and only the mount's root is there.
        for place in (folder, *folder.parents):
            if place == base or base in place.parents:
                found.append((place / names[0], place / names[1], place / "memory.stat"))
    return found


def _cgroup_room(limit: Path, usage: Path, stat: Path) -> int | None:
    """Bytes below a limit, page cache that can be dropped counted as free; None where there is no limit."""
    try:
        written = limit.read_text().strip()
        used = int(usage.read_text())
    except (OSError, ValueError):
        return None
    if written == "max" or int(written) >= 1 << 60:
        return None
    inactive = 0
    try:
        for line in stat.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                inactive = max(inactive, int(value))
    except (OSError, ValueError):
        inactive = 0
    return int(written) - max(0, used - inactive)


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"

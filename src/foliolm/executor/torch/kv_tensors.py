"""The KV pool's memory, and the moves of whole blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from foliolm.core.kvspec import KVSpec
from foliolm.core.plan import BlockCopy, BlockSwap
from foliolm.model.layer import LayerKV
from foliolm.model.loader import layer_groups
from foliolm.ops.memory import reserve
from foliolm.shape.kv_specs import kv_specs
from foliolm.shape.model import ModelShape

Move = TypeVar("Move", BlockCopy, BlockSwap)
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.int8: "int8"}
SCALE_BYTES = 4
"""Of the float32 scale that follows each head's int8 values."""
TOUCHED_BYTES = 512 << 20
"""Of the pool, what a CPU's system gives at the start: later, a big page may take milliseconds in a virtual machine."""


def device_kv_specs(shape: ModelShape, dtype: torch.dtype) -> tuple[KVSpec, ...]:
    """The KV groups of a model whose cache has ``dtype``."""
    return kv_specs(shape, DTYPE_NAMES[dtype])


class KVTensors:
    """Keys and values of every block: a group each, [layers, 2, blocks, p, kv heads, D].

    A block of a layer is contiguous, so that gathers, copies and swaps move long runs. Block 0 is the null block: it is
    never written, and stays zero.

    Args:
        shape: the model's.
        dtype: of keys and values.
        device: where they lie.
        num_blocks: blocks a group, the null block included.
        block_size: tokens a block.
        num_host_blocks: blocks a group in host memory that swaps may use.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
    ) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError(
                f"a KV pool of {num_blocks} blocks of {block_size} tokens holds nothing but the null block"
            )
        self.specs = device_kv_specs(shape, dtype)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._host_blocks = num_host_blocks
        # int8 rows carry their scale, so that a block moves as a whole.
        row = shape.head_dim + (SCALE_BYTES if dtype == torch.int8 else 0)
        block = (block_size, shape.num_kv_heads, row)
        self._groups = [
            _zeros((spec.num_layers, 2, num_blocks, *block), dtype, device, big_pages=True) for spec in self.specs
        ]
        for group in self._groups:
            _touch(group, TOUCHED_BYTES // len(self._groups))
        # Memory that the device's copy engine reads without a copy in between.
        pinned = device.type == "cuda"
        self._host = [
            _host_zeros((spec.num_layers, 2, num_host_blocks, *block), dtype, pinned)
            for spec in (self.specs if num_host_blocks else ())
        ]
        self.layers = self._by_layer(layer_groups(shape))

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(group.nbytes for group in self._groups)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks within the device; all sources are read before any target is written."""
        for group, moves in _by_group(copies):
            blocks = self._groups[group]
            sources = torch.tensor([move.source for move in moves], device=blocks.device)
            targets = torch.tensor([move.target for move in moves], device=blocks.device)
            blocks.index_copy_(2, targets, blocks.index_select(2, sources))

    def swap_out(self, swaps: Sequence[BlockSwap]) -> None:
        """Device to host.

        Raises:
            ValueError: there is no host pool, or it is smaller than a block id asks for.
        """
        self._swap(swaps, out=True)

    def swap_in(self, swaps: Sequence[BlockSwap]) -> None:
        """Host to device.

        Raises:
            ValueError: as ``swap_out``.
        """
        self._swap(swaps, out=False)

    def _swap(self, swaps: Sequence[BlockSwap], out: bool) -> None:
        if not swaps:
            return
        highest = max(swap.host_block for swap in swaps)
        if highest >= self._host_blocks:
            raise ValueError(f"host block {highest} is asked for; the host pool has {self._host_blocks} blocks a group")
        for group, moves in _by_group(swaps):
            device, host = self._groups[group], self._host[group]
            on_device = torch.tensor([move.device_block for move in moves], device=device.device)
            on_host = torch.tensor([move.host_block for move in moves])
            if out:
                host.index_copy_(2, on_host, device.index_select(2, on_device).to(host.device))
            else:
                device.index_copy_(2, on_device, host.index_select(2, on_host).to(device.device))

    def _by_layer(self, groups: tuple[int, ...]) -> list[LayerKV]:
        used = [0] * len(self._groups)
        layers = []
        for group in groups:
            keys, values = self._groups[group][used[group]]
            layers.append(LayerKV(keys, values))
            used[group] += 1
        return layers


def _by_group(moves: Sequence[Move]) -> list[tuple[int, list[Move]]]:
    groups: dict[int, list[Move]] = {}
    for move in moves:
        groups.setdefault(move.group, []).append(move)
    return list(groups.items())


def _host_zeros(shape: tuple[int, ...], dtype: torch.dtype, pinned: bool) -> Tensor:
    return torch.zeros(shape, dtype=dtype, pin_memory=True) if pinned else _zeros(shape, dtype, torch.device("cpu"))


def _touch(blocks: Tensor, nbytes: int) -> None:
    """Have the system give the memory of the first blocks [layers, 2, blocks, ...] now, in all up to ``nbytes``."""
    if blocks.device.type == "cpu":
        blocks[:, :, : nbytes * blocks.shape[2] // max(1, blocks.nbytes)].zero_()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, big_pages: bool = False) -> Tensor:
    """Zeros; on the CPU memory that the system gives as it is touched."""
    count = math.prod(shape)
    if device.type != "cpu" or not count:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = reserve(count * dtype.itemsize, big_pages)
    return torch.frombuffer(memory, dtype=dtype).view(shape)

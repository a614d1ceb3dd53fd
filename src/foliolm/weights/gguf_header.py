"""The head of a GGUF file: metadata and the table of tensors, read in bounds.

Nothing in the file is believed before it is checked against the file's size, so that a truncated or hostile file costs
neither time nor memory: counts and lengths are bounded by the bytes that are left, and every tensor must lie within the
file before a byte of it is read.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foliolm.core.errors import ModelError
from foliolm.weights.gguf_types import TYPES, GGUFType
from foliolm.weights.pointer import check_not_pointer

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING = 8
_ARRAY = 9
_LEAST_PAIR_BYTES = 8 + 1 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor as the file names it.

    Attributes:
        name: ggml's name (``blk.0.attn_q.weight``).
        kind: its type.
        shape: slowest dimension first, as NumPy and PyTorch count (the file has them the other way round).
        path, offset, num_bytes: where its bytes lie.
    """

    name: str
    kind: GGUFType
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What one file says of itself.

    Attributes:
        path: the file.
        metadata: by key; arrays of strings are lists, arrays of numbers are NumPy arrays.
        tensors: by name.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_header(path: Path) -> GGUFHeader:
    """Read and check a file's head.

    Raises:
        ModelError: the file is no GGUF, of an unsupported version, truncated (both sizes are named), or contradicts
            itself.
    """
    size = path.stat().st_size
    check_not_pointer(path)
    if size < 24:
        raise ModelError(f"{path} is truncated: a GGUF file has at least 24 bytes, this one has {size}")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return _Parser(path, view, size).parse()


class _Parser:
    """Walks over the file's bytes; ``at`` is where it stands."""

    def __init__(self, path: Path, view: mmap.mmap, size: int) -> None:
        self.path = path
        self.view = view
        self.size = size
        self.at = 0

    def parse(self) -> GGUFHeader:
        self._magic()
        num_tensors, num_pairs = self._scalar("<Q"), self._scalar("<Q")
        self._bound(num_pairs, _LEAST_PAIR_BYTES, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string("a metadata key")
            if key in metadata:
                raise self._broken(f"the metadata key {key!r} occurs twice")
            metadata[key] = self._value(self._scalar("<I"), key)
        self._bound(num_tensors, _LEAST_TENSOR_BYTES, "tensors")
        rows = [self._tensor_row() for _ in range(num_tensors)]
        return GGUFHeader(self.path, metadata, self._place(rows, metadata))

    def _magic(self) -> None:
        magic = self.view[:4]
        if magic != MAGIC:
            raise ModelError(
                f"{self.path} is not a GGUF file: it begins with {magic!r} instead of {MAGIC!r} (bad magic)"
            )
        self.at = 4
        version = self._scalar("<I")
        if version in (2 << 24, 3 << 24):
            raise self._broken("it is big-endian; only little-endian files are supported")
        if version not in (2, 3):
            raise self._broken(f"its version is {version}; versions 2 and 3 are supported")

    def _tensor_row(self) -> tuple[str, GGUFType, tuple[int, ...], int]:
        name = self._string("a tensor's name")
        num_dims = self._scalar("<I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._broken(f"tensor {name!r} has {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
        dims = tuple(self._scalar("<Q") for _ in range(num_dims))
        code, offset = self._scalar("<I"), self._scalar("<Q")
        kind = TYPES.get(code)
        if kind is None:
            raise self._broken(f"tensor {name!r} has type {code}, which is not known")
        if not all(dims) or dims[0] % kind.block_weights:
            raise self._broken(
                f"tensor {name!r} has dimensions {dims}; a row of {kind.name} is a multiple of {kind.block_weights}"
            )
        return name, kind, dims[::-1], offset

    def _place(
        self, rows: list[tuple[str, GGUFType, tuple[int, ...], int]], metadata: dict[str, Any]
    ) -> dict[str, GGUFTensor]:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._broken(f"general.alignment is {alignment!r}; it must be a power of two")
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        needed = self.at
        for name, kind, shape, offset in rows:
            if name in tensors:
                raise self._broken(f"the tensor {name!r} occurs twice")
            if offset % alignment:
                raise self._broken(f"tensor {name!r} lies at offset {offset}, not a multiple of {alignment}")
            weights = 1
            for dim in shape:
                weights *= dim
            num_bytes = weights // kind.block_weights * kind.block_bytes
            tensors[name] = GGUFTensor(name, kind, shape, self.path, start + offset, num_bytes)
            needed = max(needed, start + offset + num_bytes)
        if needed > self.size:
            raise ModelError(f"{self.path} is truncated: its tensors need {needed:,} bytes, the file has {self.size:,}")
        return tensors

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        code = _SCALARS.get(kind)
        if code is None:
            raise self._broken(f"metadata {key!r} has value type {kind}, which is not known")
        return self._scalar(code)

    def _array(self, key: str) -> list[str] | np.ndarray:
        kind, count = self._scalar("<I"), self._scalar("<Q")
        if kind == _STRING:
            self._bound(count, 8, f"strings in {key!r}")
            return [self._string(key) for _ in range(count)]
        code = _SCALARS.get(kind)
        if code is None:
            raise self._broken(f"metadata {key!r} is an array of value type {kind}, which is not supported")
        width = struct.calcsize(code)
        self._bound(count, width, f"values in {key!r}")
        begin, self.at = self.at, self.at + count * width
        return np.frombuffer(self.view[begin : self.at], dtype=np.dtype(code))

    def _string(self, what: str) -> str:
        length = self._scalar("<Q")
        if length > self.size - self.at:
            raise self._short(self.at + length, what)
        begin, self.at = self.at, self.at + length
        try:
            return self.view[begin : self.at].decode("utf-8")
        except UnicodeDecodeError:
            raise self._broken(f"{what} is not UTF-8") from None

    def _scalar(self, code: str) -> Any:
        width = struct.calcsize(code)
        if self.at + width > self.size:
            raise self._short(self.at + width, "its header")
        (value,) = struct.unpack_from(code, self.view, self.at)
        self.at += width
        return value

    def _bound(self, count: int, least_bytes: int, what: str) -> None:
        """Refuse a count that the rest of the file could not hold, before anything is allocated for it."""
        if count * least_bytes > self.size - self.at:
            raise ModelError(
                f"{self.path} is truncated or damaged: it announces {count:,} {what}, which need at least "
                f"{self.at + count * least_bytes:,} bytes; the file has {self.size:,}"
            )

    def _short(self, needed: int, what: str) -> ModelError:
        return ModelError(
            f"{self.path} is truncated or damaged: {what} needs at least {needed:,} bytes, the file has {self.size:,}"
        )

    def _broken(self, reason: str) -> ModelError:
        return ModelError(f"{self.path} cannot be used: {reason}")

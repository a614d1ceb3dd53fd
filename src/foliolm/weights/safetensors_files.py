"""Single and sharded safetensors checkpoints."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foliolm.core.errors import ModelError
from foliolm.weights.jsonfile import read_json
from foliolm.weights.pointer import check_not_pointer

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000

_DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
FLOAT_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's place: file, element type as the file names it, shape, bytes."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint, by name, from the headers of all its files.

    Raises:
        ModelError: there are no safetensors files, one is missing, truncated or damaged, or the index contradicts them.
    """
    index = folder / INDEX_NAME
    if index.exists():
        return _by_index(index)
    tensors: dict[str, StoredTensor] = {}
    for path in _files(folder):
        for name, tensor in read_header(path).items():
            if name in tensors:
                raise ModelError(f"{path} holds the tensor {name}, and so does {tensors[name].path}")
            tensors[name] = tensor
    return tensors


def _by_index(index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelError(f"{index} has no weight_map from tensor names to file names")
    shards: dict[str, dict[str, StoredTensor]] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise ModelError(f"{index} names the file {file!r}; only files beside it are read")
        if not (index.parent / file).exists():
            raise ModelError(f"{index.parent / file} is missing: {index.name} names it")
        shards[file] = read_header(index.parent / file)
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise ModelError(f"{index.parent / file} does not hold the tensor {name}, although {index.name} says so")
    return {name: shards[file][name] for name, file in weight_map.items()}


def _files(folder: Path) -> list[Path]:
    """The files of a checkpoint without an index: ``model.safetensors``, a whole set of shards, or the only file."""
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    found = sorted(
        path for path in folder.glob("*.safetensors") if not path.name.startswith(("consolidated", "adapter"))
    )
    shards = [match for path in found if (match := _SHARD.fullmatch(path.name))]
    if shards:
        stem, count = shards[0]["stem"], shards[0]["count"]
        paths = [folder / f"{stem}-{number:05d}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
        for path in paths:
            if not path.exists():
                raise ModelError(f"{path} is missing: the checkpoint has {int(count)} files")
        return paths
    if len(found) == 1:
        return found
    if found:
        raise ModelError(
            f"{folder} holds {len(found)} safetensors files and no {INDEX_NAME} that says how they belong together"
        )
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise ModelError(
            f"{folder} holds pickled weights only (*.bin, *.pth), which can run code; convert them to safetensors"
        )
    raise ModelError(f"{folder} holds no *.safetensors and no *.gguf file")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, after checking that the file is whole.

    Raises:
        ModelError: it is a pointer, truncated (both sizes are named), or damaged.
    """
    check_not_pointer(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if len(head) < 8:
            raise ModelError(f"{path} is truncated: a safetensors file has at least 8 bytes, this one has {size}")
        (length,) = struct.unpack("<Q", head)
        if length > MAX_HEADER_BYTES:
            raise ModelError(
                f"{path} is not a safetensors file: its header would take {length:,} bytes (limit {MAX_HEADER_BYTES:,})"
            )
        if 8 + length > size:
            raise ModelError(f"{path} is truncated: its header alone needs {8 + length:,} bytes, the file has {size:,}")
        raw = file.read(length)
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise ModelError(f"{path} is not a safetensors file: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path} is not a safetensors file: its header is not an object")
    header.pop("__metadata__", None)
    return _check(path, header, size, 8 + length)


def _check(path: Path, header: dict[str, Any], size: int, start: int) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    needed = start
    for name, entry in header.items():
        try:
            dtype, dims, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            weights = 1
            for dim in dims:
                if not isinstance(dim, int) or dim < 0:
                    raise ValueError(f"shape {list(dims)}")
                weights *= dim
            if dtype not in _DTYPE_BYTES or not 0 <= begin <= end:
                raise ValueError(f"dtype {dtype!r}, offsets {begin} to {end}")
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{path} is damaged: its header's entry for {name} cannot be read ({error})") from None
        num_bytes = weights * _DTYPE_BYTES[dtype]
        if end - begin != num_bytes:
            raise ModelError(
                f"{path} is damaged: tensor {name} of {dtype} {list(dims)} takes {num_bytes:,} bytes, "
                f"its header gives it {end - begin:,}"
            )
        tensors[name] = StoredTensor(path, dtype, dims, end - begin)
        needed = max(needed, start + end)
    if needed > size:
        raise ModelError(f"{path} is truncated: its tensors need {needed:,} bytes, the file has {size:,}")
    return tensors


def iter_tensors(tensors: dict[str, StoredTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Read tensors one at a time, file by file, as stored (float32, float16 or bfloat16)."""
    from safetensors import safe_open

    by_file: dict[Path, list[str]] = {}
    for name, tensor in tensors.items():
        by_file.setdefault(tensor.path, []).append(name)
    for path, names in by_file.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                yield name, file.get_tensor(name)

"""GGUF checkpoints: one file or a split set, with canonical names and float tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foliolm.core.errors import ModelError
from foliolm.shape.gguf_config import shape_from_gguf
from foliolm.shape.model import ModelShape
from foliolm.weights.gguf_header import GGUFHeader, GGUFTensor, read_header
from foliolm.weights.layout import EMBEDDING, FINAL_NORM, HEAD

if TYPE_CHECKING:
    import torch

_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FREQS = "rope_freqs.weight"

_PERMUTED_ARCHITECTURES = ("llama", "mistral")


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor in its stored type.

    Attributes:
        type_name: ggml's name (``Q4_1``, ``F32``, …).
        shape: in weights, slowest dimension first.
        rows: uint8, ``[shape[0], bytes a row]`` (``[1, bytes]`` for a vector); rows of Q and K stand in Hugging Face's
            order. Read-only, and for most tensors a view of the file.
    """

    type_name: str
    shape: tuple[int, ...]
    rows: np.ndarray


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """A whole GGUF model, headers read, data on disk.

    Attributes:
        metadata: of the first file.
        tensors: canonical Hugging Face name → the tensor in its file; ggml's name where there is no canonical one.
        shape: the model's shape.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    shape: ModelShape

    def raw(self, name: str) -> RawTensor:
        """A tensor as stored, by canonical name.

        Raises:
            ModelError: there is none of that name.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.shape.name} has no tensor {name}")
        data = np.memmap(tensor.path, dtype=np.uint8, mode="r", offset=tensor.offset, shape=(tensor.num_bytes,))
        rows: np.ndarray = data.reshape(1 if len(tensor.shape) == 1 else tensor.shape[0], -1)
        heads = self._permuted_heads(name)
        if heads is None:
            return RawTensor(tensor.kind.name, tensor.shape, rows)
        order = _original_order(tensor.shape[0], heads)
        if len(tensor.shape) == 1:
            width = tensor.num_bytes // tensor.shape[0]
            return RawTensor(tensor.kind.name, tensor.shape, rows.reshape(-1, width)[order].reshape(1, -1))
        return RawTensor(tensor.kind.name, tensor.shape, rows[order])

    def floats(self, name: str) -> np.ndarray:
        """A tensor as float32 of its shape, by canonical name, in memory of its own.

        Raises:
            ModelError: there is none of that name, or its type is not one that can be turned into floats.
        """
        from gguf.quants import dequantize

        raw = self.raw(name)
        kind = self.tensors[name].kind
        if not kind.readable:
            raise ModelError(f"{self.shape.name}: tensor {name} is stored as {kind.name}, which is not supported")
        if kind.name == "F32":
            return np.array(raw.rows).view(np.float32).reshape(raw.shape)
        values: np.ndarray = dequantize(raw.rows, _ggml_type(kind.code))
        return values.reshape(raw.shape)

    def iter_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every canonical tensor as float32, one at a time."""
        import torch

        for name in self.tensors:
            if name != ROPE_FREQS:
                yield name, torch.from_numpy(self.floats(name))

    def _permuted_heads(self, name: str) -> int | None:
        """How many heads the rows of Q or K are permuted by in this file, or None.

        Converters of Llama's architecture turn each head's two halves into pairs, for a RoPE that rotates neighbours.
        """
        if self.metadata["general.architecture"] not in _PERMUTED_ARCHITECTURES:
            return None
        if ".self_attn.q_proj." in name:
            return self.shape.num_heads
        if ".self_attn.k_proj." in name:
            return self.shape.num_kv_heads
        return None


def _original_order(rows: int, heads: int) -> np.ndarray:
    """Row order that undoes the pairing: within a head, pairs (i, i + d/2) stand side by side in the file."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _ggml_type(code: int) -> Any:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(code)


def open_gguf(path: Path) -> GGUFModel:
    """Read the headers of a GGUF model: of the file, or of all files of the split set that it belongs to.

    Raises:
        ModelError: a file is missing, truncated or damaged, or the files do not belong together.
    """
    headers = _read_set(path)
    metadata = headers[0].metadata
    stored: dict[str, GGUFTensor] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in stored:
                raise ModelError(f"{header.path} holds the tensor {name}, and so does {stored[name].path}")
            stored[name] = tensor
    announced = metadata.get("split.tensors.count")
    if len(headers) > 1 and announced is not None and announced != len(stored):
        raise ModelError(
            f"{headers[0].path} announces {announced} tensors in all; its {len(headers)} files hold {len(stored)}"
        )
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    ends = [tensor for name, tensor in stored.items() if name in ("token_embd.weight", "output.weight")]
    body = [tensor for tensor in stored.values() if len(tensor.shape) > 1 and tensor not in ends] or ends
    shape = shape_from_gguf(
        metadata,
        shapes,
        headers[0].path.name,
        weight_dtype=_main_type(body),
        weight_bits=_average_bits(body),
        embedding_bits=_average_bits(ends),
    )
    return GGUFModel(metadata, {canonical_name(name): tensor for name, tensor in stored.items()}, shape)


def _read_set(path: Path) -> list[GGUFHeader]:
    """The headers of all files of the model that ``path`` is a part of, in order."""
    header = read_header(path)
    match = _SPLIT.fullmatch(path.name)
    count = header.metadata.get("split.count", 1)
    if count <= 1 and (match is None or int(match["count"]) == 1):
        return [header]
    if match is None:
        number = header.metadata.get("split.no", 0) + 1
        raise ModelError(
            f"{path} is part {number} of {count} of a split model, but is not named "
            f"NAME-{number:05d}-of-{count:05d}.gguf: its other parts cannot be found"
        )
    headers = []
    for number in range(1, int(match["count"]) + 1):
        part = path.with_name(f"{match['stem']}-{number:05d}-of-{match['count']}.gguf")
        if not part.exists():
            raise ModelError(f"{part} is missing: the model is split into {int(match['count'])} files")
        headers.append(read_header(part))
    for number, part_header in enumerate(headers):
        said = (part_header.metadata.get("split.no", 0), part_header.metadata.get("split.count", 1))
        if said != (number, len(headers)):
            raise ModelError(
                f"{part_header.path} says that it is split {said[0]} (from 0) of {said[1]}; "
                f"by its name it is {number} of {len(headers)}"
            )
    return headers


def canonical_name(name: str) -> str:
    """Hugging Face's name of a tensor; a name without one comes back as it is."""
    if name in _TOP:
        return _TOP[name]
    match = _BLOCK.fullmatch(name)
    if match and match[2] in _PARTS:
        return f"model.layers.{match[1]}.{_PARTS[match[2]]}.{match[3]}"
    return name


def _weights(tensor: GGUFTensor) -> int:
    return tensor.num_bytes // tensor.kind.block_bytes * tensor.kind.block_weights


def _main_type(tensors: list[GGUFTensor]) -> str:
    """The type that holds most weights, as a weight format's name."""
    by_type: dict[str, int] = {}
    for tensor in tensors:
        by_type[tensor.kind.name] = by_type.get(tensor.kind.name, 0) + _weights(tensor)
    main = max(by_type, key=lambda name: by_type[name], default="F32")
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return names.get(main, main.lower())


def _average_bits(tensors: list[GGUFTensor]) -> float:
    weights = sum(_weights(tensor) for tensor in tensors)
    return sum(tensor.num_bytes for tensor in tensors) * 8 / weights if weights else 32.0

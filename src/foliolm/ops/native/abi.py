"""The structures of ``csrc/abi.h``, field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from enum import IntEnum


class Format(IntEnum):
    """How a packed matrix is stored."""

    F32 = 0
    BF16 = 1
    I8 = 2
    Q8_0 = 3
    Q4_0 = 4
    Q4_1 = 5


class KVFormat(IntEnum):
    """How keys and values are stored."""

    F32 = 0
    BF16 = 1
    I8 = 2


class Weight(Structure):
    """``FolioWeight``."""

    _fields_ = (("format", c_int64), ("n", c_int64), ("k", c_int64), ("data", c_void_p))


class Linear(Structure):
    """``FolioLinear``."""

    _fields_ = (("num_parts", c_int64), ("parts", Weight * 3), ("bias", c_void_p))


class Layer(Structure):
    """``FolioLayer``."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", Linear),
        ("o", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("group", c_int64),
    )


class Model(Structure):
    """``FolioModel``."""

    _fields_ = (
        ("hidden", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("intermediate", c_int64),
        ("num_layers", c_int64),
        ("eps", c_float),
        ("rope_scale", c_float),
        ("frequencies", c_void_p),
        ("norm", c_void_p),
        ("layers", POINTER(Layer)),
        ("embed", Weight),
    )


class LoraLinear(Structure):
    """``FolioLoraLinear``: of eight-byte fields alone, so that a table of them can be an array of integers."""

    _fields_ = (("a", Weight), ("b", Weight * 3), ("offsets", c_int64 * 3))


class Lora(Structure):
    """``FolioLora``."""

    _fields_ = (("num_slots", c_int64), ("adapters", c_void_p), ("slots", c_void_p), ("output_slots", c_void_p))


class Group(Structure):
    """``FolioGroup``."""

    _fields_ = (("table", c_void_p), ("width", c_int64), ("slots", c_void_p), ("window", c_int64))


class Step(Structure):
    """``FolioStep``."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("num_rows", c_int64),
        ("num_outputs", c_int64),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("outputs", c_void_p),
        ("starts", c_void_p),
        ("used", c_void_p),
        ("groups", POINTER(Group)),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("block_size", c_int64),
        ("kv_format", c_int64),
        ("threads", c_int64),
        ("hidden", c_void_p),
        ("lora", POINTER(Lora)),
        ("deterministic", c_int64),
    )


def declare(library: ctypes.CDLL) -> None:
    """Give the library's functions their types."""
    i64, ptr = c_int64, c_void_p
    for name, result, arguments in (
        ("folio_isa", ctypes.c_char_p, ()),
        ("folio_error", ctypes.c_char_p, ()),
        ("folio_sizes", None, (ptr,)),
        ("folio_packed_bytes", i64, (i64, i64, i64)),
        ("folio_pack_floats", None, (i64, i64, i64, ptr, ptr)),
        ("folio_pack_ggml", i64, (i64, i64, i64, i64, ptr, ptr)),
        ("folio_unpack_row", None, (POINTER(Weight), i64, ptr)),
        ("folio_forward", i64, (POINTER(Model), POINTER(Step))),
        ("folio_linear", i64, (POINTER(Linear), ptr, i64, ptr, i64, i64, POINTER(Lora), i64)),
        ("folio_likeliest", i64, (POINTER(Linear), ptr, i64, i64, i64, ptr, ptr)),
        ("folio_draw", i64, (ptr, i64, i64, ptr, i64, ptr, ptr)),
        ("folio_read_rate", ctypes.c_double, (ptr, i64, i64, i64)),
    ):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments


SIZES = tuple(ctypes.sizeof(structure) for structure in (Weight, Linear, Layer, Model, Group, Step, LoraLinear, Lora))

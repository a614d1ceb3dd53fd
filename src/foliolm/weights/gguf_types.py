"""Tensor types of GGUF files: their names, and how many bytes a block of how many weights takes.

The numbers are those of ggml's block layouts (as in ``gguf.constants.GGML_QUANT_SIZES``; a test compares the two). They
are written down here because importing the ``gguf`` package takes longer than reading a file's header.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GGUFType:
    """A tensor type.

    Attributes:
        code: the number in the file.
        name: ggml's name.
        block_weights: weights a block.
        block_bytes: bytes a block, scales included.
        readable: whether FolioLM turns it into floats.
    """

    code: int
    name: str
    block_weights: int
    block_bytes: int
    readable: bool = True


_READABLE = (
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
)

_KNOWN_ONLY = (
    (9, "Q8_1", 32, 40),
    (15, "Q8_K", 256, 292),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
)

TYPES: dict[int, GGUFType] = {row[0]: GGUFType(*row) for row in _READABLE} | {
    row[0]: GGUFType(*row, readable=False) for row in _KNOWN_ONLY
}

TYPES_BY_NAME: dict[str, GGUFType] = {kind.name: kind for kind in TYPES.values()}

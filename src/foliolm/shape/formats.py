"""How weights and KV are stored: bits a value, scales included."""

from __future__ import annotations

from dataclasses import dataclass

from foliolm.core.errors import ConfigError
from foliolm.shape.inventory import Part
from foliolm.shape.model import ModelShape

# Bits a value of whole-tensor formats. The GGUF ones are block sizes of ggml's types: bytes a block * 8 / values
# (q4_1: 20 bytes for 32 values).
PLAIN_BITS: dict[str, float] = {
    "float32": 32.0,
    "float16": 16.0,
    "bfloat16": 16.0,
}
GGUF_BITS: dict[str, float] = {
    "q4_0": 18 * 8 / 32,
    "q4_1": 20 * 8 / 32,
    "q5_0": 22 * 8 / 32,
    "q5_1": 24 * 8 / 32,
    "q8_0": 34 * 8 / 32,
    "q2_k": 84 * 8 / 256,
    "q3_k": 110 * 8 / 256,
    "q4_k": 144 * 8 / 256,
    "q5_k": 176 * 8 / 256,
    "q6_k": 210 * 8 / 256,
    "iq4_nl": 18 * 8 / 32,
    "iq4_xs": 136 * 8 / 256,
}
# Formats that leave embedding, head, router and norms in 16 bits. Scales: fp8 one float32 a 128x128 block; AWQ and GPTQ
# a 16-bit scale and a 4-bit zero point a group of 128; int8 a 16-bit scale an output row (its share depends on the
# width: taken at 4,096 columns); mxfp4 an 8-bit exponent a group of 32.
BODY_BITS: dict[str, float] = {
    "fp8": 8 + 32 / (128 * 128),
    "int8": 8 + 16 / 4096,
    "awq": 4 + (16 + 4) / 128,
    "gptq": 4 + (16 + 4) / 128,
    "mxfp4": 4 + 8 / 32,
}
WEIGHT_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}
# Which arithmetic a weight format's matrix products run in; what is not listed is expanded to 16 bits first.
COMPUTE_RATES = {"fp8": "fp8", "int8": "int8", "float32": "fp32"}

KV_BITS: dict[str, float] = {
    "float32": 32.0,
    "bfloat16": 16.0,
    "float16": 16.0,
    "fp8": 8.0,  # one scale a tensor, kept with the weights
    "fp8_e4m3": 8.0,
    "fp8_e5m2": 8.0,
    "int8": 8.0,  # and a float32 scale a head a token, see KV_SCALE_BYTES_PER_HEAD
    "q8_0": 34 * 8 / 32,
    "q4_0": 18 * 8 / 32,
}
KV_SCALE_BYTES_PER_HEAD = {"int8": 4}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Stored bits a value by part of the model.

    Attributes:
        name: ``bfloat16``, ``fp8``, ``q4_1``, …
        body_bits: attention and dense MLP matrices.
        expert_bits: routed experts.
        embedding_bits: input embedding and output head.
        small_bits: norms, routers and other vectors.
        compute: which of a device's rates the matrix products run at: ``bf16``, ``fp8``, ``int8`` or ``fp32``.
    """

    name: str
    body_bits: float
    expert_bits: float
    embedding_bits: float
    small_bits: float
    compute: str = "bf16"

    def bits(self, part: Part) -> float:
        """Stored bits a value of ``part``."""
        if part in (Part.EMBEDDING, Part.HEAD):
            return self.embedding_bits
        if part in (Part.NORM, Part.ROUTER):
            return self.small_bits
        return self.expert_bits if part is Part.EXPERT else self.body_bits


def weight_format(shape: ModelShape, quantization: str | None = None) -> WeightFormat:
    """The format of a model's weights: as stored, or as ``quantization`` would store them.

    Args:
        shape: whose weights.
        quantization: a plain type, a GGUF type, ``fp8``, ``int8``, ``awq``, ``gptq`` or ``mxfp4``; None: as stored.

    Raises:
        ConfigError: the name is not known.
    """
    stored = quantization is None or quantization == "auto"
    if stored and not _known(
        shape.weight_dtype
    ):  # a file's mixture with a name of its own (q4_k_m): its average counts
        bits = shape.weight_bits
        if shape.weight_dtype.endswith("bit"):  # awq_4bit, bnb_8bit: the layers' matrices alone
            return WeightFormat(shape.weight_dtype, bits, bits, shape.embedding_bits or 16.0, 16.0)
        return WeightFormat(shape.weight_dtype, bits, bits, shape.embedding_bits or bits, 32.0)
    name = canonical_weight_dtype(shape.weight_dtype if quantization is None or stored else quantization)
    compute = COMPUTE_RATES.get(name, "bf16")
    if name in PLAIN_BITS:
        bits = PLAIN_BITS[name]
        return WeightFormat(name, bits, bits, bits, bits, compute)
    if name in GGUF_BITS:
        # A file mixes types; what its own metadata says of the average beats the type's name.
        body = shape.weight_bits if stored else GGUF_BITS[name]
        embedding = shape.embedding_bits if stored and shape.embedding_bits else body
        return WeightFormat(name, body, body, embedding, 32.0, compute)
    bits = BODY_BITS[name]
    embedding = shape.embedding_bits if stored and shape.embedding_bits else 16.0
    if name == "mxfp4":  # gpt-oss quantises its experts alone
        return WeightFormat(name, 16.0 if shape.moe else bits, bits, embedding, 16.0, compute)
    return WeightFormat(name, bits, bits, embedding, 16.0, compute)


def canonical_weight_dtype(name: str) -> str:
    """One spelling a weight format.

    Raises:
        ConfigError: the name is not known; the nearest is suggested.
    """
    if not _known(name):
        raise ConfigError(unknown("quantization", name, [*PLAIN_BITS, *BODY_BITS, *GGUF_BITS]))
    return WEIGHT_ALIASES.get(name.lower(), name.lower())


def kv_dtype(shape: ModelShape, name: str = "auto") -> str:
    """The KV element type that ``--kv-cache-dtype`` means for this model.

    ``auto`` is the model's own type where that is a plain one, else bfloat16.

    Raises:
        ConfigError: the name is not known; the nearest is suggested.
    """
    lowered = WEIGHT_ALIASES.get(name.lower(), name.lower())
    if lowered == "auto":
        stored = WEIGHT_ALIASES.get(shape.weight_dtype.lower(), shape.weight_dtype.lower())
        return stored if stored in PLAIN_BITS else "bfloat16"
    if lowered not in KV_BITS:
        raise ConfigError(unknown("kv_cache_dtype", name, ["auto", *KV_BITS]))
    return lowered


def _known(name: str) -> bool:
    lowered = WEIGHT_ALIASES.get(name.lower(), name.lower())
    return lowered in PLAIN_BITS or lowered in BODY_BITS or lowered in GGUF_BITS


def unknown(what: str, value: str, known: list[str]) -> str:
    """A sentence for a name that is not known, with the nearest that is."""
    import difflib  # only needed to word an error

    near = difflib.get_close_matches(value.lower(), known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"
    return f"{what} {value!r} is not known{hint}"

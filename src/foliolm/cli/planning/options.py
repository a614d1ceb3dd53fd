"""Options that the plan commands share, and how they become a setting."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foliolm.core.errors import ConfigError
from foliolm.plan.checks import real
from foliolm.plan.setting import GIB, MemoryOptions, Setting
from foliolm.shape.load import load_device, load_model_shape
from foliolm.shape.model import ModelShape

_MODEL = "A preset (qwen3-8b), a config.json, a folder that holds one, or a GGUF file."
_DEVICE = "A preset (h100-sxm), a JSON file, or this-machine (see: foliolm probe)."
Model = Annotated[str, typer.Option(help=_MODEL)]
MaybeModel = Annotated[str | None, typer.Option(help=_MODEL)]
DeviceName = Annotated[str, typer.Option("--device", help=_DEVICE)]
MaybeDevice = Annotated[str | None, typer.Option("--device", help=_DEVICE)]
Context = Annotated[int, typer.Option(help="Tokens of context of each sequence.")]
Quantization = Annotated[
    str | None,
    typer.Option(help="Weight format: fp8, int8, awq, gptq, mxfp4, float32, bfloat16, or a GGUF type such as q4_k."),
]
KVCacheDtype = Annotated[
    str, typer.Option("--kv-cache-dtype", help="KV element type: auto, bfloat16, float32, fp8, int8, q8_0 or q4_0.")
]
TensorParallel = Annotated[
    int, typer.Option("--tensor-parallel-size", help="Devices that share each copy of the model.")
]
BlockSize = Annotated[int, typer.Option(help="Tokens a KV block.")]
Utilization = Annotated[
    float | None, typer.Option("--gpu-memory-utilization", help="Share of the memory that may be used, 0 to 1 [0.9].")
]
BatchedTokens = Annotated[int, typer.Option("--max-num-batched-tokens", help="New tokens that a step may hold.")]
OtherGib = Annotated[
    float, typer.Option("--other-gib", help="GiB for driver context, captured graphs and communication buffers.")
]
ActivationsGib = Annotated[
    float | None, typer.Option("--activations-gib", help="GiB of activations, where measured [estimated].")
]
Json = Annotated[bool, typer.Option("--json", help="One line of JSON on stdout instead of tables.")]


def setting(
    model: str,
    device: str | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    tensor_parallel_size: int = 1,
    block_size: int = 16,
) -> Setting:
    """Load what the options name."""
    return Setting(
        shape=model_shape(model),
        device=None if device is None else load_device(device),
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size,
        block_size=block_size,
    )


def memory_options(
    utilization: float | None = None,
    max_num_batched_tokens: int = 8192,
    other_gib: float = 1.0,
    activations_gib: float | None = None,
    max_num_seqs: int = 256,
) -> MemoryOptions:
    """Memory options, with the sizes in GiB turned into bytes."""
    return MemoryOptions(
        gpu_memory_utilization=utilization,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        other_bytes=bytes_of_gib("other_gib", other_gib),
        activation_bytes=None if activations_gib is None else bytes_of_gib("activations_gib", activations_gib),
    )


def bytes_of_gib(field: str, value: float) -> int:
    """Bytes of a number of GiB.

    Raises:
        ConfigError: it is not a finite number of at least 0.
    """
    return int(real(field, value, 0.0, 2.0**30) * GIB)


def integers(field: str, text: str) -> list[int]:
    """Whole numbers with commas between.

    Raises:
        ConfigError: one is not a whole number.
    """
    values = []
    for word in text.split(","):
        try:
            values.append(int(word))
        except ValueError:
            raise ConfigError(f"{field} has {word.strip()!r}; it must be whole numbers with commas between") from None
    return values


def words(text: str) -> list[str]:
    """Names with commas between."""
    return [word.strip() for word in text.split(",") if word.strip()]


def model_shape(name: str) -> ModelShape:
    """A model's shape by preset, file or folder; a GGUF file's header is read, not its weights."""
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        from foliolm.shape.families import with_family_traits
        from foliolm.weights.gguf_files import open_gguf

        if not path.is_file():
            raise ConfigError(f"model file {name} does not exist")
        return with_family_traits(open_gguf(path).shape)
    return load_model_shape(name)

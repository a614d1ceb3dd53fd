"""A model on disk, opened: everything that its headers and configs say, and its tensors as a stream."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from foliolm.core.errors import ConfigError, ModelError
from foliolm.shape.hf_config import shape_from_config
from foliolm.shape.model import ModelShape
from foliolm.weights import generation, safetensors_files
from foliolm.weights.gguf_files import ROPE_FREQS, GGUFModel, RawTensor, open_gguf
from foliolm.weights.jsonfile import read_json, read_json_if_there
from foliolm.weights.layout import EMBEDDING, HEAD, check_tensors, expected_tensors
from foliolm.weights.vocabulary import count_tokens

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
LOAD_FORMATS: tuple[LoadFormat, ...] = ("auto", "safetensors", "gguf", "dummy")


@dataclass(frozen=True)
class ModelFiles:
    """A model that was checked as far as its headers go, and that nothing was read of yet.

    Attributes:
        name: as the user named it.
        source: the GGUF file, or the folder.
        format: ``safetensors``, ``gguf``, or ``dummy`` (no weights: the executor makes random ones).
        shape: the model's shape; ``vocab_size`` counts rows of the embedding.
        num_tokens: tokens that the tokenizer knows; rows of the embedding from there on are padding, whose logits must
            be masked.
        eos_token_ids: every token that ends a text.
        bos_token_id: the token that begins one, or None.
        generation_defaults: sampling parameters that the model's author set, by name.
        rope_factors: float32 ``[head_dim / 2]`` that divide the rotary frequencies, or None (GGUF's ``rope_freqs``).
        weight_bytes: bytes of all tensors of the model as stored; 0 for a dummy.
        gguf: the opened GGUF model, where it is one.
    """

    name: str
    source: Path
    format: str
    shape: ModelShape
    num_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    generation_defaults: Mapping[str, float | int] = field(default_factory=dict)
    rope_factors: np.ndarray | None = None
    weight_bytes: int = 0
    gguf: GGUFModel | None = None
    stored: Mapping[str, safetensors_files.StoredTensor] = field(default_factory=dict, repr=False)

    def iter_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the model once, by its Hugging Face name, one at a time and on the CPU.

        A tied output head is not among them. Safetensors come as stored (float32, float16, bfloat16), GGUF tensors as
        float32.

        Raises:
            ModelError: this is a dummy, or a tensor's type cannot be turned into floats.
        """
        if self.format == "dummy":
            raise ModelError(f"{self.name} was opened with load format dummy: it has no weights")
        wanted = expected_tensors(self.shape)
        if self.gguf is not None:
            yield from ((name, tensor) for name, tensor in self.gguf.iter_tensors() if name in wanted)
            return
        self._warn_of_a_second_head()
        yield from safetensors_files.iter_tensors({name: self.stored[name] for name in wanted})

    def raw_tensor(self, name: str) -> RawTensor:
        """A GGUF tensor in its stored type, by its Hugging Face name.

        Raises:
            ModelError: this is not a GGUF model, or it has no tensor of that name.
        """
        if self.gguf is None or self.format == "dummy":
            raise ModelError(f"{self.name} is of format {self.format}; only GGUF tensors have a raw form")
        return self.gguf.raw(name)

    def _warn_of_a_second_head(self) -> None:
        """Both an output head and the flag that says it is the embedding: the flag wins, as everywhere."""
        if not self.shape.tie_word_embeddings or HEAD not in self.stored:
            return
        pair = dict(safetensors_files.iter_tensors({name: self.stored[name] for name in (EMBEDDING, HEAD)}))
        if not pair[EMBEDDING].equal(pair[HEAD]):
            logger.warning(
                "%s: tie_word_embeddings is true, but the %s in its files differs from the embedding; it is ignored",
                self.source,
                HEAD,
            )


def open_path(path: Path, name: str | None = None, load_format: str = "auto") -> ModelFiles:
    """Open a model: a GGUF file (any part of a split one), a folder, or for ``dummy`` also a ``config.json``.

    Args:
        path: where it lies.
        name: for people; by default the path.
        load_format: ``auto`` takes what is there, safetensors before GGUF.

    Raises:
        ConfigError: the load format is unknown.
        ModelError: files are missing, truncated or damaged, contradict each other, or are of an unsupported kind.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format is {load_format!r}; it must be one of {', '.join(LOAD_FORMATS)}")
    name = name or str(path)
    if not path.exists():
        raise ModelError(f"{path} does not exist")
    if path.is_file():
        if path.suffix == ".json" and load_format == "dummy":
            return _open_folder(path.parent, name, load_format, path)
        if load_format == "safetensors" or path.suffix == ".safetensors":
            raise ModelError(f"{path} is a file; a safetensors model is a folder with its config.json")
        return _open_gguf(path, name, load_format)
    gguf = _gguf_in(path) if load_format == "gguf" or not (path / "config.json").exists() else None
    if gguf is not None:
        return _open_gguf(gguf, name, load_format)
    return _open_folder(path, name, load_format, path / "config.json")


def dummy_model(shape: ModelShape) -> ModelFiles:
    """A model of a shape alone, for random weights; every row of its embedding is a token."""
    expected_tensors(shape)
    return ModelFiles(shape.name, Path(shape.name), "dummy", shape, shape.vocab_size)


def _gguf_in(folder: Path) -> Path | None:
    """The GGUF file of a folder (the first part of a split one), or None where there is none."""
    found = sorted(folder.glob("*.gguf"))
    wholes = [path for path in found if "-of-" not in path.name or "-00001-of-" in path.name]
    if len(wholes) > 1:
        raise ModelError(
            f"{folder} holds {len(wholes)} GGUF models ({', '.join(p.name for p in wholes[:4])}); name one of them"
        )
    return next(iter(wholes or found), None)


def _open_gguf(path: Path, name: str, load_format: str) -> ModelFiles:
    model = open_gguf(path)
    shape, source = model.shape, str(path)
    expected_tensors(shape)
    if load_format != "dummy":
        _check_gguf_tensors(model, source)
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if tokens is not None else shape.vocab_size
    eos = generation.end_tokens_from_gguf(model.metadata)
    bos = model.metadata.get("tokenizer.ggml.bos_token_id")
    _check_vocabulary(num_tokens, eos, bos, shape, source)
    return ModelFiles(
        name=name,
        source=path,
        format="dummy" if load_format == "dummy" else "gguf",
        shape=shape,
        num_tokens=num_tokens,
        eos_token_ids=eos,
        bos_token_id=bos,
        generation_defaults=generation.defaults_from_gguf(model.metadata, source),
        rope_factors=_rope_factors(model, source),
        weight_bytes=0 if load_format == "dummy" else sum(tensor.num_bytes for tensor in model.tensors.values()),
        gguf=model,
    )


def _check_gguf_tensors(model: GGUFModel, source: str) -> None:
    check_tensors({k: t.shape for k, t in model.tensors.items() if k != ROPE_FREQS}, model.shape, source)
    for name in expected_tensors(model.shape):
        if not model.tensors[name].kind.readable:
            kind = model.tensors[name].kind.name
            raise ModelError(f"{source}: tensor {name} is stored as {kind}, which is not supported")


def _rope_factors(model: GGUFModel, source: str) -> np.ndarray | None:
    if ROPE_FREQS not in model.tensors:
        return None
    factors = model.floats(ROPE_FREQS)
    wanted = (model.shape.head_dim // 2,)
    if factors.shape != wanted or not np.isfinite(factors).all() or (factors <= 0).any():
        raise ModelError(f"{source}: tensor {ROPE_FREQS} must hold {wanted[0]} finite numbers above 0")
    return factors


def _open_folder(folder: Path, name: str, load_format: str, config_path: Path) -> ModelFiles:
    config = read_json(config_path)
    shape = shape_from_config(config, name)
    wanted = expected_tensors(shape)
    stored: dict[str, safetensors_files.StoredTensor] = {}
    if load_format != "dummy":
        _check_not_quantised(config, folder)
        stored = safetensors_files.find_tensors(folder)
        check_tensors({key: tensor.shape for key, tensor in stored.items()}, shape, str(folder))
        for key in wanted:
            if stored[key].dtype not in safetensors_files.FLOAT_DTYPES:
                raise ModelError(
                    f"{stored[key].path}: tensor {key} is stored as {stored[key].dtype}, which is not supported"
                )
    settings = read_json_if_there(folder / "generation_config.json")
    inner = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    configs: dict[str, Mapping[str, Any]] = {
        str(folder / "generation_config.json"): settings,
        str(config_path): config,
        f"{config_path}: text_config": inner or {},
    }
    eos = generation.end_tokens_from_configs(configs)
    bos = settings.get("bos_token_id", config.get("bos_token_id"))
    num_tokens = count_tokens(folder)
    _check_vocabulary(num_tokens, eos, bos, shape, str(folder))
    return ModelFiles(
        name=name,
        source=folder,
        format="dummy" if load_format == "dummy" else "safetensors",
        shape=shape,
        num_tokens=num_tokens or shape.vocab_size,
        eos_token_ids=eos,
        bos_token_id=bos,
        generation_defaults=generation.defaults_from_generation_config(
            settings, str(folder / "generation_config.json")
        ),
        weight_bytes=sum(stored[key].num_bytes for key in wanted) if stored else 0,
        stored=stored,
    )


def _check_not_quantised(config: Mapping[str, Any], folder: Path) -> None:
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ModelError(f"{folder}: weights quantised with {method} cannot be run; GGUF and float safetensors can")


def _check_vocabulary(
    num_tokens: int | None, eos: tuple[int, ...], bos: object, shape: ModelShape, source: str
) -> None:
    rows = shape.vocab_size
    if num_tokens is not None and num_tokens > rows:
        raise ModelError(f"{source}: the tokenizer has {num_tokens} tokens, the embedding only {rows} rows")
    for token in eos:
        if token >= rows:
            raise ModelError(f"{source}: the end token {token} lies outside the embedding's {rows} rows")
    if bos is not None and (isinstance(bos, bool) or not isinstance(bos, int) or not 0 <= bos < rows):
        raise ModelError(f"{source}: bos_token_id is {bos!r}; it must be from 0 to {rows - 1}")

"""LoRA adapters as PEFT writes them: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foliolm.core.errors import ModelError, RequestError
from foliolm.shape.lora import HEAD, LORA_MODULES, module_shape
from foliolm.shape.model import ModelShape
from foliolm.weights.jsonfile import read_json
from foliolm.weights.safetensors_files import FLOAT_DTYPES, StoredTensor, read_header

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
FIELD = "lora_path"

_PREFIX = "base_model.model."
_LAYER = re.compile(r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)")
_REFUSED = (
    ("use_dora", "DoRA scales each output by a learnt magnitude"),
    ("modules_to_save", "whole modules in place of the model's"),
    ("fan_in_fan_out", "transposed weights"),
    ("lora_bias", "biases beside the low-rank matrices"),
    ("layer_replication", "layers that the model has not"),
    ("target_parameters", "adapters of bare parameters"),
    ("trainable_token_indices", "embeddings of its own"),
    ("alora_invocation_tokens", "adapters that begin at a token"),
    ("use_qalora", "QALoRA"),
    ("use_bdlora", "block-diagonal LoRA"),
    ("arrow_config", "Arrow routing"),
    ("kasa_config", "KaSA"),
    ("monteclora_config", "MonteCLoRA"),
    ("velora_config", "VeLoRA"),
    ("ensure_weight_tying", "adapters tied to the embedding's"),
)
"""Settings of PEFT under which an adapter is more, or other, than two low-rank matrices a linear."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Ways to begin the training that change the model's own weights: the two matrices alone are not the adapter then."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter's headers, checked against the model; no weight has been read.

    Attributes:
        folder: where it lies.
        ranks: by (layer, module), the layer of the head being ``HEAD``.
        scales: the same: what ``B · A · x`` is multiplied by.
        tensors: the same: where A [rank, in] and B [out, rank] are stored.
    """

    folder: Path
    ranks: Mapping[tuple[int, str], int]
    scales: Mapping[tuple[int, str], float]
    tensors: Mapping[tuple[int, str], tuple[tuple[str, StoredTensor], tuple[str, StoredTensor]]]

    @property
    def max_rank(self) -> int:
        """The largest rank of a module."""
        return max(self.ranks.values())

    def read(self) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
        """By (layer, module): A [rank, in], and B [out, rank] with the scale in it, float32.

        Raises:
            RequestError: a tensor holds values that are not finite, or the file was changed meanwhile.
        """
        import torch
        from safetensors import SafetensorError, safe_open

        pairs = {}
        try:
            with safe_open(self.folder / WEIGHTS_NAME, framework="pt") as file:
                for key, ((name_a, _), (name_b, _)) in self.tensors.items():
                    a, b = (file.get_tensor(name).to(torch.float32) for name in (name_a, name_b))
                    for name, tensor in ((name_a, a), (name_b, b)):
                        if not torch.isfinite(tensor).all():
                            raise _wrong(f"{self.folder / WEIGHTS_NAME}: {name} holds values that are not finite")
                    pairs[key] = a, b * self.scales[key]
        except (OSError, SafetensorError) as error:
            raise _wrong(f"{self.folder / WEIGHTS_NAME} cannot be read: {error}") from None
        return pairs


def open_adapter(path: str, shape: ModelShape, max_rank: int) -> AdapterFiles:
    """Look at an adapter's folder, and check all that its headers say against the model.

    Args:
        path: the folder.
        shape: the base model's.
        max_rank: ``--max-lora-rank``.

    Raises:
        RequestError: the folder or a file is missing or damaged; the adapter is of a kind that is not served; its rank
            is over the limit; a tensor is missing, left over, or of a shape that the model's sizes do not ask for. Both
            numbers are named.
    """
    folder = Path(path).expanduser()
    try:
        if not folder.is_dir():
            raise _wrong(f"{path!r:.500} is no folder; an adapter is a folder with {CONFIG_NAME} and {WEIGHTS_NAME}")
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            if not (folder / name).is_file():
                raise _wrong(f"{folder} holds no {name}; PEFT's save_pretrained writes it (as safetensors)")
        settings = _Settings.of(folder / CONFIG_NAME, read_json(folder / CONFIG_NAME))
        stored = read_header(folder / WEIGHTS_NAME)
    except ModelError as error:
        raise _wrong(str(error)) from None
    except (OSError, ValueError) as error:  # a name too long, no permission, a NUL byte
        raise _wrong(f"{path!r:.500} cannot be read: {error}") from None
    modules = settings.modules(shape)
    highest = max([settings.rank, *settings.rank_pattern.values()])
    if highest > max_rank:
        raise _wrong(f"{folder}: the adapter's rank is {highest}; the limit is {max_rank} (--max-lora-rank)")
    return _checked(folder, settings, modules, stored, shape)


@dataclass(frozen=True, slots=True)
class _Settings:
    """``adapter_config.json``, as far as it matters here."""

    where: Path
    rank: int
    alpha: float
    rslora: bool
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: frozenset[int] | None
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    @classmethod
    def of(cls, where: Path, raw: Mapping[str, Any]) -> _Settings:
        kind = raw.get("peft_type")
        if kind != "LORA":
            raise _wrong(f"{where}: peft_type is {kind!r:.80}; only 'LORA' is served")
        for name, what in _REFUSED:
            if raw.get(name):
                raise _wrong(f"{where}: {name} is {raw[name]!r:.200} ({what}), which is not served")
        if raw.get("bias", "none") != "none":
            raise _wrong(f"{where}: bias is {raw['bias']!r:.80}; only 'none' is served")
        begun = raw.get("init_lora_weights")
        if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
            raise _wrong(
                f"{where}: init_lora_weights is {begun!r:.80}, which changes the model's own weights; "
                "convert the adapter to plain LoRA (PEFT's path_initial_model_for_weight_conversion)"
            )
        patterns = {name: raw.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
        for name, pattern in patterns.items():
            if not isinstance(pattern, dict):
                raise _wrong(f"{where}: {name} is {pattern!r:.200}; it must be an object")
        return cls(
            where,
            _number(where, raw, "r", int),
            _number(where, raw, "lora_alpha", float),
            raw.get("use_rslora") is True,
            _names(where, raw, "target_modules"),
            _names(where, raw, "exclude_modules"),
            _layers(where, raw.get("layers_to_transform")),
            {key: _number(where, patterns["rank_pattern"], key, int) for key in patterns["rank_pattern"]},
            {key: _number(where, patterns["alpha_pattern"], key, float) for key in patterns["alpha_pattern"]},
        )

    def modules(self, shape: ModelShape) -> dict[tuple[int, str], str]:
        """By (layer, module) its full name: what the adapter must have matrices for.

        Raises:
            RequestError: a target is no linear of the model.
        """
        names = {(HEAD, "lm_head"): "lm_head"}
        for layer in range(shape.num_layers):
            for module in LORA_MODULES[:-1]:
                block = "self_attn" if module in LORA_MODULES[:4] else "mlp"
                names[layer, module] = f"model.layers.{layer}.{block}.{module}"
        if isinstance(self.targets, tuple):
            for target in self.targets:
                if not any(_names_it((target,), name) for name in names.values()):
                    raise _wrong(
                        f"{self.where}: target_modules names {target!r:.200}, which cannot be adapted here; "
                        f"what can: {', '.join(LORA_MODULES)}"
                    )
        found = {}
        for key, name in names.items():
            wanted = key[0] != HEAD if self.targets == "all-linear" else _names_it(self.targets, name, self.where)
            if wanted and self.layers is not None:
                wanted = key[0] in self.layers
            if wanted and not _names_it(self.excluded, name, self.where):
                found[key] = name
        if not found:
            raise _wrong(f"{self.where}: target_modules is {self.targets!r:.200}; that is no linear of {shape.name}")
        return found

    def rank_of(self, name: str) -> int:
        return self.rank_pattern.get(_key(self.rank_pattern, name, self.where), self.rank)

    def scale_of(self, name: str) -> float:
        """alpha / r (arXiv 2106.09685), or alpha / √r where the adapter is rank-stabilised (arXiv 2312.03732)."""
        rank = self.rank_of(name)
        alpha = self.alpha_pattern.get(_key(self.alpha_pattern, name, self.where), self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def _checked(
    folder: Path,
    settings: _Settings,
    modules: Mapping[tuple[int, str], str],
    stored: Mapping[str, StoredTensor],
    shape: ModelShape,
) -> AdapterFiles:
    """The adapter, once every tensor is there, has its place and fits."""
    file = folder / WEIGHTS_NAME
    by_name = {name.removeprefix(_PREFIX): (name, tensor) for name, tensor in stored.items()}
    left = {name for name in by_name if not _is_copy_of_base(name, by_name[name][1], shape, file)}
    ranks, scales, tensors = {}, {}, {}
    missing = []
    for key, module in modules.items():
        rank = settings.rank_of(module)
        n, k = module_shape(shape, key[1])
        pair = []
        for side, expected in (("lora_A", (rank, k)), ("lora_B", (n, rank))):
            name = f"{module}.{side}.weight"
            if name not in by_name:
                missing.append(name)
                continue
            left.discard(name)
            full, tensor = by_name[name]
            if tensor.shape != expected:
                raise _wrong(
                    f"{file}: {name} has shape {tensor.shape}; rank {rank} on {shape.name} asks for {expected}"
                )
            if tensor.dtype not in FLOAT_DTYPES:
                raise _wrong(f"{file}: {name} is stored as {tensor.dtype}; it must be {', '.join(FLOAT_DTYPES)}")
            pair.append((full, tensor))
        if len(pair) == 2:
            ranks[key], scales[key], tensors[key] = rank, settings.scale_of(module), (pair[0], pair[1])
    if missing:
        more = f" and {len(missing) - 3} more of {2 * len(modules)}" if len(missing) > 3 else ""
        raise _wrong(f"{file} lacks {', '.join(missing[:3])}{more}, which target_modules asks for")
    if left:
        name = min(left)
        why = "DoRA is not served" if "magnitude" in name else f"{shape.name} has no such linear to adapt"
        if _LAYER.match(name) and "magnitude" not in name:
            why = "target_modules does not name it" if ".lora_" in name else "only lora_A and lora_B are served"
        raise _wrong(f"{file} holds {name!r:.300}: {why}")
    return AdapterFiles(folder, ranks, scales, tensors)


def _is_copy_of_base(name: str, tensor: StoredTensor, shape: ModelShape, file: Path) -> bool:
    """PEFT stores the embedding and the head beside an adapter of the head, unchanged but where they were resized."""
    if name not in ("model.embed_tokens.weight", "lm_head.base_layer.weight", "model.embed_tokens.base_layer.weight"):
        return False
    expected = (shape.vocab_size, shape.hidden_size)
    if tensor.shape != expected:
        raise _wrong(
            f"{file}: {name} has shape {tensor.shape}, {shape.name}'s has {expected}: "
            "an adapter with a vocabulary of its own is not served"
        )
    return True


def _names_it(targets: str | tuple[str, ...], name: str, where: Path | None = None) -> bool:
    """PEFT's rule: a text is a regex for the whole name, a list holds names or their ends."""
    if isinstance(targets, str):
        try:
            return bool(targets) and re.fullmatch(targets, name) is not None
        except re.error as error:
            raise _wrong(f"{where}: {targets!r:.200} is no regular expression: {error}") from None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _key(pattern: Mapping[str, Any], name: str, where: Path) -> str:
    """The first key of a pattern that a module's name ends with; PEFT's rule."""
    for key in pattern:
        try:
            if re.match(rf"(.*\.)?({key})$", name):
                return key
        except re.error as error:
            raise _wrong(f"{where}: {key!r:.200} is no regular expression: {error}") from None
    return name


def _number(where: Path, raw: Mapping[str, Any], name: str, kind: type[int] | type[float]) -> Any:
    value = raw.get(name)
    if value is None:
        raise _wrong(f"{where}: {name} is missing; without it the adapter's scale is not known")
    fits = isinstance(value, int) if kind is int else isinstance(value, int | float)
    if isinstance(value, bool) or not fits or not math.isfinite(value) or (kind is int and value < 1):
        raise _wrong(f"{where}: {name} is {value!r:.80}; it must be {'at least 1' if kind is int else 'a number'}")
    return value


def _layers(where: Path, value: Any) -> frozenset[int] | None:
    if value is None:
        return None
    listed = [value] if isinstance(value, int) else value
    if not isinstance(listed, list) or not all(isinstance(one, int) for one in listed):
        raise _wrong(f"{where}: layers_to_transform is {value!r:.200}; it must be a list of layers' numbers")
    return frozenset(listed)


def _names(where: Path, raw: Mapping[str, Any], name: str) -> str | tuple[str, ...]:
    value = raw.get(name)
    if value is None:
        return ()
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(one, str) for one in value):
        return tuple(value)
    raise _wrong(f"{where}: {name} is {value!r:.200}; it must be a text or a list of texts")


def _wrong(message: str) -> RequestError:
    return RequestError(message, FIELD, "invalid_adapter")

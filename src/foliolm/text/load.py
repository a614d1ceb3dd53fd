"""The text side of a model: its tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foliolm.core.errors import ConfigError, ModelError
from foliolm.text.chat_template import ChatTemplate
from foliolm.text.gguf_tokenizer import tokenizer_from_gguf
from foliolm.text.hf_tokenizer import tokenizer_from_folder
from foliolm.text.tokenizer import Tokenizer
from foliolm.weights.checkpoint import ModelFiles
from foliolm.weights.jsonfile import read_json_if_there

_GGUF_TEMPLATE = "tokenizer.chat_template"


def load_text(files: ModelFiles, chat_template: str | None = None) -> tuple[Tokenizer, ChatTemplate | None]:
    """Build a model's tokenizer and chat template.

    Args:
        files: the opened model.
        chat_template: a file, or a template itself, to be used instead of the model's own.

    Returns:
        The tokenizer, and the template or None where the model has none.

    Raises:
        ModelError: there is no tokenizer, or one of an unsupported kind.
        ConfigError: the template given is no file and no template, or a template is not valid Jinja.
    """
    source = str(files.source)
    if files.gguf is not None:
        metadata = files.gguf.metadata
        spec, special = tokenizer_from_gguf(metadata, source), _gguf_special(metadata)
        own = _gguf_templates(metadata)
    else:
        folder = tokenizer_from_folder(files.source if files.source.is_dir() else files.source.parent)
        spec, special = folder.spec, folder.special
        own = _folder_templates(files.source)
    templates = own if chat_template is None else {"default": read_chat_template(chat_template)}
    num_tokens = _num_tokens(spec)
    if num_tokens > files.shape.vocab_size:
        rows = files.shape.vocab_size
        raise ModelError(f"{source}: the tokenizer has {num_tokens} tokens, the embedding only {rows} rows")
    tokenizer = Tokenizer(
        spec,
        num_tokens,
        bos_token_id=files.bos_token_id,
        eos_token_id=files.eos_token_ids[0] if files.eos_token_ids else None,
        template_text="\0".join(templates.values()),
        source=source,
    )
    return tokenizer, ChatTemplate(templates, tokenizer, special) if templates else None


def read_chat_template(given: str) -> str:
    """A template that a user gave: the content of a file, or the text itself where it is Jinja.

    Raises:
        ConfigError: it is neither.
    """
    if "{{" in given or "{%" in given:
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        raise ConfigError(f"chat_template is {given!r}: there is no such file, and it is not a template")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template {given!r} cannot be read: {error}") from None


def _num_tokens(spec: Mapping[str, Any]) -> int:
    vocab = spec["model"]["vocab"]
    ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
    ids += [token["id"] for token in spec.get("added_tokens") or []]
    return max(ids) + 1


def _gguf_special(metadata: Mapping[str, Any]) -> dict[str, str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            special[f"{name}_token"] = tokens[token_id]
    return special


def _gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates = {
        key.removeprefix(f"{_GGUF_TEMPLATE}."): value
        for key, value in metadata.items()
        if key.startswith(f"{_GGUF_TEMPLATE}.") and isinstance(value, str)
    }
    default = metadata.get(_GGUF_TEMPLATE)
    return {"default": default, **templates} if isinstance(default, str) and default else templates


def _folder_templates(folder: Path) -> dict[str, str]:
    """From ``chat_template.jinja`` and its siblings, else from ``tokenizer_config.json`` or ``chat_template.json``."""
    templates: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        written = read_json_if_there(folder / name).get("chat_template")
        if isinstance(written, str):
            templates.setdefault("default", written)
        elif isinstance(written, list):
            templates |= {entry["name"]: entry["template"] for entry in written if isinstance(entry, dict)}
    single = folder / "chat_template.jinja"
    if single.exists():
        templates["default"] = single.read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    return templates

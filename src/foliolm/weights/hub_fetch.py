"""Fetches models from the Hugging Face Hub: only the files that are needed."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from foliolm.core.errors import ConfigError
from foliolm.weights.download_error import DownloadError

_REPO = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<file>[\w.-]+))?(@(?P<revision>[\w./-]+))?")
_FOLDER_PATTERNS = (
    "*.json", "*.safetensors", "*.jinja", "tokenizer.model", "spiece.model", "merges.txt",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
_NEVER = ("consolidated*", "adapter_*", "training_args*")
_TIMEOUT_SECONDS = 15.0
_SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the Hub.

    Attributes:
        repo: ``owner/name``.
        file: part of a GGUF file's name (``Q4_K_M``), to choose among several, or None.
        revision: a branch, tag or commit, or None.
    """

    repo: str
    file: str | None = None
    revision: str | None = None


def parse_hub_name(name: str) -> HubModel | None:
    """Read ``owner/name[:FILE][@REVISION]``; None where it is something else."""
    match = _REPO.fullmatch(name)
    return HubModel(match["repo"], match["file"], match["revision"]) if match else None


def fetch_from_hub(model: HubModel, home: Path) -> Path:
    """The folder, or the GGUF file, of a model on the Hub, fetched where it is not there yet.

    huggingface_hub resumes what was interrupted, gives files their names when they are whole, and locks. Without a
    network, what was fetched before is used.

    Raises:
        DownloadError: the Hub cannot be reached and the model was not fetched before, or it has no such model.
        ConfigError: the repository holds no model files, or several GGUF files and none was chosen.
    """
    from huggingface_hub import HfApi, snapshot_download

    # model_info answers or fails at once, where listing the files would be tried again for half a minute.
    info = _asking(
        model, lambda: HfApi().model_info(model.repo, revision=model.revision, timeout=_TIMEOUT_SECONDS), home
    )
    if info is None:
        found = find_from_hub(model, home)
        if found is None:  # _asking has made sure
            raise DownloadError(f"{model.repo} could not be fetched")
        return found
    wanted = choose_files([file.rfilename for file in info.siblings or []], model)
    folder = _asking(
        model,
        lambda: snapshot_download(
            model.repo,
            revision=model.revision,
            cache_dir=home / "hub",
            allow_patterns=[_literal(name) for name in wanted],
        ),
        None,
    )
    return _entry(Path(str(folder)), wanted)


def find_from_hub(model: HubModel, home: Path) -> Path | None:
    """What was fetched of a model before, or None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(model.repo, revision=model.revision, cache_dir=home / "hub", local_files_only=True)
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    try:
        return _entry(folder, choose_files(names, model))
    except ConfigError:
        return None


def choose_files(names: Iterable[str], model: HubModel) -> list[str]:
    """The files of a repository that make up the model: safetensors with what belongs to them, or a GGUF file.

    Raises:
        ConfigError: there are neither, or several GGUF models and none was chosen; the message lists them.
    """
    names = sorted(names)
    has_safetensors = any(fnmatch.fnmatch(name, "*.safetensors") and "/" not in name for name in names)
    if has_safetensors and model.file is None:
        top = [name for name in names if any(_matches(name, pattern) for pattern in _FOLDER_PATTERNS)]
        return [name for name in top if not any(fnmatch.fnmatch(name, pattern) for pattern in _NEVER)]
    sets: dict[str, list[str]] = {}
    for name in names:
        if name.lower().endswith(".gguf"):
            sets.setdefault(_SHARD.sub("", name), []).append(name)
    if not sets:
        raise ConfigError(f"{model.repo} holds neither safetensors nor GGUF files")
    chosen = {key: parts for key, parts in sets.items() if model.file is None or model.file.lower() in key.lower()}
    if len(chosen) != 1:
        listed = ", ".join(sets)
        wrong = (
            f"{len(chosen)} of its GGUF models match {model.file!r}" if model.file else "it holds several GGUF models"
        )
        raise ConfigError(f"{model.repo}: {wrong}; name one as {model.repo}:PART-OF-NAME, of {listed}")
    return next(iter(chosen.values()))


def _matches(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch.fnmatch(name, pattern)


def _literal(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)


def _entry(folder: Path, names: list[str]) -> Path:
    return folder / names[0] if names[0].lower().endswith(".gguf") else folder


def _asking(model: HubModel, ask: Callable[[], T], home: Path | None) -> T | None:
    """Ask the Hub; None where it cannot be reached but what is needed is in ``home`` already."""
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return ask()
    except GatedRepoError:
        raise DownloadError(
            f"{model.repo} is only given to those who accept its terms: log in with `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise DownloadError(f"the Hugging Face Hub has no model {model.repo}, or it is private") from None
    except RevisionNotFoundError:
        raise DownloadError(f"{model.repo} has no revision {model.revision!r}") from None
    except HFValidationError as error:
        raise ConfigError(f"{model.repo} is not a repository's name: {error}") from None
    except Exception as error:
        if not _is_network_failure(error):
            raise
        if home is not None and find_from_hub(model, home) is not None:
            return None
        raise DownloadError(
            f"{model.repo} could not be fetched: the Hugging Face Hub cannot be reached ({_first_line(error)}). "
            "A folder or GGUF file on this machine can be given by its path."
        ) from None


def _is_network_failure(error: Exception) -> bool:
    """The client's transport errors (httpx, requests) share no base class but their package's root."""
    if isinstance(error, OSError):  # ConnectionError, timeouts, the Hub's HTTP errors, offline mode
        return True
    return any(base.__module__.partition(".")[0] in ("httpx", "httpx2", "requests") for base in type(error).__mro__)


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]

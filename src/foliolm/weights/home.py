"""The folder that fetched models are kept in."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from foliolm.core.errors import ConfigError, ModelError

HOME_VARIABLE = "FOLIOLM_HOME"


def home_folder(given: Path | None = None) -> Path:
    """The cache folder: the one given, else ``$FOLIOLM_HOME``, else ``~/.cache/foliolm``. It need not exist.

    Raises:
        ConfigError: there is a file in its place.
    """
    written = os.environ.get(HOME_VARIABLE)
    home = given or (Path(written) if written else Path.home() / ".cache" / "foliolm")
    home = home.expanduser().absolute()
    if home.exists() and not home.is_dir():
        raise ConfigError(f"{home} is a file; the folder for models ({HOME_VARIABLE}) must be a folder")
    return home


def make_folder(path: Path) -> Path:
    """Create a folder with its parents.

    Raises:
        ConfigError: the system does not allow it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create {path}: {error.strerror}; {HOME_VARIABLE} moves the folder for models"
        ) from None
    return path


def check_room(folder: Path, needed: int) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        ModelError: with the bytes needed and free.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(f"{folder} has {free:,} bytes free; {needed:,} are needed")

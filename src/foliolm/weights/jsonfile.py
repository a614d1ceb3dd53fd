"""JSON files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foliolm.core.errors import ModelError
from foliolm.weights.pointer import check_not_pointer


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelError: the file is missing, a pointer, not JSON, or holds something other than an object.
    """
    if not path.exists():
        raise ModelError(f"{path} is missing")
    check_not_pointer(path)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}; it must be an object")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """As ``read_json``, but an empty object where there is no file."""
    return read_json(path) if path.exists() else {}

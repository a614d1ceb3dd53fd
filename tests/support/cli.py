"""Run a ``foliolm`` command in this process and read what it says."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from foliolm.cli.main import build_app
from foliolm.core.errors import FolioError


def run_json(command: str, *words: object) -> dict[str, Any]:
    """The JSON of a command that must succeed; stdout must be exactly one line."""
    result = CliRunner().invoke(build_app(command), [command, *map(str, words), "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def run_text(command: str, *words: object) -> str:
    """What people see."""
    result = CliRunner().invoke(build_app(command), [command, *map(str, words)])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def refusal(command: str, *words: object) -> str:
    """The sentence with which a command refuses its input."""
    result = CliRunner().invoke(build_app(command), [command, *map(str, words)])
    assert isinstance(result.exception, FolioError), (result.output, result.exception)
    return str(result.exception)

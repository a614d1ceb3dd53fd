"""Run ``foliolm plan`` in this process and read what it says."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from foliolm.cli.plan import build_app

_APP = build_app(None)


def plan(*words: object) -> dict[str, Any]:
    """The JSON of a plan command that must succeed; stdout must be exactly one line."""
    result = CliRunner().invoke(_APP, [str(word) for word in words] + ["--json"])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def plan_text(*words: object) -> str:
    """What people see."""
    result = CliRunner().invoke(_APP, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*words: object) -> str:
    """The one line on stderr of a plan command that must end with code 2."""
    result = CliRunner().invoke(_APP, [str(word) for word in words])
    assert result.exit_code == 2, (result.exit_code, result.output)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr

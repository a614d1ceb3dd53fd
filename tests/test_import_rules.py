"""The table of docs/ARCHITECTURE.md, enforced: the folder tells what a line may touch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "foliolm"

ALLOWED = {
    "core": set(),
    "shape": {"core"},
    "kv": {"core"},
    "scheduler": {"core", "kv"},
    "ledger": {"core", "shape"},
    "engine": {"core", "scheduler", "kv", "ledger"},
    "text": {"core", "weights"},
    "executor": {"core", "shape", "ledger", "model", "ops", "weights"},
    "model": {"core", "shape", "ops"},
    "ops": {"core", "shape"},
    "weights": {"core", "shape"},
    "api": {
        "core",
        "text",
        "engine",
        "ledger.journal",
        "ledger.lines",
        "ledger.metrics",
        "weights.checkpoint",
        "weights.store",
        "assemble",
    },
    "simulate": {"core", "shape", "scheduler", "kv", "ledger", "engine", "executor.cost", "assemble"},
    "bench": {"core", "simulate.workload", "simulate.spread"},
    "plan": {"core", "shape", "scheduler", "kv", "ledger", "engine", "executor.cost", "assemble"},
}
"""By room, the other rooms that its files may import. ``cli`` and ``assemble`` may import anything."""

LIGHT = ("core", "shape", "kv", "scheduler", "ledger", "plan", "simulate", "bench")
"""Rooms that must not import torch, not even inside a function: they run where only the base install is."""


def room_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[tuple[int, str]]:
    """(line, dotted module) of every import in a file, those inside functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append((node.lineno, node.module))
            if node.module == "foliolm":
                found += [(node.lineno, f"foliolm.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.append((node.lineno, "a relative import"))
    return found


HEAVY = {"torch", "transformers", "fastapi", "matplotlib", "scipy", "uvicorn", "pydantic"}
"""Packages that the light commands must start without."""

FILES = sorted(SOURCE.rglob("*.py"))


def test_there_are_files_to_check():
    assert len(FILES) > 50


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_imports_only_what_its_room_may(path):
    room = room_of(path)
    wrong = []
    for line, module in imports_of(path):
        if module == "a relative import":
            wrong.append(f"line {line}: relative imports hide the room; write foliolm.…")
        parts = module.split(".")
        if parts[0] != "foliolm" or len(parts) < 2 or room not in ALLOWED:
            continue
        other = parts[1]
        if other in (room, "version", "errors"):
            continue
        if other not in ALLOWED[room] and ".".join(parts[1:3]) not in ALLOWED[room]:
            wrong.append(f"line {line}: {room} may not import {module}")
    assert wrong == []


@pytest.mark.parametrize("room", LIGHT)
def test_light_rooms_name_no_torch(room):
    for path in (SOURCE / room).rglob("*.py"):
        heavy = [
            f"line {line}" for line, module in imports_of(path) if module.split(".")[0] in ("torch", "transformers")
        ]
        # `foliolm probe` measures with torch where it is installed; its measurements are the one exception.
        if path.name.startswith("probe"):
            continue
        assert heavy == [], f"{path.name} imports torch"


def test_light_commands_load_nothing_heavy():
    code = (
        "import sys; from foliolm.cli.main import build_app; build_app(None);"
        "import foliolm, foliolm.scheduler, foliolm.kv, foliolm.core.config;"
        f"heavy = {HEAVY!r} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

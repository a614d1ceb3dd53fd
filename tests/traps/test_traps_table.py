"""Every trap has a test that exists, or a reason why it cannot occur; every field case that is listed has its file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NUMBERS = [*(str(number) for number in range(1, 45)), "44a", "44b", *(str(number) for number in range(45, 83))]


def rows(path: Path) -> list[list[str]]:
    lines = [line for line in path.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][1:]


TRAPS = rows(Path(__file__).parent / "README.md")


def names_in(path: Path) -> set[str]:
    """Tests of a file: functions, classes, and classes that hypothesis made."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return {name for name in found if name.lower().startswith("test")}


def test_all_are_listed_once_and_in_order():
    assert [row[0] for row in TRAPS] == NUMBERS


@pytest.mark.parametrize("row", TRAPS, ids=lambda row: row[0])
def test_a_trap_has_a_test_or_a_reason(row):
    _, what, guard = row
    assert what
    tests = re.findall(r"`([^`]+)::([^`]+)`", guard)
    if not tests:
        assert guard.startswith("cannot occur: "), guard
    for file, name in tests:
        assert name in names_in(TESTS / file), f"{file} has no {name}"


@pytest.mark.parametrize("row", rows(TESTS / "field" / "README.md"), ids=lambda row: row[0])
def test_a_field_case_has_its_file_or_a_reason(row):
    files = re.findall(r"`([^`]+\.py)`", row[2])
    assert files or row[2].startswith("cannot occur: "), row
    for file in files:
        assert (TESTS / "field" / file).is_file(), f"{file} is not there"


def test_field_cases_of_memory_prefixes_and_sampling_are_all_listed():
    listed = {case.strip() for row in rows(TESTS / "field" / "README.md") for case in row[0].split(",")}
    wanted = {"B1", "B2", "B7", "B8", "B9", "B10", "C1", "C3", "C5", "C6", "C8", "C10", "D1", "D3", "D6", "D7"}
    assert wanted <= listed, wanted - listed

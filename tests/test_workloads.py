"""The workloads carried into the repository are the peers' to the token."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


def load(path: Path, name: str):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("round_", [0, 3])
def test_same_draws_as_the_peers(shared, round_):
    ours = load(Path(__file__).parents[1] / "benchmarks" / "workloads.py", "our_workloads")
    theirs = load(shared / "peers" / "workloads.py", "peer_workloads")
    assert ours.NAMES == theirs.NAMES
    for name in ours.NAMES:
        assert ours.workload(name, round_) == theirs.workload(name, round_)

"""A real server with the embedded model, started once; and the fake engine of the engine's tests made importable."""

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "engine"))

# Small and single-threaded: the tests share a machine with others, and look at behaviour, not at speed.
LEAN = {"max_model_len": 512, "max_num_batched_tokens": 128, "max_num_seqs": 16, "num_gpu_blocks_override": 256}
FLAGS = [part for name, value in LEAN.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="session")
def lean_settings():
    """Settings with which the embedded model starts quickly, as keyword arguments of ``LLM``."""
    return {**LEAN, "num_threads": min(2, os.cpu_count() or 1)}


@pytest.fixture(scope="session")
def lean_flags():
    """The same as flags of a command."""
    return FLAGS


@pytest.fixture(scope="session")
def real_server():
    """``foliolm serve`` with the embedded model."""
    from server_process import ServerProcess

    running = ServerProcess("-m", "foliolm", "serve", "--port", "0", *FLAGS, "--shutdown-timeout", "5")
    yield running
    assert running.stop() == 0
    assert running.lines[-1] == "stopped"

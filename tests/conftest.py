"""Makes ``support`` and servers for tests importable, and gives hypothesis a profile that neither flakes nor times out
on a busy machine."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))
sys.path += [str(Path(__file__).parent / room) for room in ("api", "engine")]

settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("suite")

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of known answers that lies beside a developer's checkout."""
    if not SHARED.is_dir():
        pytest.skip("the folder of known answers does not lie beside this checkout")
    return SHARED


# Small: the tests share a machine with others, and look at behaviour, not at speed. In float32 the numbers are those of
# the oracle, whatever the batch; what the stored 4 bits and KV in 8 bits cost is tested in tests/native.
LEAN = {"max_model_len": 512, "max_num_batched_tokens": 128, "max_num_seqs": 16, "num_gpu_blocks_override": 256}
LEAN["dtype"] = "float32"
FLAGS = [part for name, value in LEAN.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="session")
def lean_settings():
    """Settings with which the embedded model starts quickly, as keyword arguments of ``LLM``."""
    return {**LEAN, "num_threads": min(2, os.cpu_count() or 1)}


@pytest.fixture(scope="session")
def lean_flags():
    """The same, as flags of a command."""
    return list(FLAGS)


@pytest.fixture(scope="session")
def real_server():
    """``foliolm serve`` with the embedded model, one for all tests."""
    from server_process import ServerProcess

    running = ServerProcess("-m", "foliolm", "serve", "--port", "0", *FLAGS, "--shutdown-timeout", "5")
    yield running
    assert running.stop() == 0
    assert running.lines[-1] == "stopped"

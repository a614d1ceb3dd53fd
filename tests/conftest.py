"""Makes ``support`` and servers for tests importable, and gives hypothesis a profile that neither flakes nor times out
on a busy machine."""

import functools
import os
import sys
from dataclasses import replace
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
def lean_cost(tmp_path_factory):
    """A step cost for the embedded model in float32: who asks only for tokens need not have steps measured first.

    ``real_server`` and others start without, as users do.
    """
    from foliolm.ledger.accounts import account
    from foliolm.ledger.cost_file import FORMAT, CostFile, save_cost
    from foliolm.ledger.step_cost import StepCost
    from foliolm.weights.store import open_model

    shape = replace(open_model("smollm2-135m").shape, weight_dtype="float32", weight_bits=32.0, embedding_bits=32.0)
    cost = StepCost(account(shape, kv_cache_dtype="float32"), 1e10, 1e11, 1e11)
    path = tmp_path_factory.mktemp("cost") / "float32.json"
    save_cost(path, CostFile(FORMAT, "made up", 0.0, cost))
    return path


@pytest.fixture(scope="session")
def lean_settings(lean_cost):
    """Settings with which the embedded model starts quickly, as keyword arguments of ``LLM``."""
    return {**LEAN, "num_threads": min(2, os.cpu_count() or 1), "step_cost": str(lean_cost)}


@pytest.fixture(scope="session")
def lean_flags(lean_cost):
    """The same, as flags of a command."""
    return [*FLAGS, "--step-cost", str(lean_cost)]


@pytest.fixture(scope="session")
def real_server():
    """``foliolm serve`` with the embedded model, one for all tests."""
    from server_process import ServerProcess

    running = ServerProcess("-m", "foliolm", "serve", "--port", "0", *FLAGS, "--shutdown-timeout", "5")
    yield running
    assert running.stop() == 0
    assert running.lines[-1] == "stopped"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With ``--dist loadfile``: the files whose tests use ``real_server`` go to one worker, so that one is started."""
    from xdist.scheduler import LoadFileScheduling

    class OneServer(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::", 1)[0]
            return "real_server" if _uses_the_server(config.rootpath / file) else file

    return OneServer(config, log) if config.getvalue("dist") == "loadfile" else None


@functools.cache
def _uses_the_server(path):
    return "real_server" in path.read_text(encoding="utf-8")

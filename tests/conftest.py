"""Makes ``support`` importable and gives hypothesis a profile that neither flakes nor times out on a busy machine."""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("suite")

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of known answers that lies beside a developer's checkout."""
    if not SHARED.is_dir():
        pytest.skip("the folder of known answers does not lie beside this checkout")
    return SHARED

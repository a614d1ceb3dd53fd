"""Makes the fake engine of the engine's tests importable here too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "engine"))

"""The servers of the HTTP tests, made importable."""

import sys
from pathlib import Path

for room in ("api", "engine"):
    sys.path.append(str(Path(__file__).parents[1] / room))

"""What starts other engines must not get in the way of their packages."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_no_file_of_the_benchmarks_is_taken_for_an_engines_package():
    """A script's folder is the first in which imports are looked for: `kernels` was found there, and vLLM failed."""
    code = f"""
import importlib.util, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import peer_worker
names = {sorted(path.stem for path in BENCHMARKS.glob("*.py"))!r}
print([name for name in names if name not in sys.modules and importlib.util.find_spec(name)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "[]"

"""Compile and run the kernels' checks under AddressSanitizer and UBSan, for each target that this CPU runs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from foliolm.ops.native.build import SOURCES, BuildError, find_compiler
from foliolm.ops.native.target import TARGETS, cpu_features

CHECKS = Path(__file__).with_name("check_kernels.cpp")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
FLAGS = ("-std=c++20", "-O1", "-g1", "-pthread", *SANITIZERS, "-DFOLIO_UNROLL=")


def compile_all(command: list[str], sources: list[str], program: str) -> None:
    objects = [f"{program}-{Path(source).stem}.o" for source in sources]
    jobs = [[*command, "-c", source, "-o", made] for source, made in zip(sources, objects, strict=True)]
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        list(workers.map(lambda job: subprocess.run(job, check=True), jobs))
    subprocess.run([*command, *objects, "-o", program], check=True)


def main() -> int:
    try:
        compiler = find_compiler()
    except BuildError as error:
        print(f"nothing to check: {error}")
        return 0
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    for target in TARGETS:
        if not target.needs <= cpu_features():
            print(f"{target.name}: this CPU cannot run it")
            continue
        with tempfile.TemporaryDirectory() as folder:
            program = str(Path(folder) / "check")
            command = [compiler, *FLAGS, *target.flags, f"-I{SOURCES}"]
            compile_all(command, [*sources, str(CHECKS)], program)
            done = subprocess.run([program], check=False)
        print(f"{target.name}: {'clean' if done.returncode == 0 else 'FAILED'}")
        if done.returncode:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

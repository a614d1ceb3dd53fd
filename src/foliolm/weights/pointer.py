"""Files that are not what their names say: Git LFS pointers and saved web pages."""

from __future__ import annotations

from pathlib import Path

from foliolm.core.errors import ModelError

_LFS = b"version https://git-lfs.github.com/spec/"


def check_not_pointer(path: Path) -> None:
    """Refuse a file that only stands for another one.

    Raises:
        ModelError: it is a Git LFS pointer (the size of the real file is named), an HTML page, or empty.
    """
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        raise ModelError(f"{path} is empty (0 bytes)")
    if head.startswith(_LFS):
        size = next((line[5:].decode() for line in head.splitlines() if line.startswith(b"size ")), "unknown")
        raise ModelError(
            f"{path} is a Git LFS pointer, not the file itself ({size} bytes): "
            "fetch it with `git lfs pull`, or download it again"
        )
    if head.lstrip()[:15].lower().startswith((b"<!doctype html", b"<html")):
        raise ModelError(f"{path} is a web page, not a model file: the download got an error page instead")

"""A ledger's files: appended line by line, rotated, and whole but for the last line whatever happens."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

from foliolm.core.errors import ConfigError
from foliolm.ledger.lines import EngineLine, Line, encode_line

FILE_BYTES = 64 << 20
MOST_FILES = 32
logger = logging.getLogger("foliolm.ledger")


class Journal:
    """Writes lines to ``FOLDER/NAME-000001.jsonl`` and so on.

    A line is one write to the operating system, so that a process that is killed leaves at most its last line torn; a
    reader drops that one. A new process begins a new file and never touches what was written before. When writing
    fails (a full disk), the journal says so once and stops; the server goes on.

    Args:
        folder: made if it is not there.
        name: the files' stem: ``engine-0``, ``http``.
        file_bytes: a file that has grown beyond it is closed.
        most_files: the oldest are deleted beyond so many.

    Raises:
        ConfigError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path, name: str, file_bytes: int = FILE_BYTES, most_files: int = MOST_FILES) -> None:
        self.folder = folder
        self.name = name
        self.header: Callable[[], EngineLine] | None = None
        self._file_bytes = file_bytes
        self._most_files = most_files
        self._descriptor: int | None = None
        self._written = 0
        self._broken = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._number = max((number for number, _ in self._files()), default=0)
            self._open_next()
        except OSError as error:
            raise ConfigError(f"--ledger {folder}: cannot be written: {error.strerror or error}") from None

    def write(self, line: Line) -> None:
        """Append a line."""
        if self._broken:
            return
        try:
            if self._written >= self._file_bytes:
                self._open_next()
            if not self._written and self.header is not None and not isinstance(line, EngineLine):
                self._append(encode_line(self.header()))
            self._append(encode_line(line))
        except OSError as error:
            self._broken = True
            logger.error("the ledger in %s is written no more: %s", self.folder, error)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._broken = True

    def _append(self, raw: bytes) -> None:
        assert self._descriptor is not None
        view = memoryview(raw)
        while view:
            done = os.write(self._descriptor, view)
            self._written += done
            view = view[done:]

    def _open_next(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._number += 1
        path = self.folder / f"{self.name}-{self._number:06d}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._written = 0
        for _, old in sorted(self._files())[: -self._most_files]:
            old.unlink(missing_ok=True)

    def _files(self) -> list[tuple[int, Path]]:
        pattern = re.compile(re.escape(self.name) + r"-(\d{6})\.jsonl")
        found = ((pattern.fullmatch(path.name), path) for path in self.folder.iterdir())
        return [(int(match[1]), path) for match, path in found if match]

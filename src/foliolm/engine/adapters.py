"""The adapters that an engine knows: which of them are in host memory, and how they get there beside its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from foliolm.core.adapter import AdapterHost, AdapterSize
from foliolm.core.errors import RequestError

UNKNOWN = "model_not_found"
"""Code of the error of a request whose adapter is not (or no longer) loaded."""


@dataclass(frozen=True, slots=True)
class _Known:
    name: str
    path: str


class AdapterBook:
    """Adapters by load id. ``fetch`` and ``read`` may be called by any thread, all else by the engine's only.

    An adapter that some request needs stays in host memory; of the others, those least recently used give way. Whoever
    needs one that is not there waits until it has been read again: beside the steps, not between them.

    Args:
        host: keeps what is read.
        max_held: adapters in host memory.
        num_live: live requests of a load id.
    """

    def __init__(self, host: AdapterHost, max_held: int, num_live: Callable[[int], int]) -> None:
        self.max_held = max_held
        self._host = host
        self._num_live = num_live
        self._known: dict[int, _Known] = {}
        self._sizes: dict[int, AdapterSize] = {}
        self._held: dict[int, None] = {}  # least recently used first
        self._fetched: dict[int, tuple[AdapterSize, Any]] = {}
        self._lock = threading.Lock()
        self._reading: dict[int, threading.Lock] = {}
        self.on_size: Callable[[int, AdapterSize], None] = lambda load_id, size: None
        self.on_drop: Callable[[int], None] = host.drop

    def names(self, load_ids: Iterable[int]) -> tuple[str, ...]:
        """Names of adapters, also of those that were unloaded while requests use them."""
        return tuple(self._sizes[load_id].name for load_id in load_ids if load_id in self._sizes)

    @property
    def held(self) -> tuple[int, ...]:
        """Load ids in host memory, least recently used first."""
        return tuple(self._held)

    # --- any thread

    def read(self, load_id: int, name: str, path: str) -> AdapterSize:
        """Read an adapter's files; ``register`` takes it in.

        Raises:
            RequestError: they are wrong; nothing has changed.
        """
        read = self._host.read(name, path)
        with self._lock:
            self._fetched[load_id] = read
            while len(self._fetched) > self.max_held:  # those that nobody took: their request was aborted
                del self._fetched[next(iter(self._fetched))]
        return read[0]

    def fetch(self, load_ids: Iterable[int]) -> None:
        """Read those of the adapters that are not in host memory.

        Raises:
            RequestError: one is not known, or its files are wrong now.
        """
        for load_id in set(load_ids):
            known = self._check(load_id)
            with self._lock:
                reading = self._reading.setdefault(load_id, threading.Lock())
            with reading:  # one that many wait for is read once
                if not self.is_ready(load_id):
                    self.read(load_id, known.name, known.path)
            with self._lock:
                self._reading.pop(load_id, None)

    def is_ready(self, load_id: int) -> bool:
        """Whether an adapter need not be read."""
        with self._lock:
            return load_id in self._held or load_id in self._fetched

    def _check(self, load_id: int) -> _Known:
        known = self._known.get(load_id)
        if known is None:
            raise RequestError("the adapter that the request names was unloaded", "model", UNKNOWN)
        return known

    # --- the engine's thread

    def register(self, load_id: int, path: str, size: AdapterSize) -> None:
        """An adapter that was read may be used from now on; it stays in host memory if there is room."""
        self._known[load_id] = _Known(size.name, path)
        self._sizes[load_id] = size
        self.on_size(load_id, size)
        if self.is_ready(load_id) and self.has_room((load_id,)):
            self.take((load_id,))

    def check(self, load_ids: Iterable[int]) -> None:
        """Refuse what is not known.

        Raises:
            RequestError: an adapter was never loaded, or was unloaded.
        """
        for load_id in load_ids:
            self._check(load_id)

    def has_room(self, load_ids: Sequence[int]) -> bool:
        """Whether all of these can be in host memory together with those that live requests need."""
        wanted = set(load_ids)
        needed = sum(1 for load_id in self._held if load_id in wanted or self._num_live(load_id))
        return needed + len(wanted - self._held.keys()) <= self.max_held

    def take(self, load_ids: Sequence[int]) -> None:
        """Have these in host memory, and used just now; they must be ready, and there must be room."""
        wanted = dict.fromkeys(load_ids)
        for load_id in wanted:
            if load_id in self._held:
                del self._held[load_id]
            else:
                while len(self._held) >= self.max_held:
                    idle = next(each for each in self._held if each not in wanted and not self._num_live(each))
                    del self._held[idle]
                    self.on_drop(idle)
                with self._lock:
                    size, laid_out = self._fetched.pop(load_id)
                self._host.put(load_id, laid_out)
                self._sizes[load_id] = size
                self.on_size(load_id, size)
            self._held[load_id] = None
        with self._lock:
            for load_id in wanted:
                self._fetched.pop(load_id, None)  # read twice

    def hide(self, load_id: int) -> bool:
        """New requests do not find an adapter any more; False where it was not known."""
        return self._known.pop(load_id, None) is not None

    def forget(self, load_id: int) -> None:
        """A hidden adapter that no live request needs leaves host memory."""
        self._sizes.pop(load_id, None)
        if load_id in self._held:
            del self._held[load_id]
            self.on_drop(load_id)
        with self._lock:
            self._fetched.pop(load_id, None)

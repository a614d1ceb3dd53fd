"""The host pool: slots in host memory, each as large as a block of every KV group together."""

from __future__ import annotations

from collections.abc import Iterable


class HostPool:
    """Slots that swapped requests and evicted prefixes share.

    Within a plan all copies out come before all copies in. So a slot that the plan in the making already reads or
    writes may be given back, but is handed out again only by a later plan: ``seal`` says that the plan is complete.

    Args:
        num_slots: slots in all; 0: there is no host pool.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise ValueError(f"num_slots is {num_slots}; it must be at least 0")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._held: set[int] = set()
        self._touched: set[int] = set()
        self._leaving: list[int] = []

    @property
    def num_free(self) -> int:
        """Slots that can be handed out now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Slots that somebody holds."""
        return len(self._held)

    def allocate(self, count: int) -> list[int]:
        """Hand out slots, to be written by the plan in the making.

        Raises:
            ValueError: fewer are free; nothing was handed out.
        """
        if count > len(self._free):
            raise ValueError(f"{count} host slots wanted, {len(self._free)} free")
        slots = [self._free.pop() for _ in range(count)]
        self._held.update(slots)
        self._touched.update(slots)
        return slots

    def read(self, slots: Iterable[int]) -> None:
        """The plan in the making reads these slots."""
        self._touched.update(slots)

    def is_touched(self, slot: int) -> bool:
        """True if the plan in the making reads or writes a slot: given back, only a later plan may use it."""
        return slot in self._touched

    def cancel(self, slot: int) -> None:
        """A slot that was handed out to the plan in the making is not written after all: it is free at once.

        Raises:
            ValueError: nobody holds it, or the plan does not touch it.
        """
        if slot not in self._held or slot not in self._touched:
            raise ValueError(f"host slot {slot} is not one that the plan in the making was given")
        self._held.remove(slot)
        self._touched.remove(slot)
        self._free.append(slot)

    def release(self, slots: Iterable[int]) -> None:
        """Give slots back.

        Raises:
            ValueError: one is not held (a double free).
        """
        for slot in slots:
            if slot not in self._held:
                raise ValueError(f"host slot {slot} is freed, but nobody holds it")
            self._held.remove(slot)
            (self._leaving if slot in self._touched else self._free).append(slot)

    def seal(self) -> None:
        """The plan in the making is complete: what it gave back can be used by the next."""
        if self._touched:
            self._touched.clear()
            self._free += self._leaving
            self._leaving = []

    def problems(self, holders: Iterable[int]) -> list[str]:
        """What is wrong with the pool's books, a sentence each.

        Args:
            holders: the slots that somebody says to hold.
        """
        listed = list(holders)
        found = []
        if len(set(listed)) != len(listed):
            found.append("a host slot is held twice")
        if set(listed) != self._held:
            found.append(f"{len(self._held)} host slots are given out, {len(set(listed))} are held")
        places = [*self._free, *self._leaving, *self._held]
        if sorted(places) != list(range(self.num_slots)):
            found.append("a host slot is in no place, or in two")
        return found

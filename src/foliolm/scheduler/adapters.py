"""LoRA adapters: who may run beside whom, and which adapter is in which of the device's slots."""

from __future__ import annotations

from foliolm.core.adapter import AdapterLoad
from foliolm.scheduler.request import Request, State


class AdapterSlots:
    """Slots of adapters, least recently used first out, and the requests that hold them.

    The adapters of the running requests are at most as many as there are slots: whoever would bring another one waits,
    and others may pass. An adapter that nobody runs with stays in its slot until that is wanted. The bare model takes
    no slot.

    Args:
        num_slots: adapters that a step may use; None: any number, and slots are nobody's business.
        age_bound_ns: a request that waited so long for a slot gets the next one: until then no other adapter's request
            is admitted.

    Attributes:
        loads, outs: for the next plan: what is copied into slots, and whose slots are emptied.
        drain_for: the request that waited too long.
    """

    def __init__(self, num_slots: int | None, age_bound_ns: int) -> None:
        self.num_slots = num_slots
        self.loads: list[AdapterLoad] = []
        self.outs: list[int] = []
        self.drain_for: Request | None = None
        self._age_bound_ns = age_bound_ns
        self._free = list(range((num_slots or 0) - 1, -1, -1))
        self._slot_of: dict[int, int] = {}  # those that nobody runs with in the order in which they were last used
        self._running: dict[int, int] = {}
        self._live: dict[int, int] = {}
        self._broken: set[int] = set()

    def __len__(self) -> int:
        """Adapters that running requests use."""
        return len(self._running)

    @property
    def running(self) -> tuple[int, ...]:
        """Load ids that running requests use."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Load ids of which some request does not run."""
        return tuple(load_id for load_id, count in self._live.items() if count > self._running.get(load_id, 0))

    @property
    def resident(self) -> tuple[int, ...]:
        """Load ids in slots."""
        return tuple(self._slot_of)

    def num_live(self, load_id: int) -> int:
        """Live requests of an adapter, those that wait included."""
        return self._live.get(load_id, 0)

    def is_running(self, load_id: int | None) -> bool:
        """Whether a request of the adapter (or of the bare model) adds no other adapter to the steps."""
        return load_id is None or load_id in self._running

    def has_room(self, load_id: int) -> bool:
        """Whether a request of the adapter may join those who run."""
        return self.num_slots is None or load_id in self._running or len(self._running) < self.num_slots

    def passes_by(self, request: Request) -> int | None:
        """Id of the request that waited too long for a slot and that this one would pass by, if there is one."""
        starved = self.drain_for
        if starved is None or request.source.adapter in (None, starved.source.adapter):
            return None
        return starved.request_id

    def skipped(self, request: Request, now: int) -> None:
        """A request was passed over for want of a slot."""
        if self.drain_for is None and now - request.queued_ns >= self._age_bound_ns:
            self.drain_for = request

    def look_again(self) -> None:
        """Before a plan: whoever waited too long may have been let in, or be gone."""
        if self.drain_for is not None and self.drain_for.state is not State.WAITING:
            self.drain_for = None

    # --- requests

    def enter(self, load_id: int | None) -> None:
        """A request has arrived."""
        if load_id is not None:
            self._live[load_id] = self._live.get(load_id, 0) + 1

    def leave(self, load_id: int | None) -> None:
        """A request has ended."""
        if load_id is not None:
            self._live[load_id] -= 1
            if not self._live[load_id]:
                del self._live[load_id]

    def hold(self, request: Request) -> None:
        """A request runs from now on; there must be room."""
        load_id = request.source.adapter
        if load_id is None:
            return
        request.holds_adapter = True
        self._running[load_id] = self._running.get(load_id, 0) + 1
        if self.num_slots is None or load_id in self._slot_of:
            return
        if not self._free:
            idle = next(known for known in self._slot_of if known not in self._running)
            self._empty(idle)
        self._slot_of[load_id] = self._free.pop()
        self.loads.append(AdapterLoad(load_id, self._slot_of[load_id]))

    def release(self, request: Request) -> None:
        """A request that ran does so no more."""
        if not request.holds_adapter:
            return
        request.holds_adapter = False
        load_id = request.source.adapter
        assert load_id is not None
        self._running[load_id] -= 1
        if not self._running[load_id]:
            del self._running[load_id]
            if load_id in self._broken or any(load.load_id == load_id for load in self.loads):
                self._empty(load_id)  # nobody knows what is in its slot, or nothing has come there yet
            elif load_id in self._slot_of:
                self._slot_of[load_id] = self._slot_of.pop(load_id)  # now the newest of those that nobody runs with

    # --- slots

    def forget(self, load_id: int) -> None:
        """An adapter without live requests was unloaded: its slot is emptied."""
        if load_id in self._slot_of:
            self._empty(load_id)
            self.outs.append(load_id)

    def seal(self) -> None:
        """The changes are in a plan."""
        self.loads.clear()
        self.outs.clear()

    def lost(self, loads: tuple[AdapterLoad, ...]) -> None:
        """A step failed that was to fill slots: what is in them is not known."""
        for load in loads:
            if self._slot_of.get(load.load_id) == load.slot:
                self._broken.add(load.load_id)
                if load.load_id not in self._running:
                    self._empty(load.load_id)

    def _empty(self, load_id: int) -> None:
        self._free.append(self._slot_of.pop(load_id))
        self._broken.discard(load_id)
        self.loads = [load for load in self.loads if load.load_id != load_id]

    def problems(self, running: dict[int, int], live: dict[int, int]) -> list[str]:
        """What is wrong, a sentence each.

        Args:
            running, live: requests by load id, counted anew.
        """
        found = []
        if running != self._running or live != self._live:
            found.append(f"adapters' requests are {running} and {live}, {self._running} and {self._live} were counted")
        if self.num_slots is None:
            return found
        slots = [*self._slot_of.values(), *self._free]
        if sorted(slots) != list(range(self.num_slots)):
            found.append("an adapter's slot is held twice, or lost")
        found.extend(
            f"adapter {load_id} runs without a slot" for load_id in self._running if load_id not in self._slot_of
        )
        return found

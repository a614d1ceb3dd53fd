"""LoRA adapters of an executor: in host memory, and in the model's slots."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foliolm.core.adapter import AdapterSize
from foliolm.core.plan import StepPlan
from foliolm.model.lora import LoraSlots, PackedLora
from foliolm.ops.lora import LoraRows
from foliolm.shape.lora import adapter_params
from foliolm.shape.model import ModelShape
from foliolm.weights.lora_files import open_adapter

BARE = -1
"""Stands for a load id: of the bare model."""


class HostAdapters:
    """Adapters in host memory, laid out for the model: ``AdapterHost``.

    Args:
        shape: the model's.
        slots: the model's.
        max_rank: ``--max-lora-rank``.
    """

    def __init__(self, shape: ModelShape, slots: LoraSlots, max_rank: int) -> None:
        self._shape, self._slots, self._max_rank = shape, slots, max_rank
        self._held: dict[int, PackedLora] = {}

    def read(self, name: str, path: str) -> tuple[AdapterSize, PackedLora]:
        """See ``AdapterHost``."""
        files = open_adapter(path, self._shape, self._max_rank)
        packed = self._slots.pack(files.read())
        body, head = adapter_params(self._shape, files.ranks)
        return AdapterSize(name, files.max_rank, packed.num_bytes, body, head), packed

    def put(self, load_id: int, laid_out: Any) -> None:
        """See ``AdapterHost``."""
        self._held[load_id] = laid_out

    def drop(self, load_id: int) -> None:
        """See ``AdapterHost``."""
        self._held.pop(load_id, None)

    def get(self, load_id: int) -> PackedLora:
        """An adapter that is held.

        Raises:
            KeyError: it is not.
        """
        return self._held[load_id]

    @property
    def num_bytes(self) -> int:
        """Of all that are held."""
        return sum(packed.num_bytes for packed in self._held.values())


class SlotTable:
    """Which adapter is in which of the model's slots. Only the thread that runs steps touches it.

    Args:
        slots: the model's.
        host: where adapters are copied from.
        device: where products run.
    """

    def __init__(self, slots: LoraSlots, host: HostAdapters, device: Any) -> None:
        self._slots, self._host, self._device = slots, host, device
        self._slot_of: dict[int, int] = {}

    @property
    def has_head(self) -> bool:
        """Whether an adapter in some slot adapts the output head."""
        return self._slots.has_head

    def take_changes(self, plan: StepPlan) -> None:
        """Empty and fill slots as a plan says.

        Raises:
            ValueError: the plan names an adapter that is not in host memory, or a slot that there is not.
        """
        for load_id in plan.adapters_out:
            slot = self._slot_of.pop(load_id, None)
            if slot is not None:
                self._slots.clear(slot)
        for load in plan.adapters_in:
            if not 0 <= load.slot < self._slots.num_slots:
                raise ValueError(f"the plan fills adapter slot {load.slot}; there are {self._slots.num_slots}")
            self._slot_of = {known: slot for known, slot in self._slot_of.items() if slot != load.slot}
            try:
                packed = self._host.get(load.load_id)
            except KeyError:
                raise ValueError(f"the plan fills a slot with adapter {load.load_id}, which is not held") from None
            self._slots.put(load.slot, packed)
            self._slot_of[load.load_id] = load.slot

    def rows(self, load_ids: NDArray[np.int64]) -> LoraRows | None:
        """The slots of rows with these adapters; None where all are of the bare model.

        Raises:
            ValueError: one of the adapters is in no slot.
        """
        distinct, places = np.unique(load_ids, return_inverse=True)
        if len(distinct) == 1 and distinct[0] == BARE:
            return None
        try:
            slots = [BARE if load_id == BARE else self._slot_of[int(load_id)] for load_id in distinct]
        except KeyError as error:
            raise ValueError(f"the plan has a row of adapter {error.args[0]}, which is in no slot") from None
        return LoraRows(np.array(slots, np.int32)[places], self._slots.num_slots, self._device)

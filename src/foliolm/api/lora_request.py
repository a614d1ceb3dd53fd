"""Adapters for the Python classes, in vLLM's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foliolm.core.errors import RequestError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Which LoRA adapter completes a prompt.

    Attributes:
        lora_name: for people.
        lora_int_id: stands for the adapter: with another folder it is loaded anew, and never meets the KV of the old.
        lora_path: its folder, as PEFT writes it.

    Raises:
        RequestError: the id is below 1.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise RequestError(
                f"lora_int_id is {self.lora_int_id!r}; it must be an integer of at least 1", "lora_request"
            )


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""One for all prompts, or one (or none) a prompt."""


def one_each(given: LoRARequests, count: int) -> list[LoRARequest | None]:
    """One a prompt.

    Raises:
        RequestError: there are more or fewer than prompts.
    """
    if given is None or isinstance(given, LoRARequest):
        return [given] * count
    if len(given) != count:
        raise RequestError(
            f"lora_request has {len(given)} entries for {count} prompts; give one, or one a prompt", "lora_request"
        )
    return list(given)


class LoadIds:
    """Load ids of the adapters that were asked for.

    Args:
        num_taken: load ids that ``--lora-modules`` took.
    """

    def __init__(self, num_taken: int) -> None:
        self._last = num_taken
        self._known: dict[int, tuple[str, int]] = {}

    def known(self, request: LoRARequest) -> int | None:
        """The load id of a request's adapter; None: it is to be loaded."""
        path, load_id = self._known.get(request.lora_int_id, ("", 0))
        return load_id if path == request.lora_path else None

    def fresh(self) -> int:
        """A load id that nobody had."""
        self._last += 1
        return self._last

    def loaded(self, request: LoRARequest, load_id: int) -> int | None:
        """An adapter was loaded; returns the load that it takes the place of."""
        before = self._known.get(request.lora_int_id)
        self._known[request.lora_int_id] = request.lora_path, load_id
        return None if before is None else before[1]

"""LoRA adapters as the engine's books know them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class AdapterSize:
    """What an adapter takes.

    Attributes:
        name: as people know it.
        rank: the largest of its linears.
        num_bytes: as a slot holds it, padding included: read once by a step that has a row of it.
        body_params, head_params: values that each token, and each sampled one, passes: ``Σ rank · (in + out)``.
    """

    name: str
    rank: int
    num_bytes: int
    body_params: int
    head_params: int = 0


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """An adapter's part of a step.

    Attributes:
        load_id: of the adapter.
        tokens: new tokens of its rows.
        sampled: tokens that are sampled for them.
        rows: how many.
    """

    load_id: int
    tokens: int
    sampled: int
    rows: int


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Copy an adapter from host memory into a slot of the device before the forward pass."""

    load_id: int
    slot: int


class AdapterHost(Protocol):
    """Adapters in host memory; whoever runs steps copies them into its slots from here.

    ``read`` may be called by any thread, all else by the engine's only.
    """

    def read(self, name: str, path: str) -> tuple[AdapterSize, Any]:
        """An adapter's files, checked and laid out for this model's kernels.

        Raises:
            RequestError: they are wrong, or do not fit the model; nothing has changed.
        """
        ...

    def put(self, load_id: int, laid_out: Any) -> None:
        """Keep what ``read`` gave."""
        ...

    def drop(self, load_id: int) -> None:
        """Keep an adapter no longer; a slot may still hold a copy."""
        ...

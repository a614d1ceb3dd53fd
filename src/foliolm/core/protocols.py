"""The seams: whoever plays these parts can be swapped without the engine noticing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from foliolm.core.plan import Closed, StepPlan
from foliolm.core.result import StepResult


class Clock(Protocol):
    """Time in integer nanoseconds, never going back. Only the engine's loop reads it."""

    def now(self) -> int:
        """Nanoseconds since an arbitrary origin."""
        ...


class StepHandle(Protocol):
    """A step that was handed to an executor."""

    def wait(self) -> StepResult:
        """Block until the step is done. Raises whatever the step raised."""
        ...


class Executor(Protocol):
    """Runs plans strictly in the order in which they are submitted."""

    def submit(self, plan: StepPlan) -> StepHandle:
        """Begin a step; may return before it is done. Any number of steps may be in flight."""
        ...

    def close(self) -> None:
        """Give back memory and threads; no step may be in flight."""
        ...


@runtime_checkable
class SteadyExecutor(Protocol):
    """An executor in virtual time that can run like decode steps without a plan for each; see `CostExecutor`."""

    @property
    def knows_steady(self) -> bool:
        """Whether it can for its model."""
        ...

    def steady(
        self, num_decodes: int, context: int, longest: Callable[[], int], most: int, until_ns: int | None
    ) -> list[int]:
        """Run up to ``most`` steps of the same decodes; nanoseconds of each."""
        ...


class CostModel(Protocol):
    """Predicts the time of a step."""

    def seconds(self, plan: StepPlan) -> float:
        """Predicted seconds of the whole step."""
        ...


class SteadyCost(Protocol):
    """A `CostModel` that can also say what like decode steps take, one after another, without a plan for each.

    Attributes:
        knows_steady: whether it can for its model.
    """

    knows_steady: bool

    def seconds(self, plan: StepPlan) -> float:
        """Predicted seconds of the whole step."""
        ...

    def steady_seconds(self, num_decodes: int, context: int, longest: int) -> float:
        """Predicted seconds of a step of decodes alone; exactly what ``seconds`` says of its plan.

        Args:
            num_decodes: rows.
            context: their contexts together.
            longest: the longest of them.
        """
        ...

    def steady_line(self, num_decodes: int) -> tuple[float, float] | None:
        """Where ``steady_seconds`` is ``fixed + context · each`` to the last bit: (fixed, each); else None."""
        ...


class ChunkBudget(Protocol):
    """Bounds the prompt tokens of a step in which streams run."""

    def prompt_tokens(
        self, num_decodes: int, decode_context: int, context: int, most: int
    ) -> tuple[int, Closed | None]:
        """Prompt tokens that the step may hold.

        Args:
            num_decodes, decode_context: the running streams, and their summed contexts.
            context: tokens computed before of the prompt that is furthest on.
            most: what the token budget leaves; at least 1.

        Returns:
            From 1 to ``most``, and what binds where it is below ``most``.
        """
        ...


class Prices(Protocol):
    """Predicts what the treatments of memory pressure cost, in seconds.

    ``num_decodes`` and ``decode_context`` describe the steps beside which work is done: their decode rows, and the
    summed context of these.
    """

    @property
    def known(self) -> bool:
        """False while there is no cost model: then nothing can be compared."""
        ...

    def swap(self, blocks: int) -> float:
        """Seconds to move so many logical blocks to the host and back; infinite where no link is known."""
        ...

    def recompute(self, tokens: int, cached: int, num_decodes: int, decode_context: int) -> float:
        """Seconds that computing ``tokens``, but for the first ``cached``, adds to steps of so many decodes."""
        ...

    def decode_step(self, num_decodes: int, decode_context: int) -> float:
        """Seconds of one step of so many decodes."""
        ...

    def adapter(self, load_id: int) -> float:
        """Seconds that a LoRA adapter adds to each step that has a row of it."""
        ...

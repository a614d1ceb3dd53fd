"""A calibrated step cost as a file: written by ``foliolm calibrate``, read by ``--step-cost``."""

from __future__ import annotations

from pathlib import Path

import msgspec

from foliolm.core.errors import ConfigError
from foliolm.ledger.accounts import ModelAccount
from foliolm.ledger.plan_cost import Slowdown
from foliolm.ledger.step_cost import StepCost


class CostFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file's content.

    Attributes:
        format: of the file.
        fitted_from: how many steps, and of what.
        host_gap_s: mean seconds between a step's end and the next one's start while there is work.
        cost: the step cost.
        http_s: median seconds from the acceptance of a request to the engine's queue.
        delivery_s: median seconds from a token's commit to its bytes being handed to the socket.
        slowdown: of steps, against the step cost.
    """

    format: str
    fitted_from: str
    host_gap_s: float
    cost: StepCost
    http_s: float = 0.0
    delivery_s: float = 0.0
    slowdown: Slowdown = Slowdown()


FORMAT = "foliolm-step-cost-1"


def save_cost(path: Path, held: CostFile) -> None:
    """Write the file whole, never by halves.

    Raises:
        ConfigError: it cannot be written.
    """
    content = msgspec.json.format(msgspec.json.encode(held), indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".partial")
        draft.write_bytes(content + b"\n")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


def load_cost(path: Path, model: ModelAccount | None = None) -> CostFile:
    """Read the file.

    Args:
        path: where it lies.
        model: the account that it must be of; None: any.

    Raises:
        ConfigError: it cannot be read, is damaged, or is of another model.
    """
    try:
        content = msgspec.json.decode(path.read_bytes(), type=CostFile)
    except OSError as error:
        raise ConfigError(f"step cost {path}: {error.strerror or error}") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"step cost {path} is damaged, or no such file: {error}") from None
    if content.format != FORMAT:
        raise ConfigError(f"step cost {path}: format is {content.format!r}; it must be {FORMAT}")
    if model is not None:
        for name in ("num_layers", "hidden_size", "vocab_size", "body_bytes", "tensor_parallel_size"):
            theirs, ours = getattr(content.cost.model, name), getattr(model, name)
            if theirs != ours:
                raise ConfigError(
                    f"step cost {path} is of another model or number type: its {name} is {theirs}, here it is {ours}"
                )
    return content

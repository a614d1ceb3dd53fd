"""Which LoRA adapter each request of a workload asks for: by shares, or by Zipf's law."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from foliolm.core.adapter import AdapterSize
from foliolm.core.errors import ConfigError
from foliolm.ledger.accounts import lora_params
from foliolm.shape.model import ModelShape
from foliolm.simulate.workload.item import Item, Workload

MOST = 100_000
BYTES_A_VALUE = 2
"""Adapters are taken to be held in 16 bits."""


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """What a user may say about adapters of a workload.

    Attributes:
        lora_adapters: so many adapters, all alike; requests ask for the i-th in proportion to 1 / i ** lora-zipf.
        lora_zipf: Zipf's exponent; 0: all are asked for alike.
        lora_shares: in place of Zipf's law, the share of requests of each adapter, as 0.5,0.3,0.1; what is left of 1
            asks for the bare model.
        lora_rank: of each adapter.
        lora_targets: linears that they adapt, as q_proj,v_proj.
    """

    lora_adapters: int | None = None
    lora_zipf: float | None = None
    lora_shares: str | None = None
    lora_rank: int = 16
    lora_targets: str = "q_proj,v_proj"

    def weights(self) -> tuple[float, ...]:
        """Shares of the adapters; none: the workload has none.

        Raises:
            ConfigError: values are out of range or contradict each other.
        """
        if self.lora_shares is not None:
            if self.lora_adapters is not None or self.lora_zipf is not None:
                raise ConfigError(
                    "--lora-shares says how many adapters there are; leave out --lora-adapters, --lora-zipf"
                )
            try:
                shares = tuple(float(share) for share in self.lora_shares.split(","))
            except ValueError:
                raise ConfigError(
                    f"--lora-shares is {self.lora_shares!r:.200}; it must be numbers, as 0.5,0.3"
                ) from None
            if not all(math.isfinite(share) and share >= 0 for share in shares) or not 0 < sum(shares) <= 1 + 1e-9:
                raise ConfigError(f"--lora-shares is {self.lora_shares!r:.200}; shares are from 0 and sum to at most 1")
            return shares
        if self.lora_adapters is None:
            if self.lora_zipf is not None:
                raise ConfigError("--lora-zipf is given without --lora-adapters")
            return ()
        if not 1 <= self.lora_adapters <= MOST:
            raise ConfigError(f"--lora-adapters is {self.lora_adapters}; it must be from 1 to {MOST:,}")
        exponent = 1.0 if self.lora_zipf is None else self.lora_zipf
        if not (math.isfinite(exponent) and 0 <= exponent <= 10):
            raise ConfigError(f"--lora-zipf is {exponent}; it must be from 0 to 10")
        weights = [1 / rank**exponent for rank in range(1, self.lora_adapters + 1)]
        return tuple(weight / sum(weights) for weight in weights)

    def sizes(self, shape: ModelShape) -> dict[int, AdapterSize]:
        """The adapters by load id.

        Raises:
            ConfigError: as ``weights``; a rank out of range, or a target that the model has not.
        """
        count = len(self.weights())
        if not count:
            return {}
        params = lora_params(shape, self.lora_rank, tuple(self.lora_targets.split(",")))
        return {
            load_id: AdapterSize(f"adapter-{load_id}", self.lora_rank, BYTES_A_VALUE * params, params)
            for load_id in range(1, count + 1)
        }


class WithAdapters:
    """A workload whose requests ask for adapters; the turns of a conversation all ask for one.

    Args:
        workload: draws the rest.
        weights: shares of the adapters.
        seed: says what is drawn.
    """

    def __init__(self, workload: Workload, weights: Sequence[float], seed: int) -> None:
        self.total = workload.total
        self._workload = workload
        self._bounds = list(itertools.accumulate(weights))
        self._draw = random.Random(f"{seed}:adapters")
        self._seed = seed

    def items(self) -> Iterator[Item]:
        """See ``Workload``."""
        return (self._adapted(item) for item in self._workload.items())

    def after(self, item: Item, now_ns: int) -> Iterable[Item]:
        """See ``Workload``."""
        return [self._adapted(following) for following in self._workload.after(item, now_ns)]

    def _adapted(self, item: Item) -> Item:
        draw = self._draw if item.session < 0 else random.Random(f"{self._seed}:adapters:{item.session}")
        at = bisect.bisect_right(self._bounds, draw.random())
        return replace(item, adapter=at + 1 if at < len(self._bounds) else 0)

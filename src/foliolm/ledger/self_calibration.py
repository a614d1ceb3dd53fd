"""A running server's own calibration: steps are noted as they come, and fitted in a process that takes idle time."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from foliolm.ledger.samples import Sample, SampleReader
from foliolm.ledger.step_cost import StepCost

if TYPE_CHECKING:
    from foliolm.core.record import StepRecord
    from foliolm.ledger.ledger import Ledger

FIRST_AFTER = 256
"""Steps before the first fit; each later one waits for twice as many as the one before, up to ``MOST_BETWEEN``."""
MOST_BETWEEN = 16384
READ_TOGETHER = 64
"""Steps are made samples so many at a time: one alone would find none of what that takes in the CPU's caches."""
KEPT = 1024
"""Newest steps of each kind that a fit sees."""
TIMEOUT_S = 300.0
logger = logging.getLogger("foliolm.ledger")


class Task(msgspec.Struct, frozen=True):
    """What the fitting process is given on standard input."""

    cost: StepCost
    samples: list[Sample]


class SelfCalibration:
    """Fits the ledger's step cost to its own steps and hands it back.

    A step pays for one append and one look. The fit runs in a process of its own at the lowest priority that the system
    has; a thread waits for it. A fit replaces the step cost only where it predicts held-out steps better.

    Args:
        ledger: whose steps, and whose step cost.
        cost: the step cost to start from.
    """

    def __init__(self, ledger: Ledger, cost: StepCost) -> None:
        self._ledger = ledger
        self._start = cost
        self._reader = SampleReader(cost.model)
        self._unread: list[StepRecord] = []
        self._kept: dict[str, deque[Sample]] = {}
        self._until_next = self._between = FIRST_AFTER
        self._fitted: StepCost | None = None
        self._fitting: threading.Thread | None = None

    def take(self, record: StepRecord) -> None:
        """Note a step; called in the engine's thread after each."""
        self._unread.append(record)
        if len(self._unread) >= READ_TOGETHER:
            self._read()
        if self._fitted is not None:
            self._ledger.use_cost(self._fitted, "calibrated")
            self._fitted = None
        self._until_next -= 1
        if self._until_next <= 0 and (self._fitting is None or not self._fitting.is_alive()):
            self._between = min(2 * self._between, MOST_BETWEEN)
            self._until_next = self._between
            self._read()
            samples = [sample for kept in self._kept.values() for sample in kept]
            self._fitting = threading.Thread(target=self._fit, args=(samples,), name="calibration", daemon=True)
            self._fitting.start()

    def _read(self) -> None:
        for record in self._unread:
            sample = self._reader.read(record)
            if sample is not None and sample.seconds > 0:
                self._kept.setdefault(sample.kind, deque(maxlen=KEPT)).append(sample)
        self._unread.clear()

    def join(self, timeout_s: float) -> None:
        """Wait for the fit that runs, if one does; its result is used from the next step on."""
        if self._fitting is not None:
            self._fitting.join(timeout_s)

    def _fit(self, samples: list[Sample]) -> None:
        current = self._ledger.cost or self._start
        task = msgspec.json.encode(Task(current, samples))
        command = [sys.executable, "-m", "foliolm.ledger.fit_process"]
        try:
            done = subprocess.run(command, input=task, capture_output=True, timeout=TIMEOUT_S, check=True)
            fitted = msgspec.json.decode(done.stdout, type=StepCost | None)
        except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
            # Predictions stay as they are; serving does not depend on them.
            logger.warning("the step cost could not be fitted: %s", error)
            return
        if fitted is not None:
            self._fitted = fitted

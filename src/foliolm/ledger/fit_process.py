"""``python -m foliolm.ledger.fit_process``: one fit of the step cost, in idle time only."""

from __future__ import annotations

import contextlib
import os
import sys

import msgspec

from foliolm.ledger.self_calibration import Task


def main() -> None:
    """A `Task` on standard input; on standard output the fitted step cost, or null where it predicts no better."""
    with contextlib.suppress(OSError, AttributeError):  # not every system has the idle class
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError, AttributeError):
        os.nice(19)
    # One thread: a numerical library's pool would compete with the engine's.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    from foliolm.ledger.calibration import calibrate, step_error

    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    fitted = calibrate(task.cost, task.samples).cost
    held = task.samples[4::5]
    better = step_error(fitted, held).median < step_error(task.cost, held).median
    sys.stdout.buffer.write(msgspec.json.encode(fitted if better else None))


if __name__ == "__main__":
    main()

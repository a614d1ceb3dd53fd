"""What runs in each step, and why."""

from foliolm.scheduler.planner import ALL_DECODES
from foliolm.scheduler.scheduler import Scheduler, SchedulerStats

__all__ = ["ALL_DECODES", "Scheduler", "SchedulerStats"]

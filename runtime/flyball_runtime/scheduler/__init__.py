"""Which tokens the next step computes: waiting and running sequences in, one immutable BatchPlan out."""

from flyball_runtime.scheduler.batch import BatchPlan
from flyball_runtime.scheduler.blocked_by import BlockedBy
from flyball_runtime.scheduler.config import SchedulerConfig
from flyball_runtime.scheduler.limits import LimitsLedger
from flyball_runtime.scheduler.scheduler import Scheduler

__all__ = ["BatchPlan", "BlockedBy", "LimitsLedger", "Scheduler", "SchedulerConfig"]

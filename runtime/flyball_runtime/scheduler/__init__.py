"""Which tokens the next step computes: waiting and running sequences in, one BatchPlan out."""

from flyball_runtime.scheduler.batch import BatchPlan, BlockCopy, RowStart, Step, TableWrite
from flyball_runtime.scheduler.blocked_by import BlockedBy
from flyball_runtime.scheduler.config import SchedulerConfig
from flyball_runtime.scheduler.limits import LimitsLedger
from flyball_runtime.scheduler.scheduler import Ending, Scheduler

__all__ = [
    "BatchPlan",
    "BlockCopy",
    "BlockedBy",
    "Ending",
    "LimitsLedger",
    "RowStart",
    "Scheduler",
    "SchedulerConfig",
    "Step",
    "TableWrite",
]

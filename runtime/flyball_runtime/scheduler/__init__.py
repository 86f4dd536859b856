"""Which tokens the next step computes: waiting and running sequences in, one BatchPlan out."""

from flyball_runtime.scheduler.drafts import Drafter
from flyball_runtime.scheduler.limits import LimitsLedger, SchedulerConfig
from flyball_runtime.scheduler.plan import (
    AdapterWrite,
    BatchPlan,
    BlockCopy,
    BlockedBy,
    BlockSwap,
    Ending,
    Endings,
    RowStart,
    RowToken,
    Step,
    TableWrite,
)
from flyball_runtime.scheduler.policies import Order, Policy
from flyball_runtime.scheduler.scheduler import Scheduler

__all__ = [
    "AdapterWrite",
    "BatchPlan",
    "BlockCopy",
    "BlockSwap",
    "BlockedBy",
    "Drafter",
    "Ending",
    "Endings",
    "LimitsLedger",
    "Order",
    "Policy",
    "RowStart",
    "RowToken",
    "Scheduler",
    "SchedulerConfig",
    "Step",
    "TableWrite",
]

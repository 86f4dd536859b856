"""What operator and runtime say to each other: wire types, admin paths, ports, metric names; and how both quote foreign text.

This package imports nothing else of Flyball, so both sides can depend on it.
"""

from flyball_protocol.boot_prior import BootPrior
from flyball_protocol.evidence import Evidence, KVBlocks, LatencyWindow
from flyball_protocol.limits import (
    Envelope,
    Limits,
    LimitsAck,
    LimitsChange,
    LimitsReport,
    LimitsStatus,
    LimitsUpdate,
)

__all__ = [
    "BootPrior",
    "Envelope",
    "Evidence",
    "KVBlocks",
    "LatencyWindow",
    "Limits",
    "LimitsAck",
    "LimitsChange",
    "LimitsReport",
    "LimitsStatus",
    "LimitsUpdate",
]

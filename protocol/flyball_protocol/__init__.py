"""What operator and runtime say to each other: wire types, admin paths, ports, metric names; and how both quote foreign text.

This package imports nothing else of Flyball, so both sides can depend on it.
"""

from flyball_protocol.boot_prior import BootPrior
from flyball_protocol.evidence import (
    EVIDENCE_VERSION,
    Evidence,
    HitPoint,
    KVBlocks,
    LatencyWindow,
    Lengths,
    MemoryState,
    ObjectiveCounts,
    Share,
    decode_evidence,
)
from flyball_protocol.limits import (
    Envelope,
    Limits,
    LimitsAck,
    LimitsChange,
    LimitsReport,
    LimitsStatus,
    LimitsUpdate,
    Objectives,
)
from flyball_protocol.step_model import StepModel

__all__ = [
    "EVIDENCE_VERSION",
    "BootPrior",
    "Envelope",
    "Evidence",
    "HitPoint",
    "KVBlocks",
    "LatencyWindow",
    "Lengths",
    "Limits",
    "LimitsAck",
    "LimitsChange",
    "LimitsReport",
    "LimitsStatus",
    "LimitsUpdate",
    "MemoryState",
    "ObjectiveCounts",
    "Objectives",
    "Share",
    "StepModel",
    "decode_evidence",
]

"""What operator and runtime say to each other: wire types, admin paths, ports, metric names; and how both quote foreign text.

This package imports nothing else of Flyball, so both sides can depend on it.
"""

from flyball_protocol.endpoints import installed_version
from flyball_protocol.evidence import (
    EVIDENCE_VERSION,
    BootPrior,
    Evidence,
    HitPoint,
    KVBlocks,
    LatencyWindow,
    Lengths,
    MemoryState,
    ObjectiveCounts,
    Share,
    StepModel,
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
    "installed_version",
]

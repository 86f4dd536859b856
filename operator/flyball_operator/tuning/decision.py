"""What the slow loop decided, and why."""

from enum import StrEnum

from msgspec import Struct

from flyball_operator.tuning.state import TunerState
from flyball_protocol import Limits


class Action(StrEnum):
    HOLD = "hold"
    CHANGE = "change"


class Reason(StrEnum):
    """One word for programs: status, Events and metrics."""

    OUT_OF_BOUNDS = "OutOfBounds"
    OUT_OF_STEP = "OutOfStep"
    INTER_TOKEN_LATENCY_OVER = "InterTokenLatencyOver"
    PREEMPTING = "Preempting"
    TTFT_OVER = "TTFTOver"
    ROOM = "Room"
    STEADY = "Steady"
    NO_REPLICAS = "NoReplicas"
    NO_EVIDENCE = "NoEvidence"
    PARTIAL_EVIDENCE = "PartialEvidence"
    FEW_SAMPLES = "FewSamples"
    SETTLING = "Settling"
    COOLING_DOWN = "CoolingDown"
    NEAR_OBJECTIVE = "NearObjective"
    AT_LIMIT = "AtLimit"
    NOT_THE_LIMITS = "NotTheLimits"


class Decision(Struct, frozen=True, kw_only=True):
    """The outcome of one round.

    Attributes:
        action: change posts ``limits`` under ``revision``; hold renews them.
        why: one sentence with the numbers that led here.
        limits, revision: what should be in force afterwards; None and 0 when no replica could be read.
        state: what to remember if the decision is carried out.
    """

    action: Action
    reason: Reason
    why: str
    limits: Limits | None
    revision: int
    state: TunerState

"""What the slow loop decided, and why."""

from enum import StrEnum

from msgspec import Struct

from flyball_operator.tuning.state import TunerState
from flyball_protocol import Limits


class Action(StrEnum):
    """What is done. HOLD renews what is in force, CHANGE goes to every replica; the others are a change on trial."""

    HOLD = "hold"
    CHANGE = "change"
    TRY = "try"
    """One replica, the canary, gets the change."""
    PROMOTE = "promote"
    """The canary did no worse, so every replica gets the change."""
    ROLL_BACK = "roll back"
    """The canary did worse or could not be judged, so every replica gets what was in force before."""


class Reason(StrEnum):
    """One word for programs: status, Events and metrics."""

    OUT_OF_BOUNDS = "OutOfBounds"
    OUT_OF_STEP = "OutOfStep"
    DISAGREEMENT = "Disagreement"
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
    CANARY_SILENT = "CanarySilent"
    CANARY_NOT_WORSE = "CanaryNotWorse"
    CANARY_WORSE = "CanaryWorse"
    CANARY_RESTARTED = "CanaryRestarted"
    CANARY_UNJUDGED = "CanaryUnjudged"
    MODE_CHANGED = "ModeChanged"
    SPEC_LIMITS = "SpecLimits"
    LIMITS_REFUSED = "LimitsRefused"


class Decision(Struct, frozen=True, kw_only=True):
    """The outcome of one round.

    Attributes:
        why: one sentence with the numbers that led here.
        limits, revision: what should be in force afterwards (of TRY: at the canary); None and 0 when no replica could be read.
        state: what to remember if the decision is carried out.
    """

    action: Action
    reason: Reason
    why: str
    limits: Limits | None
    revision: int
    state: TunerState

    def wanted_at(self, pod: str) -> tuple[int, Limits] | None:
        """Return the revision and limits that replica ``pod`` should have; None while nothing was ever set."""
        trial = self.state.trial
        if trial is None:
            revision, limits = self.revision, self.limits
        elif pod == trial.canary:
            revision, limits = trial.revision, trial.limits
        else:
            revision, limits = trial.before_revision, trial.before
        return None if limits is None or revision == 0 else (revision, limits)

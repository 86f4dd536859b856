"""What the slow loop decided, and why."""

from enum import StrEnum
from typing import Literal

from msgspec import Struct

from flyball_operator.tuning.state import Forecast, TunerState
from flyball_protocol import Limits


class Action(StrEnum):
    """What is done. HOLD renews what is in force, CHANGE goes to every replica; TRY, PROMOTE and ROLL_BACK are a trial."""

    HOLD = "hold"
    CHANGE = "change"
    TRY = "try"
    """One replica, the canary, gets the change."""
    PROMOTE = "promote"
    """The canary gained what was predicted, so every replica gets the change."""
    ROLL_BACK = "roll back"
    """The change did not gain it, so every replica gets what was in force before."""
    COMMIT = "commit"
    """What is in force has served well: it stays without a lease, and is what a replica falls back to."""
    RESTORE = "restore"
    """Every replica gets what the spec says, without a lease."""


class Reason(StrEnum):
    """One word for programs: status, Events and metrics."""

    OUT_OF_BOUNDS = "OutOfBounds"
    OBJECTIVES_SET = "ObjectivesSet"
    OUT_OF_STEP = "OutOfStep"
    DISAGREEMENT = "Disagreement"
    SLO_INFEASIBLE = "SLOInfeasible"
    MEMORY_PRESSURE = "MemoryPressure"
    STEP_TARGET_PLANNED = "StepTargetPlanned"
    ROOM_TO_SPARE = "RoomToSpare"
    STEP_TARGET_TOO_SHORT = "StepTargetTooShort"
    INTER_TOKEN_LATENCY_OVER = "InterTokenLatencyOver"
    PREEMPTING = "Preempting"
    TTFT_OVER = "TTFTOver"
    KV_BLOCKED = "KVBlocked"
    KV_UNUSED = "KVUnused"
    SLOW_REPLICA = "SlowReplica"
    STEADY = "Steady"
    SETTLED = "Settled"
    NO_REPLICAS = "NoReplicas"
    NO_EVIDENCE = "NoEvidence"
    PARTIAL_EVIDENCE = "PartialEvidence"
    FEW_SAMPLES = "FewSamples"
    SETTLING = "Settling"
    COOLING_DOWN = "CoolingDown"
    BANNED = "Banned"
    NEAR_OBJECTIVE = "NearObjective"
    AT_LIMIT = "AtLimit"
    NOT_THE_LIMITS = "NotTheLimits"
    CANARY_SILENT = "CanarySilent"
    CANARY_GAINED = "CanaryGained"
    CANARY_GAINED_NOTHING = "CanaryGainedNothing"
    CANARY_WORSE = "CanaryWorse"
    CANARY_RESTARTED = "CanaryRestarted"
    CANARY_UNJUDGED = "CanaryUnjudged"
    WORSE_THAN_BEFORE = "WorseThanBefore"
    TUNING_OFF = "TuningOff"
    SPEC_LIMITS = "SpecLimits"
    LIMITS_REFUSED = "LimitsRefused"


class Findings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a round found besides its decision.

    Attributes:
        infeasible: why no limits can meet the objectives, with the least that is possible; "" when they may be met.
        slow: replicas whose steps take longer than those of the others or their own did, and by how much.
        capacity_per_s: requests a second that one replica serves within the objectives, as planned.
        arrivals_per_s: requests a second that one replica gets.
        slo: whether the objectives are met, as a condition has it: True, False, Unknown; "" when it is too close to say.
        slo_reason, slo_message: in one word, and in a sentence.
    """

    infeasible: str = ""
    slow: dict[str, str] = {}
    capacity_per_s: float | None = None
    arrivals_per_s: float | None = None
    slo: Literal["True", "False", "Unknown", ""] = "Unknown"
    slo_reason: str = "NoEvidence"
    slo_message: str = "no replica gave evidence to judge by"

    @property
    def load(self) -> float | None:
        """What arrives, as a share of the capacity; above 1 when more arrives than can be served."""
        if self.arrivals_per_s == 0.0:
            return 0.0
        if not self.capacity_per_s or self.arrivals_per_s is None:
            return None
        return self.arrivals_per_s / self.capacity_per_s

    @property
    def headroom(self) -> float | None:
        """Share of the capacity that is free; negative when more arrives than can be served."""
        return None if self.load is None else 1.0 - self.load


class Decision(Struct, frozen=True, kw_only=True):
    """The outcome of one round.

    Attributes:
        why: one sentence with the numbers that led here.
        limits, revision: what should be in force afterwards (of TRY: at the canary); None and 0 when no replica could be read.
        state: what to remember if the decision is carried out.
        forecast: of TRY, what is predicted; of PROMOTE and ROLL_BACK, what was.
        observed: of PROMOTE and ROLL_BACK, the share over the objective that the canary had; None when it was not judged.
        left_alone: replicas of another model or template, to which nothing is posted.
    """

    action: Action
    reason: Reason
    why: str
    limits: Limits | None
    revision: int
    state: TunerState
    findings: Findings = Findings()
    forecast: Forecast | None = None
    observed: float | None = None
    left_alone: tuple[str, ...] = ()

    def wanted_at(self, pod: str) -> tuple[int, Limits] | None:
        """Return the revision and limits that replica ``pod`` should have; None while nothing was ever set."""
        trial = self.state.trial
        if trial is None:
            revision, limits = self.revision, self.limits
        elif pod == trial.canary:
            revision, limits = trial.revision, trial.limits
        else:
            revision, limits = trial.before_revision, trial.before
        if limits is None or revision == 0 or pod in self.left_alone:
            return None
        return revision, self.state.own(pod, limits)

    def is_lease_at(self, pod: str) -> bool:
        """Return whether replica ``pod`` has its limits for a time only."""
        trial = self.state.trial
        if trial is None:
            return not self.state.settled
        return pod == trial.canary or not trial.before_settled

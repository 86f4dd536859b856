"""The slow loop of one deployment without I/O: evidence in, the updates to post out. It keeps the state between rounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from flyball_operator.spec import Tuning
from flyball_operator.tuning import spec_limits
from flyball_operator.tuning.decide import decide
from flyball_operator.tuning.decision import Action, Decision, Reason
from flyball_operator.tuning.evidence import PodEvidence, counts_against
from flyball_operator.tuning.knobs import as_change
from flyball_operator.tuning.record import DecisionRecord
from flyball_operator.tuning.recovery import Memory, recover
from flyball_operator.tuning.signals import objectives_of
from flyball_operator.tuning.state import TunerState
from flyball_protocol import LimitsChange, LimitsUpdate, Objectives

LEASE_ROUNDS = 6
"""Limits are a lease of this many intervals, so that replicas fall back by themselves when the operator is gone."""

MIN_LEASE_S = 30.0


@dataclass(frozen=True)
class Turn:
    """What follows from one round's evidence.

    Attributes:
        updates: what to post, by replica name.
        told: whether the decision differs from the one before.
    """

    decision: Decision
    updates: Mapping[str, LimitsUpdate]
    told: bool


class LoopCore:
    """Decides, round by round, and says what to post where.

    Args:
        memory: what an earlier slow loop left; nothing is posted until enough replicas answer to go on from there.
            None starts afresh.
    """

    def __init__(
        self, deployment: str, *, on_record: Callable[[DecisionRecord], None], memory: Memory | None = None
    ) -> None:
        self._deployment = deployment
        self._on_record = on_record
        self._memory = memory
        self._state = TunerState()
        self._told: tuple[Action, Reason, object] | None = None

    @property
    def state(self) -> TunerState:
        return self._state

    def turn(self, tuning: Tuning, evidence: Sequence[PodEvidence], *, now_s: float) -> Turn:
        """Decide once; the updates bring every replica to the limits that follow, or renew their lease."""
        evidence = tuple(evidence)
        if self._memory is not None:
            self._recover(self._memory, evidence, now_s)
        state = self._state
        decision = decide(tuning, state, evidence, now_s=now_s)
        updates: dict[str, LimitsUpdate] = {}
        if self._memory is None:
            updates = _updates(tuning, decision, evidence)
            if is_carried_out(tuning, decision):
                # Even a change that no replica took counts as made: it is not tried again before its cool-down.
                self._state = decision.state
        told = self._is_news(decision)
        if told or decision.action is not Action.HOLD:
            self._on_record(_record(self._deployment, tuning, state, evidence, now_s, decision))
        return Turn(decision, updates, told)

    def note(
        self,
        tuning: Tuning,
        evidence: tuple[PodEvidence, ...],
        decision: Decision,
        *,
        now_s: float,
        problems: tuple[str, ...],
    ) -> bool:
        """Record what became of the limits of the spec; return whether it differs from the decision before."""
        told = self._is_news(decision)
        if told or decision.action is not Action.HOLD:
            self._on_record(_record(self._deployment, tuning, self._state, evidence, now_s, decision, problems))
        return told

    def _recover(self, memory: Memory, evidence: tuple[PodEvidence, ...], now_s: float) -> None:
        state = recover(memory, evidence, now_s=now_s)
        if state is not None:
            self._state, self._memory = state, None

    def _is_news(self, decision: Decision) -> bool:
        told = (decision.action, decision.reason, decision.limits)
        news, self._told = told != self._told, told
        return news


def is_carried_out(tuning: Tuning, decision: Decision) -> bool:
    """Return whether a decision is more than a recommendation."""
    return tuning.mode != "Recommend" or decision.action in (Action.HOLD, Action.RESTORE)


def _updates(tuning: Tuning, decision: Decision, evidence: tuple[PodEvidence, ...]) -> dict[str, LimitsUpdate]:
    if tuning.mode == "Recommend" and decision.reason is not Reason.TUNING_OFF:
        return _to_count(tuning, evidence)
    lease_s = max(MIN_LEASE_S, LEASE_ROUNDS * float(tuning.interval_seconds))
    wanted = {pod.pod: decision.wanted_at(pod.pod) for pod in evidence}
    return spec_limits.for_strangers(tuning, decision, evidence) | {
        pod: LimitsUpdate(
            revision=one[0],
            limits=as_change(one[1]),
            ttl_s=lease_s if decision.is_lease_at(pod) else None,
            objectives=decision.state.objectives,
        )
        for pod, one in wanted.items()
        if one is not None
    }


def _to_count(tuning: Tuning, evidence: tuple[PodEvidence, ...]) -> dict[str, LimitsUpdate]:
    """Have the objectives counted, and no limit changed."""
    objectives = objectives_of(tuning)
    if not _is_possible(objectives):
        return {}
    return {
        one.pod: LimitsUpdate(revision=max(1, one.evidence.revision), limits=LimitsChange(), objectives=objectives)
        for one in evidence
        if one.evidence is not None and not counts_against(one.evidence, objectives)
    }


def _is_possible(objectives: Objectives) -> bool:
    return all(one is None or one > 0 for one in (objectives.ttft_s, objectives.itl_s))


def _record(
    deployment: str,
    tuning: Tuning,
    state: TunerState,
    evidence: tuple[PodEvidence, ...],
    now_s: float,
    decision: Decision,
    problems: tuple[str, ...] = (),
) -> DecisionRecord:
    return DecisionRecord(
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        deployment=deployment,
        tuning=tuning,
        state=state,
        evidence=evidence,
        now_s=now_s,
        decision=decision,
        problems=problems,
    )

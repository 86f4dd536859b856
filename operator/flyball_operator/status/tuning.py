"""What the status and the Events say about tuning. Pure.

Rounds come every few seconds and few of them are news. A change is news at once; another state is, when two rounds running
found it. What is no news leaves the status as it was, to the letter, so that it is not written again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct, field, structs

from flyball_operator.spec import Tuning
from flyball_operator.status import Condition
from flyball_operator.tuning.decision import Action, Decision, Findings, Reason
from flyball_operator.tuning.evidence import PodEvidence, fault, find_faults, pool
from flyball_operator.tuning.knobs import Knob
from flyball_operator.tuning.loop import Round
from flyball_operator.tuning.moved import Moved, is_made, moved_by, verdict_of
from flyball_operator.tuning.signals import NOTHING, Signal, Standing, objectives_of, signals
from flyball_operator.tuning.words import three_digits
from flyball_protocol import Evidence, Limits

State = Literal["Disabled", "Observing", "Adjusting", "Converged", "AtLimit", "Frozen"]

HEALTHY, SLO_MET, SLO_INFEASIBLE, AT_LIMIT = "TuningHealthy", "SLOMet", "SLOInfeasible", "AtLimit"
MAX_DECISIONS = 10
MAX_REPLICAS = 32
RECOMMEND = "recommend"
"""What a change is called in mode Recommend, where it is not made."""

_STATES: dict[Reason, State] = {
    Reason.SETTLING: "Adjusting",
    Reason.COOLING_DOWN: "Adjusting",
    Reason.STEADY: "Converged",
    Reason.SETTLED: "Converged",
    Reason.SLOW_REPLICA: "Converged",
    Reason.BANNED: "AtLimit",
    Reason.SLO_INFEASIBLE: "AtLimit",
    Reason.MEMORY_PRESSURE: "AtLimit",
    Reason.OUT_OF_BOUNDS: "Frozen",
    Reason.TUNING_OFF: "Adjusting",
    Reason.AT_LIMIT: "AtLimit",
    Reason.NOT_THE_LIMITS: "AtLimit",
    Reason.NEAR_OBJECTIVE: "AtLimit",
    Reason.FEW_SAMPLES: "Observing",
    Reason.NO_REPLICAS: "Observing",
    Reason.NO_EVIDENCE: "Frozen",
    Reason.PARTIAL_EVIDENCE: "Frozen",
    Reason.DISAGREEMENT: "Frozen",
    Reason.CANARY_SILENT: "Frozen",
    Reason.SPEC_LIMITS: "Converged",
    Reason.LIMITS_REFUSED: "Frozen",
}

MEANINGS: dict[State, str] = {
    "Disabled": "tuning is disabled",
    "Observing": "there is not enough traffic to decide on, or mode Recommend leaves the limits as they are",
    "Adjusting": "limits are being changed, or a change is given time to show",
    "Converged": "the objectives are met and no limit needs to move",
    "AtLimit": "an objective is missed and no limit can help; lastDecision says what can",
}


class ShownLimits(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Limits as status shows them, in the units of spec.tuning.limits; a step-time target has three digits."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_percent: int
    step_time_target_milliseconds: int | float | None = None

    @classmethod
    def of(cls, limits: Limits) -> "ShownLimits":
        target_ms = limits.step_time_target_ms
        return cls(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            kv_cache_percent=round(100 * limits.kv_cache_fraction),
            step_time_target_milliseconds=None if target_ms is None else three_digits(target_ms),
        )

    @property
    def in_spec(self) -> dict[str, int | float | None]:
        """The limits by their names in spec.tuning.limits."""
        return {
            name: getattr(self, ours)
            for ours, name in zip(self.__struct_fields__, self.__struct_encode_fields__, strict=True)
        }


class ShownReplica(Struct, frozen=True, kw_only=True):
    """The limits of one replica."""

    name: str
    revision: int
    target: ShownLimits
    effective: ShownLimits

    @classmethod
    def of(cls, pod: str, evidence: Evidence) -> "ShownReplica":
        return cls(
            name=pod,
            revision=evidence.revision,
            target=ShownLimits.of(evidence.target),
            effective=ShownLimits.of(evidence.effective),
        )


class ShownDecision(Struct, frozen=True, kw_only=True):
    """One decision. ``time`` is RFC 3339."""

    time: str
    action: str
    reason: str
    message: str


class ShownMove(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A limit that moved, under its name in spec.tuning.limits and in the spec's unit; None is no step-time target."""

    limit: str
    before: int | float | None = field(name="from", default=None)
    after: int | float | None = field(name="to", default=None)

    @classmethod
    def of(cls, moved: Moved) -> "ShownMove":
        limit, factor = _IN_SPEC[moved.knob]
        before, after = (
            None if value is None else three_digits(factor * value) for value in (moved.before, moved.after)
        )
        return cls(limit=limit, before=before, after=after)

    def values_of(self, knob: Knob) -> tuple[float, float] | None:
        """Return what this limit was and became, in the units of Limits; None unless it was moved from one value to another."""
        limit, factor = _IN_SPEC[knob]
        if self.limit != limit or self.before is None or self.after is None:
            return None
        return self.before / factor, self.after / factor


class OverPerMille(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Samples in a thousand that took longer than each objective; None with too few, or without an objective."""

    ttft: int | None = None
    inter_token_latency: int | None = None

    @classmethod
    def of(cls, ttft: Signal, itl: Signal) -> "OverPerMille":
        return cls(ttft=_per_mille(ttft), inter_token_latency=_per_mille(itl))


class ShownForecast(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What a trial should bring and what it brought, in samples in a thousand over one objective.

    Attributes:
        objective: ttft or interTokenLatency.
        before_per_mille, predicted_per_mille: without the change and with it, as predicted.
        observed_per_mille: at the canary; None until it is judged, and if it could not be.
    """

    objective: str
    before_per_mille: int
    predicted_per_mille: int
    observed_per_mille: int | None = None

    @classmethod
    def of(cls, decision: Decision) -> "ShownForecast | None":
        forecast, observed = decision.forecast, decision.observed
        if forecast is None:
            return None
        return cls(
            objective={"ttft": "ttft", "itl": "interTokenLatency"}[forecast.what],
            before_per_mille=round(1000 * forecast.before),
            predicted_per_mille=round(1000 * forecast.predicted),
            observed_per_mille=None if observed is None else round(1000 * observed),
        )


class MadeDecision(ShownDecision, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A decision that changed limits.

    Attributes:
        verdict: made, tried, kept, reverted or restored.
        over_per_mille: what the evidence was.
        limits: what follows; of a try, at the canary.
        forecast: of a try, what is predicted; of its end, what came too.
    """

    verdict: str = ""
    moves: tuple[ShownMove, ...] = ()
    over_per_mille: OverPerMille = OverPerMille()
    limits: ShownLimits | None = None
    forecast: ShownForecast | None = None

    @classmethod
    def of(cls, tuning: Tuning, done: Round, now: str) -> "MadeDecision":
        decision = done.decision
        return cls(
            time=now,
            action=decision.action,
            reason=decision.reason,
            message=decision.why,
            verdict=verdict_of(tuning, decision),
            moves=tuple(map(ShownMove.of, moved_by(decision, done.evidence))),
            over_per_mille=OverPerMille.of(*signals_of(tuning, done.evidence)),
            limits=None if decision.limits is None else ShownLimits.of(decision.limits),
            forecast=ShownForecast.of(decision),
        )


def _per_mille(signal: Signal) -> int | None:
    is_known = signal.standing not in (Standing.UNSET, Standing.UNKNOWN)
    return round(1000 * signal.share) if is_known else None


_IN_SPEC = {
    "max_num_seqs": ("maxNumSeqs", 1),
    "max_num_batched_tokens": ("maxNumBatchedTokens", 1),
    "kv_cache_fraction": ("kvCachePercent", 100),
    "step_time_target_ms": ("stepTimeTargetMilliseconds", 1),
}
"""By a limit's name in Limits: its name in the spec, and how many of the spec's units one is."""


class ShownCapacity(Struct, frozen=True, kw_only=True, rename="camel"):
    """What one replica can serve within the objectives, as planned, and what it gets; the API has no fractions.

    Attributes:
        headroom_percent: share of the capacity that is free; negative when more arrives than can be served.
    """

    requests_per_minute: int
    arrivals_per_minute: int
    headroom_percent: int

    @classmethod
    def of(cls, findings: Findings) -> "ShownCapacity | None":
        headroom = findings.headroom
        if headroom is None or findings.capacity_per_s is None or findings.arrivals_per_s is None:
            return None
        return cls(
            requests_per_minute=round(60 * findings.capacity_per_s),
            arrivals_per_minute=round(60 * findings.arrivals_per_s),
            headroom_percent=max(-1000, round(100 * headroom)),
        )

    def is_near(self, other: "ShownCapacity") -> bool:
        """Return whether the difference is not worth writing the status again."""
        return abs(self.headroom_percent - other.headroom_percent) < HEADROOM_STEP


HEADROOM_STEP = 10


class TuningStatus(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """status.tuning. ``decisions`` holds the last ones that changed limits, newest first."""

    state: State
    revision: int = 0
    target: ShownLimits | None = None
    effective: ShownLimits | None = None
    replicas: tuple[ShownReplica, ...] = ()
    capacity: ShownCapacity | None = None
    recommended: ShownLimits | None = None
    last_decision: ShownDecision | None = None
    decisions: tuple[MadeDecision, ...] = ()

    def as_object(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    @classmethod
    def from_object(cls, status: Mapping[str, Any]) -> "TuningStatus | None":
        """Return what ``as_object()`` wrote; None for anything else, which is then as good as nothing."""
        try:
            return msgspec.convert(status, cls)
        except msgspec.ValidationError:
            return None


DISABLED = TuningStatus(state="Disabled")


class Theme(NamedTuple):
    """What a round is about. ``reason`` is told apart only where somebody should look."""

    state: State
    reason: str
    recommended: ShownLimits | None

    @classmethod
    def of_status(cls, status: TuningStatus) -> "Theme":
        last = status.last_decision
        reason = last.reason if last is not None and status.state in _NEED_ATTENTION else ""
        return cls(status.state, reason, status.recommended)


_NEED_ATTENTION: frozenset[State] = frozenset({"AtLimit", "Frozen"})


class Report(NamedTuple):
    """What is shown, and what the last round found, shown or not.

    Attributes:
        is_news: whether the last round brought a new ``status.last_decision``.
    """

    status: TuningStatus
    slo: Condition | None = None
    seen: Theme | None = None
    slo_seen: tuple[str, str] | None = None
    is_news: bool = False

    @classmethod
    def found(cls, status: Mapping[str, Any]) -> "Report | None":
        """Return what an earlier process left in an LLMDeployment's status; None where tuning was off."""
        known = TuningStatus.from_object(status.get("tuning", {}))
        slo = next((one for one in status.get("conditions", []) if one["type"] == SLO_MET), None)
        if known is None or known.state == "Disabled":
            return None
        shown = None if slo is None else Condition(SLO_MET, slo["status"], slo["reason"], slo["message"])
        return cls(known, shown, Theme.of_status(known), None if shown is None else (shown.status, shown.reason))

    @property
    def conditions(self) -> tuple[Condition, ...]:
        if self.status.state == "Disabled":
            return ()
        told = (_healthy(self.status), _infeasible(self.status), _at_limit(self.status))
        return told if self.slo is None else (*told, self.slo)


def report(before: Report | None, tuning: Tuning, done: Round, now: str) -> Report:
    """Return what is to be shown after a round.

    Args:
        now: RFC 3339, in seconds.
    """
    theme, made = _theme(tuning, done), is_made(tuning, done.decision)
    is_news = (
        before is None
        or made
        or done.decision.action is Action.COMMIT
        or (theme == before.seen and theme != Theme.of_status(before.status))
    )
    status = _facts(before.status if before else TuningStatus(state=theme.state), tuning, done)
    if is_news:
        status = _told(status, theme, tuning, done, now)
    slo_seen, slo = (None, None) if tuning.mode == "Disabled" else _slo(before, tuning, done)
    return Report(_with_capacity(status, done.decision.findings, is_news), slo, theme, slo_seen, is_news)


def _with_capacity(status: TuningStatus, findings: Findings, is_news: bool) -> TuningStatus:
    """Return ``status`` with the capacity, when it is shown again anyway or has moved far."""
    found, shown = ShownCapacity.of(findings), status.capacity
    if found is None or (shown is not None and not is_news and found.is_near(shown)):
        return status
    return structs.replace(status, capacity=found)


def _theme(tuning: Tuning, done: Round) -> Theme:
    state = _state(tuning, done)
    reason = str(done.decision.reason) if state in _NEED_ATTENTION else ""
    recommends = done.decision.action is Action.CHANGE and not is_made(tuning, done.decision)
    if not recommends or done.decision.limits is None:
        return Theme(state, reason, None)
    return Theme("Observing", "", ShownLimits.of(done.decision.limits))


def _state(tuning: Tuning, done: Round) -> State:
    decision = done.decision
    if tuning.mode == "Disabled" and decision.reason is not Reason.LIMITS_REFUSED and not decision.state.tuned:
        return "Disabled"
    if decision.action not in (Action.HOLD, Action.COMMIT):
        return "Adjusting"
    if decision.reason in (Reason.NO_EVIDENCE, Reason.PARTIAL_EVIDENCE) and not _any_broken(done.evidence):
        return "Observing"  # replicas come and go
    state = _STATES[decision.reason]
    return "Adjusting" if decision.state.trial is not None and state != "Frozen" else state


def _any_broken(evidence: Sequence[PodEvidence]) -> bool:
    """Return whether a replica does not answer, or with nonsense; one that is young or on its way out is fine."""
    faulty = [pod for pod in evidence if fault(pod, max_age_s=float("inf"), min_uptime_s=0.0) is not None]
    return any(pod.evidence is None or (pod.evidence.ready and not pod.evidence.draining) for pod in faulty)


def _facts(status: TuningStatus, tuning: Tuning, done: Round) -> TuningStatus:
    """Return ``status`` with the limits that the round found; where nobody answered, with those known before."""
    answered = [pod.evidence for pod in done.evidence if pod.evidence is not None]
    if not answered:
        return status
    trial, newest = done.decision.state.trial, max(answered, key=lambda one: one.revision)
    if tuning.mode == "Auto" or is_made(tuning, done.decision):
        revision, target = done.decision.revision, done.decision.limits or newest.target
    else:
        revision, target = newest.revision, newest.target
    if trial is not None:
        revision, target = trial.revision, trial.before
    return structs.replace(
        status,
        revision=max(revision, status.revision),
        target=ShownLimits.of(target),
        effective=ShownLimits.of(_lowest([one.effective for one in answered])),
        replicas=_replicas(done.evidence),
    )


def _replicas(evidence: Sequence[PodEvidence]) -> tuple[ShownReplica, ...]:
    shown = [ShownReplica.of(pod.pod, pod.evidence) for pod in evidence if pod.evidence is not None]
    return tuple(sorted(shown, key=lambda one: one.name)[:MAX_REPLICAS])


def _lowest(limits: Sequence[Limits]) -> Limits:
    return Limits(
        max_num_seqs=min(one.max_num_seqs for one in limits),
        kv_cache_fraction=min(one.kv_cache_fraction for one in limits),
        max_num_batched_tokens=min(one.max_num_batched_tokens for one in limits),
        step_time_target_ms=min(
            (one.step_time_target_ms for one in limits if one.step_time_target_ms is not None), default=None
        ),
    )


def _told(status: TuningStatus, theme: Theme, tuning: Tuning, done: Round, now: str) -> TuningStatus:
    """Return ``status`` with the decision in it."""
    decision = done.decision
    action = str(decision.action) if theme.recommended is None else RECOMMEND
    made = (MadeDecision.of(tuning, done, now),) if is_made(tuning, decision) else ()
    return structs.replace(
        status,
        state=theme.state,
        recommended=theme.recommended,
        last_decision=ShownDecision(time=now, action=action, reason=decision.reason, message=decision.why),
        decisions=(*made, *status.decisions)[:MAX_DECISIONS],
    )


def _healthy(status: TuningStatus) -> Condition:
    if status.state != "Frozen":
        return Condition(HEALTHY, "True", status.state, MEANINGS[status.state])
    last = status.last_decision
    reason, message = (
        ("Frozen", "evidence is missing or contradictory") if last is None else (last.reason, last.message)
    )
    return Condition(HEALTHY, "False", reason, f"no limit is moved until this ends: {message}")


def _infeasible(status: TuningStatus) -> Condition:
    last = status.last_decision
    if last is None or last.reason != Reason.SLO_INFEASIBLE:
        return Condition(
            SLO_INFEASIBLE, "False", "Feasible", "nothing is known that keeps the objectives from being met"
        )
    return Condition(SLO_INFEASIBLE, "True", last.reason, last.message)


def _at_limit(status: TuningStatus) -> Condition:
    last = status.last_decision
    if status.state != "AtLimit" or last is None:
        return Condition(AT_LIMIT, "False", status.state, "no objective is missed for which no limit can help")
    return Condition(AT_LIMIT, "True", last.reason, last.message)


def _slo(before: Report | None, tuning: Tuning, done: Round) -> tuple[tuple[str, str] | None, Condition | None]:
    """Return status and reason that the round speaks for, and the condition to show."""
    findings, shown = done.decision.findings, before.slo if before else None
    if not findings.slo:  # too close to say
        return before.slo_seen if before else None, shown
    found = Condition(SLO_MET, findings.slo, findings.slo_reason, findings.slo_message)
    seen = (found.status, found.reason)
    is_settled = shown is None or (before is not None and seen == before.slo_seen)
    is_change = shown is None or seen != (shown.status, shown.reason)
    return seen, found if is_settled and is_change else shown


def signals_of(tuning: Tuning, evidence: Sequence[PodEvidence]) -> tuple[Signal, Signal]:
    """Return how TTFT and inter-token latency do in the window, by the evidence that can be decided on."""
    faults = find_faults(evidence, interval_s=tuning.interval_seconds)
    usable = [pod.evidence for pod in evidence if pod.evidence is not None and pod.pod not in faults]
    return signals(tuning, pool(usable, objectives_of(tuning)).counts if usable else NOTHING)

"""Everything that a rule looks at, and how a rule says what it decides. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Literal

from msgspec import structs

from flyball_operator.spec import Tuning
from flyball_operator.tuning.decision import Action, Decision, Findings, Reason
from flyball_operator.tuning.evidence import (
    PodEvidence,
    Pooled,
    Seen,
    common_step,
    counts_against,
    family,
    find_faults,
    in_force,
    mean_step,
    of_one_family,
    pool,
)
from flyball_operator.tuning.knobs import Knob, Span, changed, contradictions, moved_in_words, spans
from flyball_operator.tuning.plan import Plan, least_itl_s, least_ttft_s, make_plan
from flyball_operator.tuning.signals import BUDGET, Counts, Signal, Standing, objectives_of, signals, total
from flyball_operator.tuning.state import WIDEST_WINDOW_S, Direction, Forecast, Move, Report, TunerState, finite
from flyball_operator.tuning.words import duration
from flyball_protocol import Evidence, Lengths, Limits, Objectives, StepModel

BINDING_SHARE = 0.10
"""A knob is binding when it held the head of the queue back in more than this share of steps."""

MIN_EVIDENCE = 0.5
"""Nothing is decided on fewer than this share of the replicas."""

SLOW_FACTOR = 1.35
"""A replica is slow when a step takes this many times as long as it did, or as on the others."""

LEARNED_STEPS = 3000
"""A step model is compared with what it was only when it has settled on so many steps: early ones still move."""

FOLLOW, FOLLOW_SLOW = 0.05, 0.01
"""How far the known time of a replica's step follows each round; less while it is slow."""


@dataclass(frozen=True)
class Situation:
    """The replicas that can be decided on, and what follows from their evidence.

    Attributes:
        usable: evidence by replica, of one model and template, without fault.
        answered: with the faulty ones that answered.
        faults: why the others cannot be decided on.
        strangers: replicas of another model or template.
        revision, limits: what should be in force.
    """

    tuning: Tuning
    state: TunerState
    now_s: float
    usable: Mapping[str, Evidence]
    answered: Mapping[str, Evidence]
    faults: Mapping[str, str]
    strangers: tuple[str, ...]
    num_replicas: int
    revision: int
    limits: Limits

    @cached_property
    def objectives(self) -> Objectives:
        return objectives_of(self.tuning)

    @cached_property
    def pooled(self) -> Pooled:
        """The replicas that are not slow; a slow one says nothing about the limits."""
        even = [one for pod, one in self.usable.items() if pod not in self.slow]
        return pool(even or list(self.usable.values()), self.objectives)

    @cached_property
    def spans(self) -> dict[Knob, Span]:
        return spans(self.tuning.bounds, self.pooled.envelope, self.objectives, self.plan)

    @cached_property
    def contradictions(self) -> list[str]:
        return contradictions(self.tuning.bounds, self.pooled.envelope)

    @cached_property
    def counts(self) -> Counts:
        """The counts of the window; with little traffic, those of earlier windows under the same limits too."""
        counts = self.pooled.counts
        if all(one.standing is not Standing.UNKNOWN for one in signals(self.tuning, counts)):
            return counts
        return counts + total(one.counts for one in earlier(self.state.reports, self.now_s, self.pooled.window_s))

    @cached_property
    def ttft(self) -> Signal:
        return signals(self.tuning, self.counts)[0]

    @cached_property
    def itl(self) -> Signal:
        return signals(self.tuning, self.counts)[1]

    @property
    def standings(self) -> set[Standing]:
        return {self.ttft.standing, self.itl.standing} - {Standing.UNSET}

    @cached_property
    def lengths(self) -> Lengths | None:
        return mean_lengths([one.lengths for one in self.usable.values() if one.lengths is not None])

    @cached_property
    def models(self) -> dict[str, StepModel]:
        """The step models that can be planned with."""
        return {
            pod: one.step_model
            for pod, one in self.usable.items()
            if one.step_model is not None and one.step_model.settled
        }

    @cached_property
    def typical_s(self) -> dict[str, float]:
        """What each model says of the same step, one that all of them have learned from."""
        step = common_step(self.usable[pod] for pod in self.models)
        return {pod: one.predict(*step) for pod, one in self.models.items()}

    @cached_property
    def slow(self) -> dict[str, str]:
        """Replicas whose steps take longer than their own did, or (of three or more) than the others' do."""
        found: dict[str, str] = {}
        earlier = {one.pod: one for one in self.state.seen}
        learned_s = {pod: step_s for pod, step_s in self.typical_s.items() if self._has_learned(pod)}
        for pod, step_s in learned_s.items():
            others_s = [other_s for name, other_s in learned_s.items() if name != pod]
            longer = self._longer_than(earlier[pod], pod) if pod in earlier else 0.0
            if longer > SLOW_FACTOR:
                found[pod] = f"its steps take {longer:.1f} times as long as they did"
            elif len(others_s) >= 2 and 0.0 < SLOW_FACTOR * median(others_s) < step_s and not self._other_device(pod):
                found[pod] = f"its steps take {step_s / median(others_s):.1f} times as long as the others'"
        return found

    def _longer_than(self, before: Seen, pod: str) -> float:
        """Return how many times as long a step of a replica takes as before; 0.0 if that is not known."""
        return self.models[pod].predict(*before.step) / before.step_s if before.step and before.step_s > 0.0 else 0.0

    def _has_learned(self, pod: str) -> bool:
        """Tell whether a replica's step model is far enough to be compared, by steps that the replica computes now."""
        is_late = pod in self.models and self.models[pod].num_steps >= LEARNED_STEPS
        return is_late and mean_step(self.usable[pod]) is not None

    def _other_device(self, pod: str) -> bool:
        return any(one.key != self.usable[pod].key for one in self.usable.values())

    @cached_property
    def plan(self) -> Plan | None:
        """The plan for a replica with the median model; None before models and lengths are known."""
        even = {pod: step_s for pod, step_s in self.typical_s.items() if pod not in self.slow} or self.typical_s
        return self.plan_of(sorted(even, key=lambda pod: (even[pod], pod))[len(even) // 2]) if even else None

    def plan_of(self, pod: str) -> Plan | None:
        """Return the plan for one replica."""
        if pod not in self.models or self.lengths is None:
            return None
        one = self.usable[pod]
        return make_plan(
            self.models[pod],
            self.lengths,
            self.objectives,
            one.envelope,
            kv_tokens=one.kv_blocks.capacity * one.envelope.block_size,
            trim=self.state.trim,
        )

    @cached_property
    def infeasible(self) -> str:
        """Why no limits can meet the objectives, with the least that is possible; "" when they may be met."""
        for name, asked_s in (
            ("time to first token", self.objectives.ttft_s),
            ("inter-token latency", self.objectives.itl_s),
        ):
            if asked_s is not None and not asked_s > 0:
                return f"{name} of {duration(asked_s)}: an objective has to be above 0"
        if why := _interrupted(list(self.models.values()), self.objectives):
            return why
        if not self.models or self.lengths is None:
            return ""
        model = min(self.models.values(), key=lambda one: one.predict(256, 1, 1024, 65536))
        return _infeasible(model, self.lengths, self.objectives, self.pooled.envelope.max_num_batched_tokens)

    @cached_property
    def findings(self) -> Findings:
        slo, reason, message = self._slo()
        capacity_per_s = math.inf if self.plan is None else self.plan.capacity_per_s
        return Findings(
            infeasible=self.infeasible,
            slow=dict(self.slow),
            capacity_per_s=None if math.isinf(capacity_per_s) else capacity_per_s,
            arrivals_per_s=self.pooled.arrivals_per_s,
            slo=slo,
            slo_reason=reason,
            slo_message=message,
        )

    def _slo(self) -> tuple[Literal["True", "False", "Unknown", ""], str, str]:
        by_urgency = ((self.itl, Reason.INTER_TOKEN_LATENCY_OVER), (self.ttft, Reason.TTFT_OVER))
        for one, reason in by_urgency:
            if one.standing is Standing.OVER:
                return "False", reason, str(one)
        if Standing.UNKNOWN in self.standings:
            few = (one for one, _ in by_urgency if one.standing is Standing.UNKNOWN)
            listed = ", ".join(f"{one.counted.num} of {one.min_samples} {one.what}" for one in few)
            return "Unknown", Reason.FEW_SAMPLES, f"too few samples to judge by: {listed}"
        if Standing.NEAR in self.standings:
            return "", "", ""
        return "True", "Met", f"fewer than {BUDGET:.0%} of samples took longer than the objectives allow"

    @property
    def behind(self) -> tuple[str, ...]:
        return tuple(sorted(pod for pod, one in self.usable.items() if one.revision < self.revision))

    @property
    def next_revision(self) -> int:
        """A revision above any that a replica reports, usable or not."""
        return 1 + max(self.revision, *(one.revision for one in self.answered.values()))

    @property
    def blocked_by(self) -> Mapping[str, float]:
        return self.pooled.blocked_by

    @cached_property
    def binding(self) -> list[Knob]:
        """Knobs that hold the head of the queue back, most often blocked first."""
        share = {knob: knob.waited_for(self.blocked_by) for knob in Knob}
        return sorted((knob for knob in Knob if share[knob] > BINDING_SHARE), key=lambda knob: -share[knob])

    @cached_property
    def is_fresh(self) -> bool:
        """Whether the counts cover only time since the last change."""
        last = self.state.last_move
        since_s = math.inf if last is None else self.now_s - last.at_s
        return since_s >= min(self.pooled.counted_s or math.inf, self.pooled.window_s)

    # What a rule can say

    def hold(self, reason: Reason, why: str, *, state: TunerState | None = None) -> Decision:
        return Decision(
            action=Action.HOLD,
            reason=reason,
            why=why,
            limits=self.limits,
            revision=self.revision,
            state=state or self.remembered,
            findings=self.findings,
        )

    def change(
        self,
        reason: Reason,
        why: str,
        values: Mapping[Knob, float],
        direction: Direction,
        *,
        forecast: Forecast | None = None,
        state: TunerState | None = None,
    ) -> Decision:
        """Give every replica these values, at once."""
        moves = [
            Move(
                knob=knob,
                direction=direction,
                before=finite(knob.of(self.limits)),
                after=finite(value),
                at_s=self.now_s,
            )
            for knob, value in values.items()
        ]
        moved = ", ".join(moved_in_words(knob, knob.of(self.limits), value) for knob, value in values.items())
        limits, revision = changed(self.limits, values), self.next_revision
        return Decision(
            action=Action.CHANGE,
            reason=reason,
            why=f"{moved}: {why}" if moved else why,
            limits=limits,
            revision=revision,
            state=(state or self.remembered).after(moves, limits, revision),
            findings=self.findings,
            forecast=forecast,
        )

    @cached_property
    def remembered(self) -> TunerState:
        """The state with what this round found out."""
        state, window_s = self.state, self.pooled.window_s
        reports = tuple(one for one in state.reports if self.now_s - one.at_s < WIDEST_WINDOW_S)
        if not reports or self.now_s - reports[-1].at_s >= window_s:
            is_whole = self.is_fresh and self.pooled.counted_s >= window_s
            reports = (*reports, Report(self.now_s, self.pooled.counts)) if is_whole else reports
        return structs.replace(
            state, revision=self.revision, limits=self.limits, seen=self._seen(), reports=reports, family=self._family()
        )

    def _family(self) -> str:
        return family(next(iter(self.usable.values())))

    def _seen(self) -> tuple[Seen, ...]:
        before = {one.pod: one for one in self.state.seen}
        return tuple(self._see(pod, one, before.get(pod)) for pod, one in sorted(self.usable.items()))

    def _see(self, pod: str, evidence: Evidence, before: Seen | None) -> Seen:
        if before is None or before.boot_id != evidence.boot_id:
            before = Seen(pod, evidence.boot_id, evidence.uptime_s)
        step = before.step or mean_step(evidence)
        if step is None or not self._has_learned(pod):
            return structs.replace(before, uptime_s=evidence.uptime_s)
        step_s, share = self.models[pod].predict(*step), FOLLOW_SLOW if pod in self.slow else FOLLOW
        follows_s = before.step_s + share * (step_s - before.step_s) if before.step_s else step_s
        return Seen(pod, evidence.boot_id, evidence.uptime_s, step, follows_s)


def look(tuning: Tuning, state: TunerState, evidence: Sequence[PodEvidence], now_s: float) -> Situation | Decision:
    """Return the situation, or the decision to hold where there is too little to look at."""
    kind, own, strangers = of_one_family(evidence, state.family)
    if state.family and kind != state.family:
        state = TunerState(revision=state.revision, tuned=state.tuned, family=kind)
    seen = {one.pod: one for one in state.seen}
    # A replica may be too young to judge by, and still be told the objectives.
    min_uptime_s = 0.0 if state.objectives is None else None
    faults = find_faults(own, interval_s=tuning.interval_seconds, seen=seen, min_uptime_s=min_uptime_s)
    answered = {one.pod: one.evidence for one in own if one.evidence is not None}
    usable = {pod: one for pod, one in answered.items() if pod not in faults}
    if not usable or len(usable) < MIN_EVIDENCE * len(own):
        return structs.replace(cannot_decide(state, own, faults), left_alone=strangers)
    revision, limits = in_force(list(usable.values()), state.revision, state.limits)
    objectives = objectives_of(tuning)
    if state.objectives is None and all(counts_against(one, objectives) for one in usable.values()):
        state = structs.replace(state, objectives=objectives)
    return Situation(
        tuning=tuning,
        state=state,
        now_s=now_s,
        usable=usable,
        answered=answered,
        faults=faults,
        strangers=strangers,
        num_replicas=len(own),
        revision=revision,
        limits=limits,
    )


def cannot_decide(state: TunerState, evidence: Sequence[PodEvidence], faults: Mapping[str, str]) -> Decision:
    """Hold on missing evidence. Limits that are already out are still renewed with whoever answers."""
    answered = [pod.evidence for pod in evidence if pod.evidence is not None]
    listed = "; ".join(f"{pod}: {why}" for pod, why in sorted(faults.items()))
    if not evidence:
        reason, why = Reason.NO_REPLICAS, "no replica is ready"
    elif len(faults) == len(evidence):
        reason, why = Reason.NO_EVIDENCE, f"no usable evidence ({listed})"
    else:
        reason = Reason.PARTIAL_EVIDENCE
        why = f"only {len(evidence) - len(faults)} of {len(evidence)} replicas have usable evidence ({listed})"
    revision, limits = in_force(answered, state.revision, state.limits) if answered else (0, None)
    return Decision(action=Action.HOLD, reason=reason, why=why, limits=limits, revision=revision, state=state)


def earlier(reports: Sequence[Report], now_s: float, window_s: float) -> list[Report]:
    """Return the reports that do not overlap with the window that ends now, and are not too old to be added to it."""
    return [one for one in reports if window_s <= now_s - one.at_s <= WIDEST_WINDOW_S - window_s]


def mean_lengths(lengths: Sequence[Lengths]) -> Lengths | None:
    """Return the lengths of several replicas' requests together; None without requests."""
    num_requests = sum(one.num_requests for one in lengths)
    if num_requests <= 0:
        return None
    names = [name for name in Lengths.__struct_fields__ if name != "num_requests"]
    means = {name: sum(one.num_requests * getattr(one, name) for one in lengths) / num_requests for name in names}
    return Lengths(num_requests=num_requests, **means)


INTERRUPTED_SHARE = 1.5 * BUDGET
"""If more steps than this are interrupted on every replica, for longer than the objective, no limits can meet a p95."""


def _interrupted(models: Sequence[StepModel], objectives: Objectives) -> str:
    """Return a sentence if steps are interrupted too often for the inter-token objective; "" otherwise."""
    least = min(models, key=lambda one: one.interrupted_share, default=None)
    if least is None or objectives.itl_s is None or least.interrupted_share <= INTERRUPTED_SHARE:
        return ""
    if least.interruption_s <= objectives.itl_s:
        return ""
    often = f"{least.interrupted_share:.0%} of steps are interrupted for about {duration(least.interruption_s)}"
    return f"inter-token latency of {duration(objectives.itl_s)}: {often} (by a CPU limit? by another process?)"


def _infeasible(model: StepModel, lengths: Lengths, objectives: Objectives, most_tokens: int) -> str:
    itl_s, ttft_s = objectives.itl_s, objectives.ttft_s
    least_s = least_itl_s(model, lengths)
    if itl_s is not None and itl_s < least_s:
        return f"inter-token latency of {duration(itl_s)}: one sequence alone needs {duration(least_s)}"
    if ttft_s is None:
        return ""
    least_s = least_ttft_s(model, lengths, None, most_tokens)
    if ttft_s < least_s:
        return f"time to first token of {duration(ttft_s)}: a mean prompt alone needs {duration(least_s)}"
    least_s = least_ttft_s(model, lengths, itl_s, most_tokens)
    if itl_s is not None and ttft_s < least_s:
        return (
            f"the objectives contradict each other: a mean prompt whose steps stay within {duration(itl_s)} needs "
            f"{duration(least_s)} to its first token, and the objective is {duration(ttft_s)}"
        )
    return ""

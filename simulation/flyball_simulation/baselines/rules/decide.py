"""decide(): from symptom to move. Pure, so any recorded decision can be replayed.

The order of the rules is the order of urgency; the first that applies is the decision. A knob is raised only while it is
what holds the head of the queue back (``blocked_by``), and never while inter-token latency has no room.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flyball_protocol import Evidence, Limits
from flyball_simulation.baselines.rules.decision import Action, Decision, Reason
from flyball_simulation.baselines.rules.evidence import PodEvidence, Pooled, fault, pool
from flyball_simulation.baselines.rules.knobs import Knob, Span, changed, cut, raised, spans
from flyball_simulation.baselines.rules.signals import Signal, Standing, signals
from flyball_simulation.baselines.rules.spec import Tuning
from flyball_simulation.baselines.rules.state import Direction, Move, TunerState

BINDING_SHARE = 0.10
"""A knob is binding when it held the head of the queue back in more than this share of steps."""

RECOMPUTED_SHARE = 0.01
"""More computed tokens than this share thrown away by preemption: too many sequences for the KV cache."""

MIN_EVIDENCE = 0.5
"""Nothing is decided on fewer than this share of the replicas."""

MAX_AGE_INTERVALS = 3


@dataclass(frozen=True)
class _Situation:
    """Everything a rule looks at."""

    tuning: Tuning
    state: TunerState
    now_s: float
    view: Pooled
    ttft: Signal
    itl: Signal
    spans: dict[Knob, Span]
    behind: tuple[str, ...]

    @property
    def limits(self) -> Limits:
        return self.view.limits

    @property
    def binding(self) -> list[Knob]:
        """Knobs that hold the head of the queue back, most often blocked first."""
        share = self.view.blocked_by
        return sorted(
            (knob for knob in Knob if share.get(knob.blocked_by, 0.0) > BINDING_SHARE),
            key=lambda knob: -share[knob.blocked_by],
        )

    def hold(self, reason: Reason, why: str) -> Decision:
        return Decision(
            action=Action.HOLD,
            reason=reason,
            why=why,
            limits=self.limits,
            revision=self.view.revision,
            state=self.state,
        )

    def change(self, reason: Reason, why: str, values: dict[Knob, float], direction: Direction) -> Decision:
        moves = [
            Move(knob=knob, direction=direction, before=knob.of(self.limits), after=value, at_s=self.now_s)
            for knob, value in values.items()
        ]
        moved = ", ".join(f"{move.knob} {move.before:g} -> {move.after:g}" for move in moves)
        limits, revision = changed(self.limits, values), self.view.revision + 1
        return Decision(
            action=Action.CHANGE,
            reason=reason,
            why=f"{moved}: {why}" if moved else why,
            limits=limits,
            revision=revision,
            state=self.state.after(moves, limits, revision),
        )

    def move(self, knob: Knob, value: float, direction: Direction, reason: Reason, why: str) -> Decision:
        """Make a move, unless its cool-down still runs."""
        left_s = self.state.cooldown_left_s(knob, direction, now_s=self.now_s, cooldown_s=self.tuning.cooldown_seconds)
        if left_s > 0:
            return self.hold(Reason.COOLING_DOWN, f"{why}; the next {direction} of {knob} may come in {left_s:.0f} s")
        return self.change(reason, why, {knob: value}, direction)


def decide(tuning: Tuning, state: TunerState, evidence: Sequence[PodEvidence], *, now_s: float) -> Decision:
    """Decide on the limits of one deployment.

    Args:
        tuning: objectives, bounds and pace.
        state: from the last decision that was carried out.
        evidence: one entry for each replica that is expected to serve, whether it answered or not.
        now_s: seconds on any clock that only goes forward.
    """
    faults = find_faults(tuning, evidence)
    usable = {pod.pod: pod.evidence for pod in evidence if pod.evidence is not None and pod.pod not in faults}
    if not usable or len(usable) < MIN_EVIDENCE * len(evidence):
        return _cannot_decide(state, evidence, faults)
    situation = _situation(tuning, state, usable, now_s)
    for rule in _RULES:
        decision = rule(situation)
        if decision is not None:
            return decision
    return situation.hold(Reason.STEADY, f"nothing to do: {_objectives(situation)}")


def find_faults(tuning: Tuning, evidence: Sequence[PodEvidence]) -> dict[str, str]:
    """Return why replicas cannot be decided on, by their names; those that can be are left out."""
    interval_s = tuning.interval_seconds
    found = {pod.pod: fault(pod, max_age_s=MAX_AGE_INTERVALS * interval_s, min_uptime_s=interval_s) for pod in evidence}
    return {pod: why for pod, why in found.items() if why}


def _situation(tuning: Tuning, state: TunerState, usable: Mapping[str, Evidence], now_s: float) -> _Situation:
    view = pool(list(usable.values()), state)
    ttft, itl = signals(tuning, view.ttft, view.itl)
    return _Situation(
        tuning=tuning,
        state=state,
        now_s=now_s,
        view=view,
        ttft=ttft,
        itl=itl,
        spans=spans(tuning.bounds, view.envelope, view.limits),
        behind=tuple(sorted(pod for pod, one in usable.items() if one.revision < view.revision)),
    )


def _cannot_decide(state: TunerState, evidence: Sequence[PodEvidence], faults: dict[str, str]) -> Decision:
    """Hold on missing evidence. Limits that are already out are still renewed with whoever answers."""
    answered = [pod.evidence for pod in evidence if pod.evidence is not None]
    view = pool(answered, state) if answered else None
    listed = "; ".join(f"{pod}: {why}" for pod, why in sorted(faults.items()))
    if not evidence:
        reason, why = Reason.NO_REPLICAS, "no replica is ready"
    elif len(faults) == len(evidence):
        reason, why = Reason.NO_EVIDENCE, f"no usable evidence ({listed})"
    else:
        reason = Reason.PARTIAL_EVIDENCE
        why = f"only {len(evidence) - len(faults)} of {len(evidence)} replicas have usable evidence ({listed})"
    return Decision(
        action=Action.HOLD,
        reason=reason,
        why=why,
        limits=view.limits if view else None,
        revision=view.revision if view else 0,
        state=state,
    )


def _into_bounds(now: _Situation) -> Decision | None:
    values = {knob: span.clamp(knob.of(now.limits)) for knob, span in now.spans.items()}
    outside = {knob: value for knob, value in values.items() if value != knob.of(now.limits)}
    if not outside:
        return None
    return now.change(Reason.OUT_OF_BOUNDS, "the spec's bounds and the envelope say so", outside, Direction.CLAMP)


def _into_step(now: _Situation) -> Decision | None:
    if now.view.in_step:
        return None
    why = f"not every replica at revision {now.view.revision} has its limits (a lease ran out?), so they are set again"
    return now.change(Reason.OUT_OF_STEP, why, {}, Direction.CLAMP)


def _wait_for_agreement(now: _Situation) -> Decision | None:
    """Hold while some replicas serve under older limits: their evidence says nothing about the ones in force."""
    if not now.behind:
        return None
    why = f"replicas disagree: {', '.join(now.behind)} behind revision {now.view.revision}, which is in force"
    return now.hold(Reason.DISAGREEMENT, why)


def _let_it_settle(now: _Situation) -> Decision | None:
    """Hold while the window still holds samples from before the last move: they would be counted against the new limits."""
    last = now.state.last_move
    if last is None or now.now_s - last.at_s >= now.view.window_s:
        return None
    left_s = now.view.window_s - (now.now_s - last.at_s)
    return now.hold(
        Reason.SETTLING, f"the evidence still covers time before the last change, for another {left_s:.0f} s"
    )


def _itl_over(now: _Situation) -> Decision | None:
    if now.itl.standing is not Standing.OVER:
        return None
    effect = {
        Knob.MAX_NUM_BATCHED_TOKENS: "shorter prefill chunks hold decodes up less",
        Knob.MAX_NUM_SEQS: "fewer sequences share a step, and the token budget cannot go lower",
    }
    for knob in (Knob.MAX_NUM_BATCHED_TOKENS, Knob.MAX_NUM_SEQS):
        value = cut(knob, knob.of(now.limits), now.spans[knob])
        if value is not None:
            return now.move(knob, value, Direction.CUT, Reason.INTER_TOKEN_LATENCY_OVER, f"{now.itl}; {effect[knob]}")
    return now.hold(
        Reason.AT_LIMIT, f"{now.itl}, and every limit is at its lower bound; add replicas or relax the objective"
    )


def _preempting(now: _Situation) -> Decision | None:
    share = now.view.recomputed_share
    value = cut(Knob.MAX_NUM_SEQS, now.limits.max_num_seqs, now.spans[Knob.MAX_NUM_SEQS])
    if share <= RECOMPUTED_SHARE or value is None:
        return None
    why = f"{share:.1%} of computed tokens were thrown away by preemption; fewer sequences fit the KV cache better"
    return now.move(Knob.MAX_NUM_SEQS, value, Direction.CUT, Reason.PREEMPTING, why)


def _ttft_over(now: _Situation) -> Decision | None:
    if now.ttft.standing is not Standing.OVER:
        return None
    if now.itl.standing not in (Standing.UNSET, Standing.MET, Standing.CLEAR):
        reason = Reason.FEW_SAMPLES if now.itl.standing is Standing.UNKNOWN else Reason.NEAR_OBJECTIVE
        return now.hold(reason, f"{now.ttft}, but a raise could push inter-token latency over: {now.itl}")
    if not now.binding:
        blocked = _shares(now.view.blocked_by) or "nothing"
        return now.hold(
            Reason.NOT_THE_LIMITS, f"{now.ttft}, but no limit holds the queue back ({blocked}); add replicas"
        )
    return _raise_binding(now, Reason.TTFT_OVER, str(now.ttft)) or now.hold(
        Reason.AT_LIMIT, f"{now.ttft}, and {', '.join(now.binding)} cannot go higher; add replicas"
    )


def _room(now: _Situation) -> Decision | None:
    standings = {now.ttft.standing, now.itl.standing} - {Standing.UNSET}
    if not now.binding or standings != {Standing.CLEAR}:
        return None
    return _raise_binding(now, Reason.ROOM, f"objectives have room ({_objectives(now)})")


def _raise_binding(now: _Situation, reason: Reason, why: str) -> Decision | None:
    for knob in now.binding:
        value = raised(knob, knob.of(now.limits), now.spans[knob], now.tuning.max_step_percent / 100)
        if value is not None:
            blocked = f"{now.view.blocked_by[knob.blocked_by]:.0%} of steps waited for {knob}"
            return now.move(knob, value, Direction.RAISE, reason, f"{why}; {blocked}")
    return None


def _too_few_samples(now: _Situation) -> Decision | None:
    few = [one for one in (now.ttft, now.itl) if one.standing is Standing.UNKNOWN]
    if not few:
        return None
    counts = ", ".join(f"{one.num_samples} of {one.min_samples} {one.what}" for one in few)
    return now.hold(Reason.FEW_SAMPLES, f"too few samples in the last {now.view.window_s:.0f} s: {counts}")


_RULES: tuple[Callable[[_Situation], Decision | None], ...] = (
    _into_bounds,
    _into_step,
    _wait_for_agreement,
    _let_it_settle,
    _itl_over,
    _preempting,
    _ttft_over,
    _room,
    _too_few_samples,
)


def _objectives(now: _Situation) -> str:
    return "; ".join(str(one) for one in (now.ttft, now.itl) if one.objective_s is not None)


def _shares(blocked_by: dict[str, float]) -> str:
    return ", ".join(f"{reason} {share:.0%}" for reason, share in sorted(blocked_by.items()))

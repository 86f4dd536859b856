"""A change is tried on one replica first, judged there, then taken everywhere or taken back. Pure, like decide().

The others go on serving the same traffic under the limits in force, so the comparison with them leaves out what the
traffic does. A canary that cannot be judged is waited for, and every round says so; a trial that takes too long is
taken back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec import structs

from flyball_protocol import Evidence
from flyball_simulation.baselines.rules.decide import MIN_EVIDENCE, RECOMPUTED_SHARE, decide, find_faults
from flyball_simulation.baselines.rules.decision import Action, Decision, Reason
from flyball_simulation.baselines.rules.evidence import PodEvidence, Pooled, pool, tightest
from flyball_simulation.baselines.rules.knobs import spans
from flyball_simulation.baselines.rules.signals import Signal, Standing, signals, wilson
from flyball_simulation.baselines.rules.spec import Tuning
from flyball_simulation.baselines.rules.state import Trial, TunerState

PATIENCE_WINDOWS = 5
"""A trial that has no verdict after so many windows of evidence is taken back."""

AT_ONCE = frozenset({Reason.OUT_OF_BOUNDS, Reason.OUT_OF_STEP})
"""Changes that go to every replica at once: the spec's word, and limits that were in force before."""


def advance(tuning: Tuning, state: TunerState, evidence: Sequence[PodEvidence], *, now_s: float) -> Decision:
    """Decide as ``decide()`` does, but try a change on one replica first where there are several.

    Arguments are those of ``decide()``; while ``state.trial`` is set, the trial alone is decided on. A mode that changes
    nothing takes it back, because nobody would judge it.
    """
    if state.trial is not None:
        trying = _Situation(tuning, state, state.trial, tuple(evidence), now_s)
        return _judge(trying) if tuning.mode == "Auto" else trying.take_back(Reason.MODE_CHANGED, f"mode {tuning.mode}")
    decision = decide(tuning, state, evidence, now_s=now_s)
    if tuning.mode != "Auto" or not _is_experiment(decision) or len(evidence) < 2:
        return decision
    return _try_first(decision, state, _choose(tuning, evidence), now_s)


def _is_experiment(decision: Decision) -> bool:
    return decision.action is Action.CHANGE and decision.reason not in AT_ONCE


def _choose(tuning: Tuning, evidence: Sequence[PodEvidence]) -> tuple[str, Evidence]:
    """Return name and evidence of the replica with the median traffic, which is most like the others."""
    faults = find_faults(tuning, evidence)
    usable = [(pod.pod, pod.evidence) for pod in evidence if pod.evidence is not None and pod.pod not in faults]
    return sorted(usable, key=lambda one: (one[1].ttft.count, one[0]))[len(usable) // 2]


def _try_first(decision: Decision, state: TunerState, canary: tuple[str, Evidence], now_s: float) -> Decision:
    assert decision.limits is not None  # of every CHANGE
    pod, evidence = canary
    before, before_revision = evidence.target, decision.revision - 1
    trial = Trial(
        canary=pod,
        move=decision.state.moves[-1],
        limits=decision.limits,
        revision=decision.revision,
        before=before,
        before_revision=before_revision,
        started_s=now_s,
    )
    tried = TunerState(revision=before_revision, limits=before, moves=state.moves, trial=trial)
    why = f"{decision.why}; tried on {pod} first"
    return structs.replace(decision, action=Action.TRY, why=why, state=tried)


@dataclass(frozen=True)
class _Situation:
    """Everything a verdict looks at."""

    tuning: Tuning
    state: TunerState
    trial: Trial
    evidence: tuple[PodEvidence, ...]
    now_s: float

    @cached_property
    def answered(self) -> dict[str, Evidence]:
        return {pod.pod: pod.evidence for pod in self.evidence if pod.evidence is not None}

    @cached_property
    def faults(self) -> dict[str, str]:
        return find_faults(self.tuning, self.evidence)

    @property
    def canary(self) -> Evidence | None:
        return self.answered.get(self.trial.canary)

    @property
    def num_others(self) -> int:
        return sum(pod.pod != self.trial.canary for pod in self.evidence)

    @cached_property
    def others(self) -> list[Evidence]:
        """Of the replicas that serve, without fault, under the limits from before."""
        return [
            one
            for pod, one in self.answered.items()
            if pod != self.trial.canary and pod not in self.faults and one.target == self.trial.before
        ]

    @property
    def window_s(self) -> float:
        return max(one.window_s for one in self.answered.values())

    def views(self, canary: Evidence) -> "tuple[_View, _View]":
        """Return how the canary does, and how the others do."""
        return self._view([canary], len(self.evidence)), self._view(self.others, len(self.evidence))

    def _view(self, evidence: list[Evidence], one_of: int) -> "_View":
        pooled = pool(evidence, TunerState())
        ttft, itl = signals(self.tuning, pooled.ttft, pooled.itl, one_of=one_of)
        failed, finished = (sum(getattr(one, f"num_{how}") for one in evidence) for how in ("failed", "finished"))
        return _View(pooled, ttft, itl, failed, failed + finished)

    def hold(self, reason: Reason, why: str, *, trial: Trial | None = None) -> Decision:
        """Go on with the trial."""
        return Decision(
            action=Action.HOLD,
            reason=reason,
            why=f"revision {self.trial.revision} is on trial at {self.trial.canary}: {why}",
            limits=self.trial.before,
            revision=self.trial.before_revision,
            state=structs.replace(self.state, trial=trial or self.trial),
        )

    def wait(self, reason: Reason, why: str) -> Decision:
        """Hold, but not for ever."""
        patience_s = PATIENCE_WINDOWS * self.window_s
        if self.now_s - self.trial.started_s < patience_s:
            return self.hold(reason, why)
        return self.take_back(Reason.CANARY_UNJUDGED, f"no verdict in {patience_s:.0f} s ({why})")

    def take_back(self, reason: Reason, why: str) -> Decision:
        trial = self.trial
        revision = max([trial.revision, *(one.revision for one in self.answered.values())]) + 1
        # Both moves are kept: a limit that turned round has a longer cool-down, so a bad change is tried ever less often.
        moves = [trial.move, trial.move.undone(self.now_s)]
        return Decision(
            action=Action.ROLL_BACK,
            reason=reason,
            why=f"{_in_words(trial)} is taken back from {trial.canary}: {why}",
            limits=trial.before,
            revision=revision,
            state=self.state.after(moves, trial.before, revision),
        )

    def promote(self, why: str) -> Decision:
        trial = self.trial
        # The others have the change from now on, so that is when their evidence starts to settle.
        moves = [structs.replace(trial.move, at_s=self.now_s)]
        return Decision(
            action=Action.PROMOTE,
            reason=Reason.CANARY_NOT_WORSE,
            why=f"{_in_words(trial)}, for every replica: {why}",
            limits=trial.limits,
            revision=trial.revision,
            state=self.state.after(moves, trial.limits, trial.revision),
        )


@dataclass(frozen=True)
class _View:
    """How some replicas do."""

    pooled: Pooled
    ttft: Signal
    itl: Signal
    num_failed: int
    num_ended: int

    @property
    def preempts(self) -> bool:
        return self.pooled.recomputed_share > RECOMPUTED_SHARE

    @property
    def failures(self) -> tuple[float, float]:
        """The share of requests that failed, lower and upper bound."""
        return wilson(self.num_failed, self.num_ended)


def _in_words(trial: Trial) -> str:
    return f"{trial.move.knob} {trial.move.before:g} -> {trial.move.after:g}"


def _judge(now: _Situation) -> Decision:
    if not now.answered:
        return now.hold(Reason.NO_EVIDENCE, "no replica answers")
    for rule in _RULES:
        decision = rule(now)
        if decision is not None:
            return decision
    return _verdict(now)


def _changed_by_others(now: _Situation) -> Decision | None:
    newest = max(now.answered, key=lambda pod: now.answered[pod].revision)
    revision = now.answered[newest].revision
    if revision <= now.trial.revision:
        return None
    return now.take_back(Reason.OUT_OF_STEP, f"{newest} has revision {revision}, which somebody else set")


def _out_of_bounds(now: _Situation) -> Decision | None:
    envelope, limits = tightest([one.envelope for one in now.answered.values()]), now.trial.limits
    allowed = spans(now.tuning.bounds, envelope, limits)
    outside = [knob for knob, span in allowed.items() if span.clamp(knob.of(limits)) != knob.of(limits)]
    if not outside:
        return None
    return now.take_back(Reason.OUT_OF_BOUNDS, f"{', '.join(outside)} outside the spec's bounds and the envelope")


def _restarted(now: _Situation) -> Decision | None:
    if now.trial.taken_s is None or now.canary is None or now.canary.revision >= now.trial.revision:
        return None
    return now.take_back(Reason.CANARY_RESTARTED, f"the canary lost it (revision {now.canary.revision}): it restarted")


def _silent(now: _Situation) -> Decision | None:
    trial, canary = now.trial, now.canary
    if canary is None or trial.canary in now.faults:
        why = now.faults.get(trial.canary, "it is gone, or not ready")
    elif canary.target != trial.limits:
        why = f"it has not taken the change, and is at revision {canary.revision}"
    else:
        return None
    return now.wait(Reason.CANARY_SILENT, why)


def _taken_just_now(now: _Situation) -> Decision | None:
    if now.trial.taken_s is not None:
        return None
    taken = structs.replace(now.trial, taken_s=now.now_s)
    return now.hold(Reason.SETTLING, f"it has taken the change; judged in {now.window_s:.0f} s", trial=taken)


def _alone(now: _Situation) -> Decision | None:
    return None if now.num_others else now.promote("no other replica is left")


def _let_it_settle(now: _Situation) -> Decision | None:
    assert now.trial.taken_s is not None  # _taken_just_now has seen to it
    left_s = now.window_s - (now.now_s - now.trial.taken_s)
    return now.hold(Reason.SETTLING, f"judged in {left_s:.0f} s") if left_s > 0 else None


def _others_missing(now: _Situation) -> Decision | None:
    if len(now.others) >= MIN_EVIDENCE * now.num_others:
        return None
    why = f"only {len(now.others)} of {now.num_others} other replicas can be compared with"
    listed = "; ".join(f"{pod}: {why}" for pod, why in sorted(now.faults.items()))
    return now.wait(Reason.PARTIAL_EVIDENCE, f"{why} ({listed})" if listed else why)


def _verdict(now: _Situation) -> Decision:
    assert now.canary is not None  # _silent has seen to it
    canary, others = now.views(now.canary)
    few = [one for view in (canary, others) for one in (view.ttft, view.itl) if one.standing is Standing.UNKNOWN]
    if few:
        counts = ", ".join(f"{one.num_samples} of {one.min_samples} {one.what}" for one in few)
        return now.wait(Reason.FEW_SAMPLES, f"too few samples: {counts}")
    complaint = _complaint(canary, others)
    if complaint is not None:
        return now.take_back(Reason.CANARY_WORSE, complaint)
    return now.promote(f"{now.trial.canary} did no worse than the others ({_compared(canary, others)})")


_RULES: tuple[Callable[[_Situation], Decision | None], ...] = (
    _changed_by_others,
    _out_of_bounds,
    _restarted,
    _silent,
    _taken_just_now,
    _alone,
    _let_it_settle,
    _others_missing,
)


def _complaint(canary: _View, others: _View) -> str | None:
    """Return in what the canary does worse, or None.

    As in decide(), inter-token latency and preemption come before first tokens: a change that mends what the others miss
    there may cost first tokens.
    """
    if canary.failures[0] > others.failures[1]:
        return f"{canary.num_failed} of its {canary.num_ended} requests failed"
    if _worse(canary.itl, others.itl):
        return f"{canary.itl}; of the others {others.itl.share:.1%}"
    if canary.preempts and canary.pooled.recomputed_share > 2 * others.pooled.recomputed_share:
        return f"{canary.pooled.recomputed_share:.1%} of its computed tokens were thrown away by preemption"
    mends = _worse(others.itl, canary.itl) or (others.preempts and not canary.preempts)
    if _worse(canary.ttft, others.ttft) and not mends:
        return f"{canary.ttft}; of the others {others.ttft.share:.1%}"
    return None


def _worse(one: Signal, other: Signal) -> bool:
    """Return whether ``one`` misses the objective, and ``other`` does not or misses it by clearly less."""
    return one.standing is Standing.OVER and (other.standing is not Standing.OVER or one.lower > other.upper)


def _compared(canary: _View, others: _View) -> str:
    pairs = ((canary.ttft, others.ttft), (canary.itl, others.itl))
    return "; ".join(
        f"{one.share:.1%} of {one.num_samples} {one.what} over the objective, of the others {other.share:.1%}"
        for one, other in pairs
        if one.objective_s is not None
    )

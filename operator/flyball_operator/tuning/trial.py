"""A change is tried before it is kept: on one replica, judged by what it gains, then taken everywhere or taken back. Pure.

The others go on serving the same traffic under the limits in force, so the comparison with them leaves out what the traffic
does. A replica that has no others, or slow ones only, is compared with its own counts from before. The verdict is Wald's
sequential test of two hypotheses, "as without the change" and "as predicted", so clear cases end early. A change that gains
nothing is taken back and banned for a while. One that cannot be judged is taken back too, and tried soon again, on another
replica: a canary that is slow for reasons of its own shows a gain, but no loss. First tokens are late at first because of the
queue from before, so while that is worked off, they do not speak against the change.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from msgspec import structs

from flyball_operator.tuning.decision import Action, Decision, Reason
from flyball_operator.tuning.evidence import counts_against, pool
from flyball_operator.tuning.knobs import Knob, moved_in_words, same
from flyball_operator.tuning.signals import BUDGET, NOTHING, Counts, Signal, Standing, counts_of, signals, total, wilson
from flyball_operator.tuning.situation import MIN_EVIDENCE, Situation, earlier
from flyball_operator.tuning.state import Direction, Forecast, Move, Report, Trial
from flyball_protocol import Evidence

PATIENCE_WINDOWS = 5
"""A trial that has no verdict after so many windows of evidence is taken back."""

ENOUGH = math.log(0.98 / 0.02)
"""Of the log-likelihood ratio: either mistake is made in 2 % of looks."""

JUDGED = frozenset({Reason.CANARY_GAINED_NOTHING, Reason.CANARY_WORSE})
"""What a change is taken back for because of what it did."""

PREEMPTED_SHARE = 0.05
"""A change is taken back when more computed tokens than this share are thrown away by preemption."""


def forecast_of(signal: Signal, what: str) -> Forecast:
    """Return what a move against a missed objective has to bring: half of the misses gone, and no more than the budget."""
    predicted = round(min(0.8 * BUDGET, signal.share / 2), 4)
    return Forecast(what="ttft" if what == "ttft" else "itl", before=signal.share, predicted=predicted)


def try_first(now: Situation, decision: Decision) -> Decision:
    """Return the change of ``decision`` as a trial on one replica."""
    assert decision.limits is not None  # of every CHANGE
    move = decision.state.moves[-1]
    canary = _choose(now, move)
    can_compare = any(pod != canary and pod not in now.slow for pod in now.usable)
    trial = Trial(
        canary=canary,
        move=move,
        limits=decision.limits,
        revision=decision.revision,
        before=now.limits,
        before_revision=now.revision,
        before_settled=now.state.settled,
        started_s=now.now_s,
        forecast=decision.forecast,
        baseline=None if can_compare else now.counts,
        num_waiting=now.usable[canary].num_waiting if decision.forecast and decision.forecast.what == "ttft" else 0,
    )
    state = structs.replace(now.remembered, trial=trial, tuned=True, seqs=decision.state.seqs, trim=decision.state.trim)
    where = f"tried on {canary} first" if now.num_replicas > 1 else "on trial"
    return structs.replace(decision, action=Action.TRY, why=f"{decision.why}; {where}", state=state)


def _choose(now: Situation, move: Move) -> str:
    """Return the replica with the median traffic, which is most like the others, of those that can likely be judged."""
    unjudged = {ban.unjudged_at for ban in now.state.bans if ban.knob is move.knob and ban.direction is move.direction}
    pods = [pod for pod in now.usable if pod not in now.slow and pod not in unjudged] or list(now.usable)
    return sorted(pods, key=lambda pod: (now.usable[pod].num_arrived, pod))[len(pods) // 2]


def judge(now: Situation, trial: Trial) -> Decision:
    """Return what becomes of the trial: HOLD while there is no verdict yet."""
    trying = _Trying(now, _watched(now, trial))
    for rule in _RULES:
        decision = rule(trying)
        if decision is not None:
            return decision
    return _verdict(trying)


def _watched(now: Situation, trial: Trial) -> Trial:
    """Note when the queue from before the change has shrunk to half."""
    canary = now.answered.get(trial.canary)
    if not trial.num_waiting or trial.drained_s is not None or trial.taken_s is None or canary is None:
        return trial
    is_drained = 2 * canary.num_waiting <= trial.num_waiting
    return structs.replace(trial, drained_s=now.now_s) if is_drained else trial


@dataclass(frozen=True)
class _Trying:
    now: Situation
    trial: Trial

    @property
    def canary(self) -> Evidence | None:
        return self.now.answered.get(self.trial.canary)

    @cached_property
    def others(self) -> dict[str, Evidence]:
        """Those that serve, without fault, under the limits from before; slow ones only if all are."""
        before, state = self.trial.before, self.now.state
        found = {
            pod: one
            for pod, one in self.now.usable.items()
            if pod != self.trial.canary and same(one.target, state.own(pod, before))
        }
        return {pod: one for pod, one in found.items() if pod not in self.now.slow} or found

    @cached_property
    def counts(self) -> Report:
        """The counts of the canary and of the others, earlier windows of the trial included."""
        current = Report(self.now.now_s, self._canary_counts(), self._others_counts())
        reports = [*earlier(self.trial.reports, self.now.now_s, self.window_s), current]
        others = total(one.others for one in reports)
        return Report(current.at_s, total(one.counts for one in reports), self.trial.baseline or others)

    def _canary_counts(self) -> Counts:
        counted = None if self.canary is None else self.canary.objective_counts
        return NOTHING if counted is None else counts_of(counted)

    def _others_counts(self) -> Counts:
        counted = [one.objective_counts for one in self.others.values() if counts_against(one, self.now.objectives)]
        return total(counts_of(one) for one in counted if one is not None)

    @property
    def window_s(self) -> float:
        return self.now.pooled.window_s

    @property
    def is_fresh(self) -> bool:
        """Whether the canary's counts cover only time since it took the change."""
        counted, trial = None if self.canary is None else self.canary.objective_counts, self.trial
        restarted = counted is not None and counted.since_s <= self.now.now_s - trial.started_s
        return restarted or (trial.taken_s is not None and self.now.now_s - trial.taken_s >= self.window_s)

    @property
    def _counts_from_s(self) -> float | None:
        """Since when late first tokens are no longer those of the queue from before."""
        return self.trial.drained_s if self.trial.num_waiting else self.trial.taken_s

    @property
    def works_off_queue(self) -> bool:
        """Whether what is counted is still the queue from before, and that does not grow any more."""
        trial = self.trial
        if not trial.num_waiting or self.canary is None:
            return False
        if trial.drained_s is not None:
            return self.now.now_s - trial.drained_s < self.window_s
        return self.canary.num_waiting <= trial.num_waiting

    def signals_of(self, counts: Counts) -> Mapping[str, Signal]:
        ttft, itl = signals(self.now.tuning, counts, one_of=max(1, self.now.num_replicas))
        return {"ttft": ttft, "itl": itl}

    @cached_property
    def here(self) -> Mapping[str, Signal]:
        return self.signals_of(self.counts.counts)

    @cached_property
    def there(self) -> Mapping[str, Signal]:
        return self.signals_of(self.counts.others)

    @cached_property
    def forecast(self) -> Forecast:
        """As it was made; after a restart, made anew from how the others do."""
        if self.trial.forecast is not None:
            return self.trial.forecast
        is_cut = self.trial.move.direction is Direction.CUT
        what = "itl" if is_cut and self.trial.move.knob is not Knob.KV_CACHE_FRACTION else "ttft"
        return forecast_of(self.there[what], what)

    def hold(self, reason: Reason, why: str, *, trial: Trial | None = None) -> Decision:
        """Go on with the trial."""
        state = structs.replace(self.now.remembered, trial=trial or self.trial, reports=())
        why = f"revision {self.trial.revision} is on trial at {self.trial.canary}: {why}"
        decision = self.now.hold(reason, why, state=state)
        return structs.replace(decision, limits=self.trial.before, revision=self.trial.before_revision)

    def wait(self, reason: Reason, why: str) -> Decision:
        """Hold, but not for ever."""
        patience_s = PATIENCE_WINDOWS * self.window_s
        if self.now.now_s - self.trial.started_s < patience_s:
            return self.hold(reason, why, trial=self._with_report())
        return self.take_back(Reason.CANARY_UNJUDGED, f"no verdict in {patience_s:.0f} s ({why})")

    def _with_report(self) -> Trial:
        """Keep the window that ends now, if it is whole and overlaps with none that was kept."""
        last_s = self.trial.reports[-1].at_s if self.trial.reports else self._counts_from_s
        if last_s is None or self.now.now_s - last_s < self.window_s or not self.is_fresh:
            return self.trial
        report = Report(self.now.now_s, self._canary_counts(), self._others_counts())
        return structs.replace(self.trial, reports=(*self.trial.reports, report))

    def take_back(self, reason: Reason, why: str, *, observed: float | None = None) -> Decision:
        trial, now = self.trial, self.now
        if reason in JUDGED and trial.canary in now.slow:
            reason = Reason.CANARY_UNJUDGED
            why = f"{why}, but the canary is slow for another reason: {now.slow[trial.canary]}"
        revision = max([trial.revision, *(one.revision for one in now.answered.values())]) + 1
        undone = trial.move.undone(now.now_s)
        # A limit that turned round has a longer cool-down, so a bad change is tried ever less often.
        moves = [trial.move, undone] if reason in JUDGED else [structs.replace(undone, direction=Direction.CLAMP)]
        state = now.remembered.after(moves, trial.before, revision)
        state = structs.replace(state, settled=trial.before_settled)
        state = state.banned(trial.move, now.now_s, unjudged_at="" if reason in JUDGED else trial.canary)
        return Decision(
            action=Action.ROLL_BACK,
            reason=reason,
            why=f"{words_of(trial.move)} is taken back from {trial.canary}: {why}",
            limits=trial.before,
            revision=revision,
            state=state,
            findings=now.findings,
            forecast=self.forecast,
            observed=observed,
        )

    def promote(self, why: str, *, observed: float | None = None) -> Decision:
        trial, now = self.trial, self.now
        # The others have the change from now on, so that is when their evidence starts to settle.
        moves = [structs.replace(trial.move, at_s=now.now_s)]
        state = now.remembered.after(moves, trial.limits, trial.revision)
        bans = tuple(one for one in state.bans if one.knob is not trial.move.knob)
        return Decision(
            action=Action.PROMOTE,
            reason=Reason.CANARY_GAINED,
            why=f"{words_of(trial.move)}, for every replica: {why}",
            limits=trial.limits,
            revision=trial.revision,
            state=structs.replace(state, fallback=trial.before, bans=bans),
            findings=now.findings,
            forecast=self.forecast,
            observed=observed,
        )


def words_of(move: Move) -> str:
    return moved_in_words(move.knob, move.before, move.after)


def _changed_by_others(trying: _Trying) -> Decision | None:
    newest = max(trying.now.answered, key=lambda pod: trying.now.answered[pod].revision)
    revision = trying.now.answered[newest].revision
    if revision <= trying.trial.revision:
        return None
    return trying.take_back(Reason.OUT_OF_STEP, f"{newest} has revision {revision}, which the operator did not set")


def _out_of_bounds(trying: _Trying) -> Decision | None:
    limits = trying.trial.limits
    outside = [knob for knob, span in trying.now.spans.items() if span.clamp(knob.of(limits)) != knob.of(limits)]
    if Knob.STEP_TIME in outside and not trying.now.spans[Knob.STEP_TIME].high < Knob.STEP_TIME.of(limits) < math.inf:
        outside.remove(Knob.STEP_TIME)  # the shortest target moves with the step model
    if not outside:
        return None
    return trying.take_back(Reason.OUT_OF_BOUNDS, f"{', '.join(outside)} outside the spec's bounds and the envelope")


def _restarted(trying: _Trying) -> Decision | None:
    trial, canary = trying.trial, trying.canary
    if trial.taken_s is None or canary is None or canary.revision >= trial.revision:
        return None
    return trying.take_back(Reason.CANARY_RESTARTED, f"the canary lost it (revision {canary.revision}): it restarted")


def _silent(trying: _Trying) -> Decision | None:
    trial, canary = trying.trial, trying.canary
    if canary is None or trial.canary in trying.now.faults:
        why = trying.now.faults.get(trial.canary, "it is gone, or not ready")
    elif not same(canary.target, trying.now.state.own(trial.canary, trial.limits)):
        why = f"it has not taken the change, and is at revision {canary.revision}"
    else:
        return None
    return trying.wait(Reason.CANARY_SILENT, why)


def _taken_just_now(trying: _Trying) -> Decision | None:
    if trying.trial.taken_s is not None:
        return None
    taken = structs.replace(trying.trial, taken_s=trying.now.now_s)
    return trying.hold(Reason.SETTLING, "it has taken the change; its counts follow", trial=taken)


def _let_it_settle(trying: _Trying) -> Decision | None:
    if trying.is_fresh:
        return None
    return trying.hold(Reason.SETTLING, "its counts still cover time before the change")


def _others_missing(trying: _Trying) -> Decision | None:
    num_others = trying.now.num_replicas - 1 - sum(pod != trying.trial.canary for pod in trying.now.slow)
    if len(trying.others) >= MIN_EVIDENCE * num_others or trying.trial.baseline is not None:
        return None
    why = f"only {len(trying.others)} of {num_others} other replicas can be compared with"
    listed = "; ".join(f"{pod}: {why}" for pod, why in sorted(trying.now.faults.items()))
    return trying.wait(Reason.PARTIAL_EVIDENCE, f"{why} ({listed})" if listed else why)


def _harm(trying: _Trying) -> Decision | None:
    """Take a change back that does harm, whatever it gains."""
    assert trying.canary is not None  # _silent has seen to it
    canary, others = pool([trying.canary], trying.now.objectives), list(trying.others.values())
    failed, finished = trying.canary.num_failed, trying.canary.num_finished
    others_failed = sum(one.num_failed for one in others), sum(one.num_failed + one.num_finished for one in others)
    if failed and wilson(failed, failed + finished)[0] > wilson(*others_failed)[1]:
        return trying.take_back(Reason.CANARY_WORSE, f"{failed} of its {failed + finished} requests failed")
    lost = pool(others, trying.now.objectives).recomputed_share if others else 0.0
    if (
        canary.recomputed_share > PREEMPTED_SHARE
        and canary.recomputed_share > 2 * lost
        and trying.now.now_s - (trying.trial.taken_s or trying.now.now_s) >= trying.window_s / 2
    ):
        why = f"{canary.recomputed_share:.1%} of its computed tokens were thrown away by preemption"
        return trying.take_back(Reason.CANARY_WORSE, why)
    for what, other in (("itl", "ttft"), ("ttft", "itl")):
        if what != trying.forecast.what and _costs_more(trying, what, other):
            return trying.take_back(
                Reason.CANARY_WORSE, f"{trying.here[what]}; without it {trying.there[what].share:.1%}"
            )
    return None


def _costs_more(trying: _Trying, what: str, aim: str) -> bool:
    """Return whether it misses the other objective by clearly more, and loses more there than it gains on its own."""
    here, there = trying.here, trying.there
    is_worse = here[what].standing is Standing.OVER and here[what].lower > there[what].upper
    return is_worse and here[what].share - there[what].share > there[aim].share - here[aim].share


_RULES: tuple[Callable[[_Trying], Decision | None], ...] = (
    _changed_by_others,
    _out_of_bounds,
    _restarted,
    _silent,
    _taken_just_now,
    _let_it_settle,
    _others_missing,
    _harm,
)


def _verdict(trying: _Trying) -> Decision:
    forecast = trying.forecast
    here, there = trying.here[forecast.what], trying.there[forecast.what]
    if not here.counted.num or not (there.counted.num or trying.trial.baseline):
        return trying.wait(Reason.FEW_SAMPLES, f"no {here.what} yet")
    without = there.share if there.counted.num else forecast.before
    if without <= BUDGET / 2:
        return trying.wait(Reason.FEW_SAMPLES, f"there is nothing to gain any more (without it {without:.1%})")
    predicted = min(forecast.predicted, without / 2)
    at_least = max(there.lower, (without + predicted) / 2)  # what the others miss is known from samples too
    compared = f"{here.share:.1%} of {here.counted.num} {here.what} over the objective"
    compared += f", without it {without:.1%}, predicted {predicted:.1%}"
    if likelihood_ratio(here, at_least, predicted) >= ENOUGH:
        return trying.promote(f"{trying.trial.canary} gained what was predicted ({compared})", observed=here.share)
    if likelihood_ratio(here, without, predicted) <= -ENOUGH:
        if trying.works_off_queue:
            return trying.wait(
                Reason.SETTLING, f"the queue from before is worked off first ({_queue(trying)}; {compared})"
            )
        return trying.take_back(Reason.CANARY_GAINED_NOTHING, f"it gained nothing ({compared})", observed=here.share)
    return trying.wait(Reason.FEW_SAMPLES, f"too close to say ({compared})")


def _queue(trying: _Trying) -> str:
    assert trying.canary is not None  # works_off_queue has seen to it
    return f"{trying.trial.num_waiting} requests waited, now {trying.canary.num_waiting}"


def likelihood_ratio(signal: Signal, without: float, predicted: float) -> float:
    """Return how much likelier the samples are with the predicted share over the objective than with the share without.

    Wald, "Sequential tests of statistical hypotheses", Annals of Mathematical Statistics 16 (1945); as a logarithm.
    """
    low, high = (min(0.995, max(0.002, share)) for share in (predicted, without))
    over, num = signal.effective
    return over * math.log(low / high) + (num - over) * math.log((1 - low) / (1 - high))

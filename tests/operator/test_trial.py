"""Trials: one replica first, a verdict on what was gained, and an end whatever happens to the canary."""

import itertools
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec import structs

from flyball_operator.tuning import Action, Decision, Reason, decide
from flyball_operator.tuning.decision import Decision as AnyDecision
from flyball_operator.tuning.evidence import Seen, StepCounts
from flyball_operator.tuning.knobs import Knob
from flyball_operator.tuning.recovery import Memory
from flyball_operator.tuning.signals import Signal
from flyball_operator.tuning.state import UNJUDGED_BAN_S, Forecast, Trial, TunerState
from flyball_operator.tuning.trial import ENOUGH, JUDGED, PATIENCE_WINDOWS, forecast_of, likelihood_ratio
from flyball_protocol import Evidence, KVBlocks, Share
from operator_kit.deployment import Deployment, Runtime
from operator_kit.evidence import LENGTHS, LIMITS, MODEL, POSTED, TUNING, make_evidence, pods

NOW_S = 10_000.0
PACED = structs.replace(LIMITS, step_time_target_ms=38.0)
SETTLED = TunerState(revision=3, limits=PACED, objectives=POSTED, settled=True, tuned=True, family="demo/t1")
OVER = make_evidence(limits=PACED, itl_over=4000)


def tried(*others: Evidence, num_replicas: int = 3) -> TunerState:
    """The state with a cut of the step target on trial, that the canary has taken."""
    decision = decide(TUNING, SETTLED, pods(*[OVER] * num_replicas), now_s=NOW_S)
    trial = decision.state.trial
    assert trial is not None and decision.action is Action.TRY
    return structs.replace(decision.state, trial=structs.replace(trial, taken_s=NOW_S + 15))


def trial_of(state: TunerState) -> Trial:
    assert state.trial is not None
    return state.trial


STATE = tried()
TRIAL = trial_of(STATE)


def canary(**fields: Any) -> Evidence:
    return make_evidence(**({"limits": TRIAL.limits, "revision": 4, "since_s": 25.0} | fields))


def judged(
    one: Evidence | None, *others: Evidence | None, after_s: float = 30.0, state: TunerState = STATE
) -> Decision:
    first, second = others or (OVER, OVER)
    return decide(TUNING, state, pods(first, one, second), now_s=NOW_S + after_s)


def test_the_replica_with_the_median_traffic_goes_first() -> None:
    evidence = [structs.replace(OVER, num_arrived=num) for num in (900, 10, 300)]
    decision = decide(TUNING, SETTLED, pods(*evidence), now_s=NOW_S)
    trial = trial_of(decision.state)
    assert (trial.canary, decision.forecast) == ("replica 3", Forecast(what="itl", before=0.2, predicted=0.04))
    assert decision.wanted_at("replica 3") == (4, trial.limits)
    assert decision.wanted_at("replica 1") == (3, PACED)
    assert (decision.is_lease_at("replica 3"), decision.is_lease_at("replica 1")) == (True, False)


VERDICTS: dict[str, tuple[dict[str, Any], Action, Reason]] = {
    "it gained what was predicted": ({"itl_over": 0}, Action.PROMOTE, Reason.CANARY_GAINED),
    "it gained most of it": ({"itl_over": 900}, Action.PROMOTE, Reason.CANARY_GAINED),
    "it gained nothing": ({"itl_over": 4000}, Action.ROLL_BACK, Reason.CANARY_GAINED_NOTHING),
    "it gained a little": ({"itl_over": 3400}, Action.ROLL_BACK, Reason.CANARY_GAINED_NOTHING),
    "it is worse": ({"itl_over": 9000}, Action.ROLL_BACK, Reason.CANARY_GAINED_NOTHING),
    "it lost more first tokens than it gained": (
        {"itl_over": 0, "ttft_over": 600},
        Action.ROLL_BACK,
        Reason.CANARY_WORSE,
    ),
    "its requests failed": ({"itl_over": 0, "num_failed": 50}, Action.ROLL_BACK, Reason.CANARY_WORSE),
    "it throws away what it computed": (
        {"itl_over": 0, "num_recomputed_tokens": 60_000},
        Action.ROLL_BACK,
        Reason.CANARY_WORSE,
    ),
    "it gained more than half": ({"itl_over": 1700}, Action.PROMOTE, Reason.CANARY_GAINED),
    "too close to say": ({"itl_over": 40, "itl_count": 400}, Action.HOLD, Reason.FEW_SAMPLES),
    "hardly any samples": ({"itl_over": 1, "itl_count": 40}, Action.HOLD, Reason.FEW_SAMPLES),
    "it restarted": ({"revision": 0, "limits": LIMITS}, Action.ROLL_BACK, Reason.CANARY_RESTARTED),
    "it refused the change": ({"limits": PACED}, Action.HOLD, Reason.CANARY_SILENT),
    "its counts are of the time before": ({"since_s": 900.0}, Action.HOLD, Reason.SETTLING),
    "somebody else set limits": ({"revision": 9}, Action.ROLL_BACK, Reason.OUT_OF_STEP),
    "it lies": ({"num_steps": -1}, Action.HOLD, Reason.CANARY_SILENT),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts(name: str) -> None:
    fields, action, reason = VERDICTS[name]
    after_s = 60.0 if "throws away" in name else 30.0
    decision = judged(canary(**fields), after_s=after_s)
    assert (decision.action, decision.reason) == (action, reason), decision.why
    if action is Action.PROMOTE:
        assert (decision.limits, decision.revision) == (TRIAL.limits, 4)
        assert decision.state.fallback == PACED
        assert not decision.state.settled
    if action is Action.ROLL_BACK:
        assert decision.limits == PACED
        assert decision.revision > max(4, fields.get("revision", 4))
        ban = decision.state.ban(Knob.STEP_TIME, TRIAL.move.direction, TRIAL.move.after or 0, NOW_S + after_s)
        assert ban is not None and bool(ban.unjudged_at) is (reason not in JUDGED)
        assert decision.state.settled, "what was in force before had been committed"
    assert decision.state.trial is None or action is Action.HOLD


def test_a_verdict_tells_what_was_predicted_and_what_came() -> None:
    decision = judged(canary(itl_over=0))
    assert "gained what was predicted (0.0% of 1000 requests" in decision.why
    assert "without it 20.0%, predicted 4.0%" in decision.why
    assert (decision.observed, decision.forecast) == (0.0, Forecast(what="itl", before=0.2, predicted=0.04))


def test_a_canary_that_stays_silent_is_not_waited_for_for_ever() -> None:
    assert judged(None).reason is Reason.CANARY_SILENT
    late = judged(None, after_s=60.0 * PATIENCE_WINDOWS)
    assert (late.action, late.reason) == (Action.ROLL_BACK, Reason.CANARY_UNJUDGED)


def test_without_others_to_compare_with_it_is_waited_for() -> None:
    changed = structs.replace(OVER, target=LIMITS)
    decision = judged(canary(), changed, None)
    assert (decision.reason, "only 0 of 2 other replicas" in decision.why) == (Reason.PARTIAL_EVIDENCE, True)


def test_trouble_that_ended_by_itself_is_no_gain() -> None:
    well = structs.replace(make_evidence(limits=PACED))
    assert judged(canary(), well, well).reason is Reason.FEW_SAMPLES
    late = judged(canary(), well, well, after_s=60.0 * PATIENCE_WINDOWS)
    assert late.reason is Reason.CANARY_UNJUDGED


def slow_canary(**fields: Any) -> tuple[TunerState, Evidence]:
    """The canary's steps take 2.5 times as long as they did."""
    step = StepCounts(prefill_tokens=256, decodes=4, context_tokens=4000, attention_pairs=0)
    seen = Seen(TRIAL.canary, "b1", 590.0, step, MODEL.predict(*step) / 2.5)
    one = canary(step_model=MODEL, lengths=LENGTHS, num_steps=1000, **fields)
    return structs.replace(STATE, seen=(seen,)), one


def test_a_slow_canary_that_gained_what_was_predicted_is_believed() -> None:
    state, one = slow_canary(itl_over=0)
    assert judged(one, state=state).reason is Reason.CANARY_GAINED


@pytest.mark.parametrize("fields", [{"itl_over": 4000}, {"itl_over": 0, "ttft_over": 600}], ids=str)
def test_what_a_slow_canary_loses_says_nothing_about_the_change(fields: dict[str, Any]) -> None:
    state, one = slow_canary(**fields)
    decision = judged(one, state=state)
    assert (decision.action, decision.reason) == (Action.ROLL_BACK, Reason.CANARY_UNJUDGED)
    assert "slow for another reason: its steps take 2.5 times as long as they did" in decision.why


def test_a_change_that_could_not_be_judged_is_tried_again_soon_and_elsewhere() -> None:
    state, one = slow_canary(itl_over=4000)
    state = judged(one, state=state).state
    back = make_evidence(limits=PACED, itl_over=4000, revision=5)

    def later(after_s: float) -> Decision:
        return decide(TUNING, state, pods(back, back, back), now_s=NOW_S + 30 + after_s)

    assert trial_of(later(UNJUDGED_BAN_S - 1).state).move.after != TRIAL.move.after
    again = later(UNJUDGED_BAN_S)
    assert trial_of(again.state).move.after == TRIAL.move.after
    assert trial_of(again.state).canary != TRIAL.canary


def slow_at(*pods_: str, evidence: Evidence) -> TunerState:
    """The state before a trial, with steps of these replicas that take 2.5 times as long as they did."""
    assert evidence.step_model is not None
    step = StepCounts(prefill_tokens=256, decodes=4, context_tokens=4000, attention_pairs=0)
    known_s = evidence.step_model.predict(*step)
    seen = [
        Seen(pod, "b1", 590.0, step, known_s / (2.5 if pod in pods_ else 1.0)) for pod in ("replica 1", "replica 2")
    ]
    return structs.replace(SETTLED, seen=tuple(seen))


def test_a_slow_replica_goes_neither_first_nor_into_the_comparison() -> None:
    one = make_evidence(limits=PACED, itl_over=4000, step_model=MODEL, lengths=LENGTHS, num_steps=1000)
    decision = decide(TUNING, slow_at("replica 2", evidence=one), pods(one, one), now_s=NOW_S)
    trial = trial_of(decision.state)
    assert trial.canary == "replica 1"
    assert trial.baseline is not None and trial.baseline.itl.num == 1000, "its own, of one replica"
    both = decide(TUNING, slow_at(evidence=one), pods(one, one), now_s=NOW_S)
    assert trial_of(both.state).baseline is None


def test_new_bounds_end_a_trial() -> None:
    state = structs.replace(STATE, trial=structs.replace(TRIAL, limits=structs.replace(TRIAL.limits, max_num_seqs=500)))
    one = canary(limits=trial_of(state).limits)
    assert judged(one, state=state).reason is Reason.OUT_OF_BOUNDS


def test_a_single_replica_is_compared_with_its_own_past() -> None:
    deployment = Deployment(lambda one: {"itl_over": 0 if one.step_ms < 30 else 6000}, num_replicas=1)
    deployment.minutes(4)
    assert deployment.actions == ["change", "try", "promote", "commit"]


LATE: dict[str, Any] = {
    "limits": structs.replace(LIMITS, step_time_target_ms=20.0),
    "ttft_over": 600,
    "blocked_by": {"step_time": 0.4},
}
LATE |= {"step_model": MODEL, "lengths": LENGTHS, "num_waiting": 200}
LATE |= {"kv_blocks": KVBlocks(total=20_000, capacity=16_000, free=10_000, used=8000, cached=2000)}


class Queue:
    """A single replica with 200 requests in its queue, and a longer step target on trial for the first tokens."""

    def __init__(self) -> None:
        state = structs.replace(SETTLED, limits=LATE["limits"])
        self.decision = decide(TUNING, state, pods(make_evidence(**LATE)), now_s=NOW_S)
        self.trial = trial_of(self.decision.state)
        assert (self.trial.num_waiting, self.decision.forecast) == (
            200,
            Forecast(what="ttft", before=0.6, predicted=0.04),
        )
        self.sees(0, 200)  # it has taken the change

    def sees(self, after_s: float, num_waiting: int, ttft_over: int = 600) -> Decision:
        fields = LATE | {"limits": self.trial.limits, "revision": 4, "since_s": min(60.0, after_s)}
        one = make_evidence(**fields | {"num_waiting": num_waiting, "ttft_over": ttft_over})
        self.decision = decide(TUNING, self.decision.state, pods(one), now_s=NOW_S + 15 + after_s)
        return self.decision


def test_a_right_change_is_not_taken_back_while_the_queue_from_before_is_worked_off() -> None:
    queue = Queue()
    for after_s, num_waiting in ((60, 190), (90, 110), (120, 80), (150, 20), (165, 0)):
        decision = queue.sees(after_s, num_waiting)
        assert (decision.action, decision.reason) == (Action.HOLD, Reason.SETTLING), decision.why
        assert f"200 requests waited, now {num_waiting}" in decision.why
    assert queue.sees(180, 0, ttft_over=20).reason is Reason.CANARY_GAINED


def test_first_tokens_that_are_in_time_speak_for_a_change_at_once() -> None:
    assert Queue().sees(60, 190, ttft_over=0).reason is Reason.CANARY_GAINED


def test_a_queue_that_grows_speaks_against_a_change_at_once() -> None:
    assert Queue().sees(60, 201).reason is Reason.CANARY_GAINED_NOTHING


def test_after_the_queue_a_whole_window_decides() -> None:
    queue = Queue()
    assert queue.sees(60, 100).reason is Reason.SETTLING
    assert queue.sees(105, 180).reason is Reason.SETTLING
    assert queue.sees(120, 180).reason is Reason.CANARY_GAINED_NOTHING


def test_a_queue_that_is_not_worked_off_is_not_waited_for_for_ever() -> None:
    decision = Queue().sees(60 * PATIENCE_WINDOWS, 190)
    assert (decision.action, decision.reason) == (Action.ROLL_BACK, Reason.CANARY_UNJUDGED)


def test_the_queue_says_nothing_about_a_change_for_the_gaps() -> None:
    assert TRIAL.num_waiting == 0
    assert judged(canary(itl_over=4000, num_waiting=1)).reason is Reason.CANARY_GAINED_NOTHING


def test_a_trial_goes_on_after_a_restart_of_the_operator() -> None:
    deployment = Deployment(lambda one: {"itl_over": 0 if one.step_ms < 30 else 6000})
    while deployment.actions[-1:] != ["try"]:
        deployment.round()
    deployment.restart_operator()
    deployment.minutes(5)
    assert deployment.actions == ["change", "try", "promote", "commit"]


def signal(over: int, num: int) -> Signal:
    return Signal("samples", 1.0, Share(num=num, num_over=over), 1, 1)


def test_the_likelihood_ratio_by_hand() -> None:
    assert likelihood_ratio(signal(0, 10), 0.2, 0.04) == pytest.approx(10 * 0.18232, abs=1e-3)
    assert likelihood_ratio(signal(10, 10), 0.2, 0.04) == pytest.approx(-10 * 1.60944, abs=1e-3)
    assert likelihood_ratio(signal(2, 10), 0.2, 0.04) < 0 < likelihood_ratio(signal(0, 10), 0.2, 0.04)


def test_clear_cases_need_few_samples() -> None:
    assert likelihood_ratio(signal(0, 25), 0.2, 0.04) > ENOUGH
    assert likelihood_ratio(signal(5, 25), 0.2, 0.04) < -ENOUGH


def test_a_forecast_is_half_of_the_misses_or_the_budget() -> None:
    assert forecast_of(signal(20, 100), "ttft").predicted == pytest.approx(0.04)
    assert forecast_of(signal(6, 100), "itl").predicted == pytest.approx(0.03)


class Fleet(RuleBasedStateMachine):
    """Replicas that come, go, restart, fall silent, and whose latency follows the limits or does not."""

    @initialize(count=st.integers(1, 4))
    def start(self, count: int) -> None:
        self.cliff_ms = 30.0
        self.deployment = Deployment(self.sees, num_replicas=count)
        self.names = itertools.count(count + 1)

    def sees(self, one: Runtime) -> dict[str, Any]:
        return {"itl_over": 6000 if one.step_ms > self.cliff_ms else 0}

    @rule(count=st.integers(1, 8))
    def rounds(self, count: int) -> None:
        self.deployment.rounds(count)

    @rule(cliff_ms=st.sampled_from([5.0, 25.0, 33.0, 1000.0]))
    def load_changes(self, cliff_ms: float) -> None:
        self.cliff_ms = cliff_ms

    @rule(data=st.data())
    def one_restarts(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.deployment.replicas)).restart()

    @rule(data=st.data())
    def one_falls_silent_or_comes_back(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.deployment.replicas))
        one.silent = not one.silent

    @rule()
    def one_comes(self) -> None:
        if len(self.deployment.replicas) < 5:
            now_s = self.deployment.now_s
            self.deployment.replicas.append(
                Runtime(f"replica {next(self.names)}", self.sees, started_s=now_s, changed_s=now_s, now_s=now_s)
            )

    @rule()
    def one_goes(self) -> None:
        if len(self.deployment.replicas) > 1:
            self.deployment.replicas.pop()

    @rule()
    def the_operator_restarts(self) -> None:
        state, replicas = self.deployment.core.state, self.deployment.replicas
        newest = max(state.revision, *(one.revision for one in replicas))
        self.deployment.restart_operator(Memory(revision=newest, trying=state.trial is not None, tuned=state.tuned))

    @rule()
    def leases_run_out(self) -> None:
        for one in self.deployment.replicas:
            one.lapse()

    @invariant()
    def at_most_one_has_a_change_on_trial(self) -> None:
        state = self.deployment.core.state
        revisions = {one.revision for one in self.deployment.replicas if not one.silent and one.revision > 0}
        newest = max(revisions, default=0)
        if state.trial is not None and newest == state.trial.revision:
            assert sum(one.revision == newest for one in self.deployment.replicas) <= 1

    @invariant()
    def every_decision_replays(self) -> None:
        if self.deployment.records:
            record = self.deployment.records[-1]
            found: AnyDecision = record.replay()
            assert found == record.decision

    @invariant()
    def limits_stay_inside_the_envelope(self) -> None:
        for one in self.deployment.replicas:
            assert 1 <= one.limits.max_num_seqs <= 128
            assert 16 <= one.limits.max_num_batched_tokens <= 2048

    def teardown(self) -> None:
        if not hasattr(self, "deployment"):
            return
        for one in self.deployment.replicas:
            one.silent = False
        self.cliff_ms = 1000.0
        self.deployment.minutes(12)
        assert len({one.limits for one in self.deployment.replicas}) == 1, "in the end all have the same"
        assert self.deployment.core.state.trial is None


Fleet.TestCase.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
TestFleet = Fleet.TestCase

"""advance(): a change on one replica first. Verdicts as a table, and a machine that drives a whole make-believe fleet."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from flyball_operator.spec import Bounds, Objectives, Range, Tuning
from flyball_operator.tuning import Action, Decision, PodEvidence, Reason, Trial, TunerState, advance
from flyball_operator.tuning.canary import PATIENCE_WINDOWS
from flyball_operator.tuning.record import DecisionRecord, from_line, to_line
from flyball_operator.tuning.state import Direction
from flyball_protocol import Evidence, Limits
from operator_kit.evidence import ENVELOPE, LIMITS, TUNING, make_evidence, pods

NOW_S = 10_000.0
WINDOW_S = 60.0
ITL_OVER = {"itl_over": 4000}
CUT = structs.replace(LIMITS, max_num_batched_tokens=358)


def advanced(
    state: TunerState, evidence: list[PodEvidence], *, now_s: float = NOW_S, tuning: Tuning = TUNING
) -> Decision:
    return advance(tuning, state, evidence, now_s=now_s)


def on_trial(num_replicas: int = 3, *, taken: bool = True) -> Trial:
    """A cut of the token budget at replica 2."""
    tried = advanced(TunerState(), pods(*[make_evidence(**ITL_OVER)] * num_replicas))
    assert tried.state.trial is not None
    return structs.replace(tried.state.trial, taken_s=NOW_S if taken else None)


def in_trial(trial: Trial) -> TunerState:
    return TunerState(revision=trial.before_revision, limits=trial.before, trial=trial)


def canary(**changes: Any) -> Evidence:
    return make_evidence(**({"limits": CUT, "revision": 4} | changes))


def judged(
    canary: Evidence | None,
    *others: Evidence | None,
    trial: Trial | None = None,
    after_s: float = WINDOW_S,
    tuning: Tuning = TUNING,
) -> Decision:
    """The decision on the trial at replica 2, whose place among the replicas ``canary`` takes."""
    first, *rest = others or (make_evidence(**ITL_OVER), make_evidence(**ITL_OVER))
    evidence = pods(first, canary, *rest)
    return advanced(in_trial(trial or on_trial()), evidence, now_s=NOW_S + after_s, tuning=tuning)


def test_a_change_goes_to_one_replica_first() -> None:
    decision = advanced(TunerState(), pods(*[make_evidence(**ITL_OVER)] * 3))
    assert (decision.action, decision.reason) == (Action.TRY, Reason.INTER_TOKEN_LATENCY_OVER)
    assert decision.why.endswith("; tried on replica 2 first")
    assert [decision.wanted_at(f"replica {i}") for i in (1, 2, 3)] == [(3, LIMITS), (4, CUT), (3, LIMITS)]


def test_the_canary_is_the_replica_with_the_median_traffic() -> None:
    busy = [make_evidence(ttft_count=count, **ITL_OVER) for count in (900, 500, 100, 400, 1000)]
    trial = advanced(TunerState(), pods(*busy)).state.trial
    assert trial is not None and trial.canary == "replica 2"


def test_replicas_without_usable_evidence_are_no_canary() -> None:
    young = make_evidence(uptime_s=1.0, ttft_count=5000, **ITL_OVER)
    trial = advanced(TunerState(), pods(young, make_evidence(**ITL_OVER))).state.trial
    assert trial is not None and trial.canary == "replica 2"


def test_of_replicas_with_the_same_traffic_the_canary_is_chosen_by_name() -> None:
    evidence = pods(*[make_evidence(**ITL_OVER)] * 4)
    trials = [advanced(TunerState(), order).state.trial for order in (evidence, evidence[::-1])]
    assert [trial.canary for trial in trials if trial is not None] == ["replica 3"] * 2


def test_with_one_replica_the_canary_is_all() -> None:
    decision = advanced(TunerState(), pods(make_evidence(**ITL_OVER)))
    assert (decision.action, decision.state.trial) == (Action.CHANGE, None)
    assert decision.wanted_at("replica 1") == (4, CUT)


@pytest.mark.parametrize(
    ("evidence", "tuning"),
    [
        (pods(*[make_evidence()] * 2), structs.replace(TUNING, bounds=Bounds(max_num_seqs=Range(max=32)))),
        (pods(make_evidence(), make_evidence(limits=CUT)), TUNING),
    ],
    ids=["the spec's bounds", "limits that were in force before"],
)
def test_what_is_no_experiment_goes_to_all_at_once(evidence: list[PodEvidence], tuning: Tuning) -> None:
    decision = advanced(TunerState(), evidence, tuning=tuning)
    assert (decision.action, decision.revision, decision.state.trial) == (Action.CHANGE, 4, None)


def test_nothing_set_yet_is_nothing_wanted() -> None:
    decision = advanced(TunerState(), pods(*[make_evidence(revision=0, **ITL_OVER)] * 2))
    assert [decision.wanted_at(f"replica {i}") for i in (1, 2)] == [None, (1, CUT)]


def test_the_window_starts_when_the_canary_shows_the_change() -> None:
    waiting = on_trial(taken=False)
    decision = judged(canary(), trial=waiting, after_s=30)
    assert (decision.action, decision.reason) == (Action.HOLD, Reason.SETTLING)
    assert decision.state.trial == structs.replace(waiting, taken_s=NOW_S + 30)
    still = advanced(decision.state, pods(make_evidence(), canary(), make_evidence()), now_s=NOW_S + 89)
    assert (still.reason, still.why) == (Reason.SETTLING, "revision 4 is on trial at replica 2: judged in 1 s")


def test_a_verdict_waits_for_the_longest_window() -> None:
    decision = judged(canary(), make_evidence(window_s=90.0), make_evidence())
    assert (decision.reason, decision.why[-14:]) == (Reason.SETTLING, "judged in 30 s")


def test_a_canary_that_has_not_yet_got_the_change_is_not_taken_for_restarted() -> None:
    decision = judged(canary(limits=LIMITS, revision=3), trial=on_trial(taken=False))
    assert (decision.action, decision.reason) == (Action.HOLD, Reason.CANARY_SILENT)
    assert decision.why.endswith("it has not taken the change, and is at revision 3")


def test_while_it_settles_the_leases_of_both_sides_are_renewed() -> None:
    decision = judged(canary(), after_s=10)
    assert [decision.wanted_at(f"replica {i}") for i in (1, 2, 3)] == [(3, LIMITS), (4, CUT), (3, LIMITS)]


@dataclass
class Case:
    canary: dict[str, Any]
    others: dict[str, Any]
    reason: Reason
    says: str = ""
    tuning: dict[str, Any] = field(default_factory=dict)


VERDICTS = {
    "it mends what the others miss": Case({}, ITL_OVER, Reason.CANARY_NOT_WORSE, "did no worse"),
    "it misses what the others miss as well": Case({"itl_over": 3900}, ITL_OVER, Reason.CANARY_NOT_WORSE),
    "it misses by clearly more": Case({"itl_over": 8000}, ITL_OVER, Reason.CANARY_WORSE, "of the others 20.0%"),
    "it misses by more, but not clearly": Case({"itl_over": 4100}, ITL_OVER, Reason.CANARY_NOT_WORSE),
    "it misses gaps, the others do not": Case(ITL_OVER, {}, Reason.CANARY_WORSE, "20.0% of 20000 inter-token gaps"),
    "it misses gaps, the others are too near to say": Case(
        {"itl_over": 1080}, {"itl_over": 1000}, Reason.CANARY_WORSE, "budget 5%); of the others 5.0%"
    ),
    "it misses first tokens, the others do not": Case(
        {"ttft_over": 200},
        {},
        Reason.CANARY_WORSE,
        "first tokens took longer than 1000 ms (17.6% to 22.6%; budget 5%); of the others 0.0%",
    ),
    "it trades first tokens for gaps that were missed": Case({"ttft_over": 200}, ITL_OVER, Reason.CANARY_NOT_WORSE),
    "it trades gaps for first tokens that were missed": Case(ITL_OVER, {"ttft_over": 200}, Reason.CANARY_WORSE),
    "it trades first tokens for preemptions": Case(
        {"ttft_over": 200}, {"num_recomputed_tokens": 9000}, Reason.CANARY_NOT_WORSE
    ),
    "it trades first tokens for preemptions and preempts as well": Case(
        {"ttft_over": 200, "num_recomputed_tokens": 8000},
        {"num_recomputed_tokens": 9000},
        Reason.CANARY_WORSE,
        "first tokens",
    ),
    "it preempts": Case({"num_recomputed_tokens": 9000}, {}, Reason.CANARY_WORSE, "7.0% of its computed tokens"),
    "it preempts as much as is allowed": Case(
        {"num_prompt_tokens": 79_000, "num_recomputed_tokens": 1000}, {}, Reason.CANARY_NOT_WORSE
    ),
    "it preempts exactly twice as much as the others": Case(
        {"num_prompt_tokens": 76_000, "num_recomputed_tokens": 4000},
        {"num_prompt_tokens": 78_000, "num_recomputed_tokens": 2000},
        Reason.CANARY_NOT_WORSE,
    ),
    "it preempts as the others do": Case(
        {"num_recomputed_tokens": 9000}, {"num_recomputed_tokens": 8000}, Reason.CANARY_NOT_WORSE
    ),
    "its requests fail": Case({"num_failed": 50}, {}, Reason.CANARY_WORSE, "50 of its 1050 requests failed"),
    "all requests fail": Case({"num_failed": 50}, {"num_failed": 50}, Reason.CANARY_NOT_WORSE),
    "a fair share of the samples is enough": Case(
        {"ttft_count": 34, "itl_count": 700}, {"ttft_count": 34, "itl_count": 700}, Reason.CANARY_NOT_WORSE
    ),
    "an objective that is not set is not judged": Case(
        ITL_OVER, {}, Reason.CANARY_NOT_WORSE, tuning={"objectives": Objectives(ttft_p95_milliseconds=1000)}
    ),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict(name: str) -> None:
    case = VERDICTS[name]
    others = make_evidence(**case.others)
    tuning = structs.replace(TUNING, **case.tuning)
    decision = judged(canary(**case.canary), others, others, tuning=tuning)
    promoted = case.reason is Reason.CANARY_NOT_WORSE
    assert (decision.reason, decision.action) == (case.reason, Action.PROMOTE if promoted else Action.ROLL_BACK)
    assert case.says in decision.why
    wanted = (4, CUT) if promoted else (5, LIMITS)
    assert [decision.wanted_at(f"replica {i}") for i in (1, 2, 3)] == [wanted] * 3
    assert decision.state.trial is None
    assert decision.state.moves[-1].at_s == NOW_S + WINDOW_S  # from now on the evidence of all has to settle


def test_a_verdict_names_all_that_was_compared() -> None:
    others = make_evidence(**ITL_OVER)
    assert judged(canary(), others, others).why == (
        "max_num_batched_tokens 512 -> 358, for every replica: replica 2 did no worse than the others "
        "(0.0% of 1000 first tokens over the objective, of the others 0.0%; "
        "0.0% of 20000 inter-token gaps over the objective, of the others 20.0%)"
    )


def test_twice_the_preemptions_of_the_others_are_too_many() -> None:
    others = make_evidence(num_recomputed_tokens=3000)
    assert judged(canary(num_recomputed_tokens=7500), others, others).reason is Reason.CANARY_WORSE
    assert judged(canary(num_recomputed_tokens=6000), others, others).reason is Reason.CANARY_NOT_WORSE


def test_half_of_the_others_are_enough_to_compare_with() -> None:
    assert judged(canary(), make_evidence(**ITL_OVER), None).reason is Reason.CANARY_NOT_WORSE


def test_what_is_remembered_of_a_trial_and_of_its_end() -> None:
    tried = advanced(TunerState(), pods(*[make_evidence(**ITL_OVER)] * 3)).state
    assert (tried.revision, tried.limits, tried.moves) == (3, LIMITS, ())
    promoted = judged(canary()).state
    assert (promoted.revision, promoted.limits) == (4, CUT)
    taken_back = judged(canary(itl_over=9000)).state
    assert (taken_back.revision, taken_back.limits) == (5, LIMITS)
    assert [move.at_s for move in taken_back.moves] == [NOW_S, NOW_S + WINDOW_S]


def test_moves_before_a_trial_count_after_it() -> None:
    earlier = judged(canary()).state
    evidence = pods(*[make_evidence(limits=CUT, revision=4, **ITL_OVER)] * 3)
    tried = advanced(earlier, evidence, now_s=NOW_S + 10_000).state
    assert tried.trial is not None
    assert tried.moves == earlier.moves


def test_while_nobody_answers_the_trial_is_held() -> None:
    held = judged(None, None, None)
    assert (held.action, held.reason) == (Action.HOLD, Reason.NO_EVIDENCE)
    assert (held.limits, held.revision) == (LIMITS, 3)
    assert held.why == "revision 4 is on trial at replica 2: no replica answers"


def test_those_that_cannot_be_compared_with_are_listed() -> None:
    held = judged(canary(), make_evidence(**ITL_OVER), None, None, None)
    assert held.why == (
        "revision 4 is on trial at replica 2: only 1 of 4 other replicas can be compared with "
        "(replica 3: no answer in 2.0 s; replica 4: no answer in 2.0 s; replica 5: no answer in 2.0 s)"
    )
    draining = judged(canary(), *[make_evidence(draining=True, num_failed=1000)] * 2)
    assert draining.why.endswith(
        "only 0 of 2 other replicas can be compared with (replica 1: draining; replica 3: draining)"
    )
    strayed = judged(canary(), make_evidence(limits=structs.replace(LIMITS, max_num_seqs=3)))
    assert strayed.why.endswith("only 0 of 1 other replicas can be compared with")


def test_samples_that_are_too_few_are_listed() -> None:
    held = judged(canary(ttft_count=5, itl_count=7))
    assert held.why.endswith("too few samples: 5 of 34 first tokens, 7 of 680 inter-token gaps")


def test_why_a_trial_ended_without_a_verdict() -> None:
    restarted = judged(canary(revision=0, limits=LIMITS))
    assert restarted.why.endswith("the canary lost it (revision 0): it restarted")
    off = judged(canary(), tuning=structs.replace(TUNING, mode="Disabled"))
    assert (off.reason, off.why[-13:]) == (Reason.MODE_CHANGED, "mode Disabled")
    off_and_silent = judged(None, None, None, tuning=structs.replace(TUNING, mode="Disabled"))
    assert (off_and_silent.reason, off_and_silent.revision) == (Reason.MODE_CHANGED, 5)
    alone = advanced(in_trial(on_trial()), [pods(None, canary())[1]], now_s=NOW_S + WINDOW_S)
    assert (alone.action, alone.why.split(": ")[-1]) == (Action.PROMOTE, "no other replica is left")
    bounds = Bounds(max_num_seqs=Range(max=32), max_num_batched_tokens=Range(max=300))
    outside = judged(canary(), tuning=structs.replace(TUNING, bounds=bounds))
    assert outside.why.endswith("max_num_seqs, max_num_batched_tokens outside the spec's bounds and the envelope")


def test_a_change_that_the_canary_has_just_taken_says_when_it_is_judged() -> None:
    decision = judged(canary(), trial=on_trial(taken=False))
    assert decision.why.endswith("it has taken the change; judged in 60 s")


def test_a_change_that_was_taken_back_is_tried_later_and_later() -> None:
    decision = judged(canary(itl_over=9000))
    tried, undone = decision.state.moves
    assert (tried.direction, undone.direction) == (Direction.CUT, Direction.RAISE)
    assert (undone.before, undone.after) == (358, 512)
    assert decision.state.stretched(60, now_s=NOW_S + WINDOW_S) == 120


WAITS = {
    "the canary is gone": (None, [make_evidence()], Reason.CANARY_SILENT, "no answer"),
    "the canary drains": (canary(draining=True), [make_evidence()], Reason.CANARY_SILENT, "draining"),
    "the canary's lease ran out": (canary(limits=LIMITS), [make_evidence()], Reason.CANARY_SILENT, "has not taken"),
    "few others answer": (canary(), [make_evidence(), None, None], Reason.PARTIAL_EVIDENCE, "only 1 of 3 other"),
    "the others have something else": (
        canary(),
        [make_evidence(limits=structs.replace(LIMITS, max_num_seqs=3))],
        Reason.PARTIAL_EVIDENCE,
        "only 0 of 1",
    ),
    "few samples": (canary(ttft_count=5), [make_evidence()], Reason.FEW_SAMPLES, "5 of 50 first tokens"),
    "few samples of the others": (canary(), [make_evidence(itl_count=9)], Reason.FEW_SAMPLES, "9 of 1000 inter"),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_cannot_be_judged_is_held_and_said_and_in_the_end_taken_back(name: str) -> None:
    one, others, reason, says = WAITS[name]
    held = judged(one, *others)
    assert (held.action, held.reason) == (Action.HOLD, reason)
    assert says in held.why and "replica 2" in held.why
    given_up = judged(one, *others, after_s=PATIENCE_WINDOWS * WINDOW_S)
    assert (given_up.action, given_up.reason, given_up.limits) == (Action.ROLL_BACK, Reason.CANARY_UNJUDGED, LIMITS)
    assert says in given_up.why
    assert given_up.revision == 5


def test_a_canary_that_left_is_held_for() -> None:
    evidence = [pod for pod in pods(make_evidence(), canary(), make_evidence()) if pod.pod != "replica 2"]
    decision = advanced(in_trial(on_trial()), evidence, now_s=NOW_S + WINDOW_S)
    assert (decision.reason, decision.why) == (
        Reason.CANARY_SILENT,
        "revision 4 is on trial at replica 2: it is gone, or not ready",
    )


def test_nobody_answers_so_nothing_is_decided() -> None:
    decision = judged(None, None, None, after_s=100 * WINDOW_S)
    assert (decision.action, decision.reason) == (Action.HOLD, Reason.NO_EVIDENCE)


def test_a_canary_that_restarted_has_the_change_taken_back_at_once() -> None:
    decision = judged(canary(limits=LIMITS, revision=3, uptime_s=20.0), after_s=5)
    assert (decision.action, decision.reason) == (Action.ROLL_BACK, Reason.CANARY_RESTARTED)


def test_a_canary_that_is_left_alone_is_all() -> None:
    decision = advanced(in_trial(on_trial()), [PodEvidence(pod="replica 2", evidence=canary(**ITL_OVER))])
    assert (decision.action, decision.wanted_at("replica 2")) == (Action.PROMOTE, (4, CUT))


def test_bounds_that_change_meanwhile_end_the_trial() -> None:
    tuning = structs.replace(TUNING, bounds=Bounds(max_num_batched_tokens=Range(min=400)))
    decision = judged(canary(), after_s=5, tuning=tuning)
    assert (decision.action, decision.reason) == (Action.ROLL_BACK, Reason.OUT_OF_BOUNDS)
    assert "max_num_batched_tokens outside the spec's bounds" in decision.why


def test_a_replica_that_cannot_take_the_change_ends_the_trial() -> None:
    """A smaller envelope: a replica that came meanwhile, on a smaller accelerator."""
    small = make_evidence(envelope=structs.replace(ENVELOPE, max_num_batched_tokens=300))
    decision = judged(canary(), make_evidence(), small, after_s=5)
    assert (decision.action, decision.reason) == (Action.ROLL_BACK, Reason.OUT_OF_BOUNDS)


def test_of_several_rules_the_first_decides() -> None:
    bounds = structs.replace(TUNING, bounds=Bounds(max_num_batched_tokens=Range(min=400)))
    newer, restarted = make_evidence(revision=9), canary(limits=LIMITS, revision=3)
    assert judged(canary(), newer, tuning=bounds).reason is Reason.OUT_OF_STEP
    assert judged(restarted, tuning=bounds).reason is Reason.OUT_OF_BOUNDS
    assert judged(canary(), None, None, None, after_s=5).reason is Reason.SETTLING


def test_a_revision_that_somebody_else_set_ends_the_trial_above_it() -> None:
    decision = judged(canary(), make_evidence(revision=9), make_evidence(), after_s=5)
    assert (decision.action, decision.reason, decision.revision) == (Action.ROLL_BACK, Reason.OUT_OF_STEP, 10)
    assert "replica 1 has revision 9, which somebody else set" in decision.why


@pytest.mark.parametrize("mode", ["Disabled", "Recommend"])
def test_a_mode_that_changes_nothing_leaves_no_canary_behind(mode: Any) -> None:
    tuning = structs.replace(TUNING, mode=mode)
    decision = judged(canary(), after_s=5, tuning=tuning)
    assert (decision.action, decision.reason) == (Action.ROLL_BACK, Reason.MODE_CHANGED)
    assert decision.wanted_at("replica 2") == decision.wanted_at("replica 1") == (5, LIMITS)
    after = advanced(decision.state, pods(*[make_evidence(**ITL_OVER)] * 2), tuning=tuning)
    assert (after.action, after.state.trial) == (Action.HOLD, None)
    recommended = advanced(TunerState(), pods(*[make_evidence(**ITL_OVER)] * 2), tuning=tuning)
    assert (recommended.action, recommended.state.trial) == (Action.CHANGE, None)


def test_a_trial_replays_from_its_record() -> None:
    state, evidence = in_trial(on_trial()), tuple(pods(make_evidence(**ITL_OVER), canary()))
    record = DecisionRecord(
        time="",
        deployment="chat",
        tuning=TUNING,
        state=state,
        evidence=evidence,
        now_s=NOW_S + WINDOW_S,
        decision=advance(TUNING, state, evidence, now_s=NOW_S + WINDOW_S),
        canary_first=True,
    )
    assert from_line(to_line(record)).replay() == record.decision


@dataclass
class Replica:
    """Takes what it is given, as a runtime does: never an older revision."""

    revision: int = 0
    limits: Limits = LIMITS
    answers: bool = True
    itl_over: int = 0

    def take(self, wanted: tuple[int, Limits] | None) -> None:
        if wanted is not None and self.answers and wanted[0] >= self.revision:
            self.revision, self.limits = wanted

    def evidence(self) -> Evidence | None:
        if not self.answers:
            return None
        return make_evidence(
            revision=self.revision, limits=self.limits, itl_over=self.itl_over, blocked_by={"budget": 0.5}
        )


class Fleet(RuleBasedStateMachine):
    """Replicas come, go, restart, fall silent and get worse at random while advance() tunes them."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.state = TunerState()
        self.replicas: dict[str, Replica] = {}
        self.issued = 0
        self.names = itertools.count(1)

    @initialize(count=st.integers(1, 4))
    def start(self, count: int) -> None:
        for _ in range(count):
            self.join()

    @rule()
    def join(self) -> None:
        if len(self.replicas) < 5:
            self.replicas[f"replica {next(self.names)}"] = Replica()

    @precondition(lambda self: len(self.replicas) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        del self.replicas[data.draw(st.sampled_from(sorted(self.replicas)))]

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), answers=st.booleans(), itl_over=st.sampled_from([0, 800, 4000]))
    def change(self, data: st.DataObject, answers: bool, itl_over: int) -> None:
        replica = self.replicas[data.draw(st.sampled_from(sorted(self.replicas)))]
        replica.answers, replica.itl_over = answers, itl_over

    @precondition(lambda self: self.replicas)
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        replica = self.replicas[data.draw(st.sampled_from(sorted(self.replicas)))]
        replica.revision, replica.limits = 0, LIMITS

    @rule(rounds=st.integers(1, 6))
    def tune(self, rounds: int) -> None:
        for _ in range(rounds):
            self.now_s += 15
            self.round()

    def round(self) -> None:
        evidence = [PodEvidence(pod=pod, evidence=one.evidence()) for pod, one in self.replicas.items()]
        before = self.state
        decision = advance(TUNING, before, evidence, now_s=self.now_s)
        self.check(before, decision)
        if decision.state.trial is not None and decision.reason is not Reason.NO_EVIDENCE:
            assert self.now_s - decision.state.trial.started_s <= (PATIENCE_WINDOWS + 1) * WINDOW_S
        self.state = decision.state
        for pod, replica in self.replicas.items():
            replica.take(decision.wanted_at(pod))

    def check(self, before: TunerState, decision: Decision) -> None:
        after = decision.state
        assert (before.trial is not None and after.trial is None) == (
            decision.action in (Action.PROMOTE, Action.ROLL_BACK)
        )
        assert (before.trial is None and after.trial is not None) == (decision.action is Action.TRY)
        if decision.action in (Action.TRY, Action.ROLL_BACK, Action.CHANGE):
            assert decision.revision > self.issued
            self.issued = decision.revision
        if decision.action is Action.CHANGE and decision.reason is Reason.INTER_TOKEN_LATENCY_OVER:
            assert len(self.replicas) == 1

    @invariant()
    def only_the_canary_has_what_is_on_trial(self) -> None:
        trial = self.state.trial
        for pod, replica in self.replicas.items():
            if trial is not None and replica.revision == trial.revision:
                assert pod == trial.canary


Fleet.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFleet = Fleet.TestCase

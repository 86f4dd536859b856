"""decide(): symptom, cause and move, case by case, and what must hold for any evidence."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from flyball_operator.spec import Bounds, Objectives, Range
from flyball_operator.tuning import Action, Decision, Knob, Reason, TunerState, decide
from flyball_operator.tuning.knobs import as_change, contradictions, same, spans, towards
from flyball_operator.tuning.record import DecisionRecord, from_line, to_line
from flyball_operator.tuning.state import Direction, Move
from flyball_protocol import Evidence, KVBlocks, Limits, LimitsChange
from flyball_protocol import Objectives as PostedObjectives
from operator_kit.evidence import ENVELOPE, LENGTHS, LIMITS, MODEL, POSTED, TUNING, make_evidence, pods

NOW_S = 10_000.0
PACED = structs.replace(LIMITS, step_time_target_ms=38.0)
SETTLED = TunerState(revision=3, limits=PACED, objectives=POSTED, settled=True, tuned=True, family="demo/t1")
PLANNED = {"step_model": MODEL, "lengths": LENGTHS}
SLOW = structs.replace(MODEL, base_s=0.033)
"""Little fits into 40 ms beside the fixed part."""
TOO_SLOW = structs.replace(MODEL, base_s=0.041)
"""One sequence alone takes longer than 40 ms."""
LARGE = KVBlocks(total=20_000, capacity=16_000, free=10_000, used=8000, cached=2000)
TIGHT = KVBlocks(total=1000, capacity=1000, free=0, used=1000, cached=0)


def decided(*evidence: Evidence | None, state: TunerState = SETTLED, now_s: float = NOW_S, **tuning: Any) -> Decision:
    return decide(structs.replace(TUNING, **tuning), state, pods(*evidence), now_s=now_s)


def seen(**fields: Any) -> Evidence:
    return make_evidence(**({"limits": PACED} | PLANNED | fields))


@dataclass
class Case:
    evidence: dict[str, Any]
    reason: Reason
    changes: dict[str, float]


CASES = {
    "all well": Case({}, Reason.STEADY, {}),
    "all well, and a limit is binding": Case({"blocked_by": {"seqs": 0.9}}, Reason.STEADY, {}),
    "ITL over: the step target goes by how far it is over": Case(
        {"itl_over": 4000}, Reason.INTER_TOKEN_LATENCY_OVER, {"step_time_target_ms": 30.4}
    ),
    "ITL over is more urgent than TTFT over": Case(
        {"itl_over": 4000, "ttft_over": 500, "blocked_by": {"budget": 0.9}},
        Reason.INTER_TOKEN_LATENCY_OVER,
        {"step_time_target_ms": 30.4},
    ),
    "ITL over because decodes alone take too long": Case(
        {"itl_over": 4000, "num_running": 64, "step_model": structs.replace(MODEL, context_token_s=5e-7)},
        Reason.INTER_TOKEN_LATENCY_OVER,
        {"max_num_seqs": 47},
    ),
    "ITL over with no step target in force: that of the plan": Case(
        {"itl_over": 4000, "limits": LIMITS}, Reason.INTER_TOKEN_LATENCY_OVER, {"step_time_target_ms": 38.85}
    ),
    "ITL over, nothing known of the steps, and the target at its lowest": Case(
        {"itl_over": 4000, "limits": structs.replace(LIMITS, step_time_target_ms=14.0), "step_model": None},
        Reason.INTER_TOKEN_LATENCY_OVER,
        {"max_num_batched_tokens": 358},
    ),
    "ITL over with nothing left to cut": Case(
        {
            "itl_over": 4000,
            "limits": Limits(
                max_num_seqs=1, kv_cache_fraction=0.8, max_num_batched_tokens=16, step_time_target_ms=14.0
            ),
            "step_model": None,
        },
        Reason.AT_LIMIT,
        {},
    ),
    "TTFT over, blocked by sequences": Case(
        {"ttft_over": 500, "blocked_by": {"seqs": 0.4}, "limits": structs.replace(PACED, max_num_seqs=10)},
        Reason.TTFT_OVER,
        {"max_num_seqs": 14},
    ),
    "TTFT over, blocked by sequences, and the plan says no more": Case(
        {"ttft_over": 500, "blocked_by": {"seqs": 0.4}}, Reason.NOT_THE_LIMITS, {}
    ),
    "TTFT over, blocked by the budget": Case(
        {"ttft_over": 500, "blocked_by": {"budget": 0.4}, "limits": structs.replace(PACED, max_num_batched_tokens=64)},
        Reason.TTFT_OVER,
        {"max_num_batched_tokens": 1024},
    ),
    "TTFT over, blocked by sequences, of which far too few run: all of the way at once": Case(
        {"ttft_over": 500, "blocked_by": {"seqs": 0.4}, "limits": structs.replace(PACED, max_num_seqs=2)},
        Reason.TTFT_OVER,
        {"max_num_seqs": 14},
    ),
    "TTFT over, blocked by the step target, which may be longer": Case(
        {
            "ttft_over": 500,
            "blocked_by": {"step_time": 0.4},
            "limits": structs.replace(PACED, step_time_target_ms=20.0),
            "kv_blocks": LARGE,
        },
        Reason.TTFT_OVER,
        {"step_time_target_ms": 38.85},
    ),
    "TTFT over, blocked by a step target that suits a small KV pool: it stays": Case(
        {
            "ttft_over": 500,
            "blocked_by": {"step_time": 0.4},
            "limits": structs.replace(PACED, step_time_target_ms=15.05),
            "kv_blocks": TIGHT,
            "num_arrived": 10,
        },
        Reason.AT_LIMIT,
        {},
    ),
    "TTFT over, blocked by KV: shorter steps": Case(
        {"ttft_over": 500, "blocked_by": {"kv": 0.4}, "kv_blocks": TIGHT, "num_arrived": 10},
        Reason.TTFT_OVER,
        {"step_time_target_ms": 15.05},
    ),
    "TTFT over, and more comes than can be served": Case(
        {"ttft_over": 500, "blocked_by": {"step_time": 0.4}, "num_arrived": 60_000, "kv_blocks": LARGE},
        Reason.NOT_THE_LIMITS,
        {},
    ),
    "TTFT over, and no limit holds the queue back": Case(
        {"ttft_over": 500, "blocked_by": {"seqs": 0.1, "none": 0.9}, "num_arrived": 10}, Reason.NOT_THE_LIMITS, {}
    ),
    "TTFT over, ITL near: nothing is raised": Case(
        {
            "ttft_over": 500,
            "itl_over": 1000,
            "blocked_by": {"seqs": 0.4},
            "limits": structs.replace(LIMITS, max_num_seqs=8),
        },
        Reason.NEAR_OBJECTIVE,
        {},
    ),
    "preemption that costs no objective is left alone": Case(
        {"num_recomputed_tokens": 20_000, "kv_blocks": TIGHT}, Reason.STEADY, {}
    ),
    "too few samples": Case({"ttft_count": 20}, Reason.FEW_SAMPLES, {}),
    "nothing is counted yet": Case({"posted": None}, Reason.FEW_SAMPLES, {}),
    "a limit outside the bounds": Case(
        {"limits": structs.replace(PACED, max_num_seqs=500)}, Reason.OUT_OF_BOUNDS, {"max_num_seqs": 128}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_symptom_and_move(name: str) -> None:
    case = CASES[name]
    evidence = seen(**case.evidence)
    state = structs.replace(SETTLED, limits=evidence.target)
    decision = decided(evidence, evidence, state=state)
    assert decision.reason is case.reason, decision.why
    trial = decision.state.trial
    after = decision.limits if trial is None else trial.limits
    assert after == structs.replace(evidence.target, **case.changes), decision.why
    assert (decision.action is Action.HOLD) == (not case.changes)
    if trial is not None:
        assert [one for one in ("replica 1", "replica 2") if decision.wanted_at(one) == (4, after)] == [trial.canary]


def test_the_first_round_posts_objectives_and_step_target() -> None:
    decision = decided(make_evidence(posted=None), state=TunerState())
    assert (decision.action, decision.reason) == (Action.CHANGE, Reason.OBJECTIVES_SET)
    assert decision.limits == structs.replace(LIMITS, step_time_target_ms=34.0)
    assert "Steps aim at 85% of 40 ms until the step model has settled" in decision.why
    assert (decision.state.objectives, decision.is_lease_at("replica 1")) == (POSTED, True)


def test_before_there_is_a_plan_the_step_target_has_room_for_a_few_sequences() -> None:
    unsettled = {"posted": None, "step_model": structs.replace(SLOW, settled=False)}
    assert decided(make_evidence(**unsettled), state=TunerState()).limits == structs.replace(
        LIMITS, step_time_target_ms=34.0
    )
    decision = decided(make_evidence(**unsettled, lengths=LENGTHS), state=TunerState())
    few_ms = 1000 * SLOW.predict(16, 4, 4400, 256)
    assert decision.limits is not None and decision.limits.step_time_target_ms == pytest.approx(1.06 * few_ms, abs=0.01)


def test_the_first_step_target_suits_the_kv_pool() -> None:
    """Where the pool is full before steps are as long as the objective allows, longer ones would only fill it."""
    first = {"posted": None, "limits": LIMITS}
    small, large = (decided(seen(**first, kv_blocks=one), state=TunerState()) for one in (TIGHT, LARGE))
    assert small.limits == structs.replace(LIMITS, step_time_target_ms=15.05)
    assert large.limits == structs.replace(LIMITS, step_time_target_ms=38.85)
    assert "Steps aim at 38% of 40 ms: with longer ones, the KV pool is full before" in small.why
    assert "Steps aim at 97% of 40 ms, because some take longer than predicted" in large.why
    assert not small.state.guessed


def test_a_guess_that_fills_the_kv_pool_is_replaced_by_shorter_steps() -> None:
    guess = decided(make_evidence(posted=None, kv_blocks=TIGHT), state=TunerState())
    low = seen(limits=guess.limits, revision=4, kv_blocks=TIGHT)
    planned = decided(low, state=guess.state, now_s=NOW_S + 5)
    assert planned.reason is Reason.STEP_TARGET_PLANNED and "the KV pool is full before" in planned.why
    assert planned.limits == structs.replace(LIMITS, step_time_target_ms=15.05)


def test_a_guessed_step_target_is_replaced_by_the_plans_as_soon_as_there_is_one() -> None:
    guess = decided(make_evidence(posted=None), state=TunerState())
    low = {"limits": guess.limits, "revision": 4}
    assert guess.state.guessed and decided(seen(**low, step_model=None), state=guess.state).action is Action.HOLD
    planned = decided(seen(**low, kv_blocks=LARGE), state=guess.state, now_s=NOW_S + 5)
    assert (planned.action, planned.reason) == (Action.CHANGE, Reason.STEP_TARGET_PLANNED)
    assert planned.limits == structs.replace(LIMITS, step_time_target_ms=38.85) and not planned.state.guessed
    tuned = decided(make_evidence(posted=None, limits=PACED), state=TunerState(revision=3, limits=PACED))
    assert not tuned.state.guessed, "that one was found by trials"


def test_a_guess_that_is_nearly_as_long_as_the_plans_target_stays() -> None:
    near = structs.replace(LIMITS, step_time_target_ms=35.5)
    guess = structs.replace(SETTLED, limits=near, guessed=True)
    assert decided(seen(limits=near, kv_blocks=LARGE), state=guess).action is Action.HOLD, "38.85 ms are a tenth more"
    far = structs.replace(LIMITS, step_time_target_ms=34.5)
    planned = decided(seen(limits=far, kv_blocks=LARGE), state=structs.replace(guess, limits=far))
    assert planned.reason is Reason.STEP_TARGET_PLANNED


ITL_ALONE = Objectives(inter_token_latency_p95_milliseconds=40)
CUT = structs.replace(PACED, step_time_target_ms=27.2)


def cut_long_ago(**fields: Any) -> tuple[Evidence, TunerState]:
    posted = PostedObjectives(itl_s=0.04)
    fields = {
        "limits": CUT,
        "posted": posted,
        "blocked_by": {"step_time": 0.6},
        "num_waiting": 9,
        "kv_blocks": LARGE,
    } | fields
    cut = Move(knob=Knob.STEP_TIME, direction=Direction.CUT, before=38.0, after=27.2, at_s=NOW_S - 200)
    return seen(**fields), structs.replace(SETTLED, limits=CUT, objectives=posted, moves=(cut,), trim=0.7)


def test_a_cut_is_not_for_ever() -> None:
    """While the queue waits and there is room, steps get longer again, as far as the step model allows."""
    evidence, state = cut_long_ago()
    targets, now_s = [], NOW_S
    for _ in range(10):
        decision = decided(evidence, state=state, now_s=now_s, objectives=ITL_ALONE)
        assert decision.limits is not None
        targets.append(decision.limits.step_time_target_ms)
        evidence = structs.replace(
            evidence, target=decision.limits, effective=decision.limits, revision=decision.revision
        )
        state, now_s = decision.state, now_s + 121
        if decision.action is Action.CHANGE:
            assert decision.reason is Reason.ROOM_TO_SPARE and state.fallback is not None
    assert targets[-1] == pytest.approx(38.85, abs=0.05) and targets == sorted(targets)
    assert decided(evidence, state=state, now_s=now_s, objectives=ITL_ALONE).action is not Action.CHANGE


def test_a_raise_into_the_room_is_taken_back_if_it_does_harm() -> None:
    evidence, state = cut_long_ago()
    raised = decided(evidence, state=state, objectives=ITL_ALONE)
    worse, _ = cut_long_ago(limits=raised.limits, revision=raised.revision, itl_over=3000)
    back = decided(worse, state=raised.state, now_s=NOW_S + 31, objectives=ITL_ALONE)
    assert (back.action, back.reason, back.limits) == (Action.ROLL_BACK, Reason.WORSE_THAN_BEFORE, CUT)
    again, _ = cut_long_ago(revision=back.revision)
    assert decided(again, state=back.state, now_s=NOW_S + 400, objectives=ITL_ALONE).action is not Action.CHANGE


@pytest.mark.parametrize("fields", [{"blocked_by": {}}, {"itl_over": 900}, {"step_model": None}])
def test_limits_stay_where_nobody_waits_or_there_is_no_room(fields: dict[str, Any]) -> None:
    evidence, state = cut_long_ago(**fields)
    assert decided(evidence, state=state, objectives=ITL_ALONE).action is Action.HOLD


def test_a_replica_that_just_started_is_told_the_objectives_and_not_judged() -> None:
    young = make_evidence(posted=None, uptime_s=1.0)
    decision = decided(young, state=TunerState())
    assert decision.reason is Reason.OBJECTIVES_SET
    assert decided(seen(uptime_s=1.0, itl_over=9000), state=decision.state).reason is Reason.NO_EVIDENCE


def test_after_a_restart_the_step_target_in_force_is_kept() -> None:
    decision = decided(seen(posted=None), state=TunerState(revision=3, limits=PACED))
    assert (decision.reason, decision.limits) == (Reason.OBJECTIVES_SET, PACED)


STARVED: dict[str, Any] = {"ttft_count": 4, "blocked_by": {"step_time": 0.9}}


def test_a_step_target_below_what_a_few_sequences_take_is_lifted() -> None:
    starved = seen(step_model=SLOW, limits=structs.replace(PACED, step_time_target_ms=31.0), **STARVED)
    decision = decided(starved, state=structs.replace(SETTLED, limits=starved.target))
    assert (decision.action, decision.reason) == (Action.CHANGE, Reason.STEP_TARGET_TOO_SHORT)
    assert decision.limits == structs.replace(PACED, step_time_target_ms=38.85)
    assert decided(seen(step_model=SLOW, **STARVED)).reason is Reason.FEW_SAMPLES, "38 ms are enough for a few"


def test_a_step_target_that_no_request_waits_for_is_left_alone_while_the_objectives_are_met() -> None:
    """A busy neighbour makes steps look long for a while. What was learned in that time is no reason to change anything."""
    short = structs.replace(PACED, step_time_target_ms=31.0)
    state = structs.replace(SETTLED, limits=short)
    assert decided(seen(step_model=SLOW, limits=short), state=state).reason is Reason.STEADY
    late = decided(seen(step_model=SLOW, limits=short, ttft_over=500), state=state)
    assert late.reason is Reason.STEP_TARGET_TOO_SHORT, "first tokens are late, so a longer target may help"


def test_a_step_target_just_below_what_a_few_sequences_take_is_lifted_where_an_objective_is_missed() -> None:
    just_below = structs.replace(PACED, step_time_target_ms=34.0)  # a few take 36 ms
    waiting = seen(step_model=SLOW, limits=just_below, **STARVED)
    state = structs.replace(SETTLED, limits=just_below)
    assert decided(waiting, state=state).action is Action.HOLD
    late = seen(step_model=SLOW, limits=just_below, ttft_over=500)
    assert decided(late, state=state).reason is Reason.STEP_TARGET_TOO_SHORT


def test_a_step_target_is_lifted_once_the_objective_is_known_to_be_out_of_reach() -> None:
    low = seen(step_model=TOO_SLOW, limits=structs.replace(PACED, step_time_target_ms=34.0), itl_count=10, **STARVED)
    decision = decided(low, state=structs.replace(SETTLED, limits=low.target))
    assert (decision.action, decision.reason) == (Action.CHANGE, Reason.STEP_TARGET_TOO_SHORT)
    assert "40 ms: one sequence alone needs 41.1 ms" in decision.why
    assert decision.limits == structs.replace(PACED, step_time_target_ms=205.0)  # 41 ms are a fifth of it
    known = seen(step_model=TOO_SLOW, limits=decision.limits, itl_over=9000)
    held = decided(known, state=structs.replace(SETTLED, limits=known.target))
    assert (held.action, held.reason) == (Action.HOLD, Reason.SLO_INFEASIBLE)


def test_interruptions_are_told_and_not_tuned_against() -> None:
    throttled = structs.replace(MODEL, interrupted_share=0.17, interruption_s=0.061)
    decision = decided(seen(step_model=throttled, itl_over=3000), seen(step_model=throttled, itl_over=3000))
    assert (decision.action, decision.reason) == (Action.HOLD, Reason.SLO_INFEASIBLE)
    assert decision.why.startswith("inter-token latency of 40 ms: 17% of steps are interrupted for about 61 ms")
    one_of_two = decided(seen(step_model=throttled, itl_over=3000), seen(itl_over=3000))
    short_ones = decided(seen(step_model=structs.replace(throttled, interruption_s=0.02), itl_over=3000))
    assert {one_of_two.reason, short_ones.reason} == {Reason.INTER_TOKEN_LATENCY_OVER}


def test_no_step_target_is_posted_that_no_step_can_keep() -> None:
    decision = decided(make_evidence(posted=None, step_model=TOO_SLOW, lengths=LENGTHS), state=TunerState())
    assert (decision.reason, decision.limits) == (
        Reason.OBJECTIVES_SET,
        structs.replace(LIMITS, step_time_target_ms=205.0),
    )


def test_a_pool_for_two_sequences_asks_for_no_step_that_none_can_keep() -> None:
    small = KVBlocks(total=140, capacity=140, free=0, used=140, cached=0)
    posted = PostedObjectives(ttft_s=1.0)
    evidence = seen(ttft_over=500, blocked_by={"kv": 0.9}, kv_blocks=small, num_arrived=10, posted=posted)
    state = structs.replace(SETTLED, objectives=posted)
    trial = decided(evidence, state=state, objectives=Objectives(ttft_p95_milliseconds=1000)).state.trial
    least_ms = 1000 * MODEL.predict(16, 4, 4400, 256)
    assert trial is not None and trial.limits.step_time_target_ms == pytest.approx(1.06 * least_ms, abs=0.01)


def test_new_objectives_start_afresh() -> None:
    state = structs.replace(SETTLED, trim=0.7).banned(move(38.0, 30.0), NOW_S)
    tuning = Objectives(inter_token_latency_p95_milliseconds=80)
    decision = decided(seen(kv_blocks=LARGE), state=state, objectives=tuning)
    assert decision.reason is Reason.OBJECTIVES_SET
    assert decision.limits is not None and decision.limits.step_time_target_ms == pytest.approx(77.7, abs=0.1)
    assert (decision.state.trim, decision.state.bans) == (1.0, ())
    assert decision.state.objectives == PostedObjectives(itl_s=0.08)


def test_without_an_inter_token_objective_nothing_is_paced() -> None:
    decision = decided(seen(), objectives=Objectives(ttft_p95_milliseconds=1000))
    assert decision.limits is not None and decision.limits.step_time_target_ms is None


@pytest.mark.parametrize(
    ("objectives", "said"),
    [
        (
            Objectives(inter_token_latency_p95_milliseconds=0),
            "inter-token latency of 0 ms: an objective has to be above 0",
        ),
        (Objectives(ttft_p95_milliseconds=-5), "time to first token of -5 ms: an objective has to be above 0"),
        (Objectives(inter_token_latency_p95_milliseconds=8), "one sequence alone needs 10.1 ms"),
        (Objectives(ttft_p95_milliseconds=40), "a mean prompt alone needs 71.6 ms"),
        (
            Objectives(ttft_p95_milliseconds=90, inter_token_latency_p95_milliseconds=11),
            "the objectives contradict each other: a mean prompt whose steps stay within 11 ms needs 843 ms",
        ),
    ],
)
def test_objectives_that_cannot_be_met_are_told_with_the_least_that_is_possible(
    objectives: Objectives, said: str
) -> None:
    tuning = structs.replace(TUNING, objectives=objectives)
    ttft_ms, itl_ms = objectives.ttft_p95_milliseconds, objectives.inter_token_latency_p95_milliseconds
    posted = PostedObjectives(
        ttft_s=None if ttft_ms is None else ttft_ms / 1000, itl_s=None if itl_ms is None else itl_ms / 1000
    )
    is_possible = all(one is None or one > 0 for one in (posted.ttft_s, posted.itl_s))
    evidence = pods(seen(posted=posted if is_possible else None, itl_over=20000, ttft_over=1000))
    decision = decide(tuning, structs.replace(SETTLED, objectives=posted), evidence, now_s=NOW_S)
    assert (decision.action, decision.reason) == (Action.HOLD, Reason.SLO_INFEASIBLE)
    assert said in decision.why and said in decision.findings.infeasible


def test_bounds_that_no_value_of_the_envelope_satisfies_are_told() -> None:
    bounds = Bounds(max_num_seqs=Range(min=300, max=400))
    decision = decided(seen(), bounds=bounds)
    assert (decision.action, decision.reason) == (Action.HOLD, Reason.OUT_OF_BOUNDS)
    assert "tuning.bounds.maxNumSeqs is 300 to 400, and the replicas take 1 to 128" in decision.why
    assert contradictions(Bounds(kv_cache_percent=Range(max=5)), ENVELOPE) == [
        "tuning.bounds.kvCachePercent is at most 5, and the replicas take 10 to 100"
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"version": 3}, "evidence of version 3"),
        ({"blocked_by": {"kv": math.nan}}, "evidence.blocked_by.kv is nan"),
        ({"num_running": -1}, "evidence.num_running is -1"),
        ({"ready": False}, "not ready"),
    ],
)
def test_evidence_that_cannot_be_trusted_is_a_hold_that_says_so(fields: dict[str, Any], said: str) -> None:
    late = seen(ttft_over=900, blocked_by={"seqs": 0.9})
    decision = decided(*[structs.replace(late, **fields)] * 2)
    assert (decision.action, decision.reason) == (Action.HOLD, Reason.NO_EVIDENCE)
    assert said in decision.why
    assert decision.limits == PACED, "what is in force is renewed"


def test_fewer_than_half_of_the_replicas_are_too_few() -> None:
    decision = decided(seen(itl_over=9000), None, None)
    assert (decision.reason, decision.limits) == (Reason.PARTIAL_EVIDENCE, PACED)
    assert "only 1 of 3 replicas have usable evidence (replica 2: no answer in 2.0 s" in decision.why
    assert decided(seen(itl_over=9000), None).action is Action.TRY


def test_stale_evidence_is_a_hold() -> None:
    stale = [structs.replace(one, age_s=100.0) for one in pods(seen(itl_over=9000))]
    assert decide(TUNING, SETTLED, stale, now_s=NOW_S).reason is Reason.NO_EVIDENCE


def test_a_clock_that_goes_back_is_a_hold() -> None:
    state = decided(seen()).state
    decision = decided(seen(uptime_s=300.0, itl_over=9000), state=state)
    assert (decision.reason, "its clock went back" in decision.why) == (Reason.NO_EVIDENCE, True)


def test_replicas_behind_are_waited_for() -> None:
    decision = decided(seen(itl_over=9000), seen(itl_over=9000, revision=2))
    assert decision.reason is Reason.DISAGREEMENT
    assert "replica 2 behind revision 3" in decision.why


def test_a_lease_that_ran_out_is_set_again() -> None:
    decision = decided(seen(), seen(limits=structs.replace(PACED, max_num_seqs=32)))
    assert (decision.action, decision.reason, decision.revision) == (Action.CHANGE, Reason.OUT_OF_STEP, 4)
    assert decision.limits == PACED


def move(before: float, after: float, at_s: float = NOW_S - 30, knob: Knob = Knob.STEP_TIME) -> Move:
    direction = Direction.RAISE if after > before else Direction.CUT
    return Move(knob=knob, direction=direction, before=before, after=after, at_s=at_s)


def ban_left_s(state: TunerState, direction: Direction, value: float) -> float:
    ban = state.ban(Knob.STEP_TIME, direction, value, NOW_S)
    assert ban is not None
    return ban.until_s - NOW_S


def test_counts_from_before_a_change_are_waited_out() -> None:
    state = structs.replace(SETTLED, moves=(move(30.0, 38.0),), settled=False)
    assert decided(seen(itl_over=9000, since_s=600.0), state=state).reason is Reason.SETTLING
    assert decided(seen(itl_over=9000, since_s=20.0), state=state).reason is not Reason.SETTLING


def test_a_raise_that_does_harm_later_is_taken_back() -> None:
    before = structs.replace(PACED, step_time_target_ms=30.0)
    state = structs.replace(SETTLED, moves=(move(30.0, 38.0),), settled=False, fallback=before)
    decision = decided(seen(itl_over=9000, since_s=20.0), state=state)
    assert (decision.action, decision.reason) == (Action.ROLL_BACK, Reason.WORSE_THAN_BEFORE)
    assert (decision.limits, decision.revision) == (before, 4)
    assert ban_left_s(decision.state, Direction.RAISE, 38.0) == 600


def test_limits_that_served_well_are_committed() -> None:
    state = structs.replace(SETTLED, moves=(move(30.0, 38.0, NOW_S - 61),), settled=False)
    decision = decided(seen(), state=state)
    assert (decision.action, decision.reason) == (Action.COMMIT, Reason.SETTLED)
    assert not decision.is_lease_at("replica 1")
    assert decided(seen(itl_over=4000), state=state).action is not Action.COMMIT
    assert decided(seen(ttft_count=10), state=state).action is not Action.COMMIT, "without traffic nothing is shown"


def test_a_move_that_gained_nothing_is_banned_and_a_larger_one_is_not() -> None:
    state = SETTLED.banned(move(38.0, 30.4), NOW_S - 100)
    decision = decided(seen(itl_over=4000), state=state)
    assert decision.state.trial is not None and decision.state.trial.move.after == pytest.approx(26.6)
    both = state.banned(move(38.0, 26.6), NOW_S - 100)
    held = decided(seen(itl_over=4000), state=both)
    assert (held.reason, "is not tried for 500 s" in held.why) == (Reason.BANNED, True)
    assert ban_left_s(both.banned(move(38.0, 26.6), NOW_S), Direction.CUT, 26.6) == 1200


def test_a_move_that_could_not_be_judged_is_banned_for_less_and_longer_each_time() -> None:
    state, waits = SETTLED, []
    for _ in range(8):
        state = state.banned(move(38.0, 30.4), NOW_S, unjudged_at="replica 1")
        waits.append(ban_left_s(state, Direction.CUT, 30.4))
    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert decided(seen(itl_over=4000), state=state).state.trial is not None, "a larger one is another"
    held = decided(seen(itl_over=4000), state=state.banned(move(38.0, 26.6), NOW_S, unjudged_at="replica 1"))
    assert "could not be judged lately and is not tried for 3600 s" in held.why


def test_cool_downs_hold_a_second_raise_back() -> None:
    late = seen(ttft_over=500, blocked_by={"seqs": 0.4}, limits=structs.replace(PACED, max_num_seqs=10))
    state = structs.replace(SETTLED, limits=late.target, moves=(move(20.0, 38.0, NOW_S - 40),))
    decision = decided(late, state=state)
    assert (decision.reason, "in 20 s" in decision.why) == (Reason.COOLING_DOWN, True)


def test_a_limit_that_turns_round_waits_longer_each_time() -> None:
    turns = tuple(move(*pair, NOW_S - age_s) for pair, age_s in (((30, 40), 200), ((40, 30), 130), ((30, 40), 65)))
    state = structs.replace(SETTLED, moves=turns)
    assert state.stretched(60, now_s=NOW_S) == 240


def test_little_traffic_widens_the_window() -> None:
    state, sparse = SETTLED, {"ttft_count": 30, "itl_count": 600, "since_s": 1000.0}
    reasons = []
    for i in range(20):
        decision = decided(seen(**sparse, uptime_s=600.0 + 15 * i), state=state, now_s=NOW_S + 15 * i)
        reasons.append(decision.reason)
        state = decision.state
    assert reasons[0] is Reason.FEW_SAMPLES
    assert reasons[-1] is Reason.STEADY, "30 samples a minute are enough after four minutes"


def test_limits_of_its_own_for_a_slower_device() -> None:
    slower = StepModelOf(2.0)
    roomy = KVBlocks(total=9000, capacity=9000, free=9000, used=0, cached=0)
    limits = structs.replace(PACED, max_num_seqs=10)
    late = {"ttft_over": 500, "blocked_by": {"seqs": 0.4}, "limits": limits, "kv_blocks": roomy}
    fast, slow = seen(**late, key="a"), seen(**late, key="b", step_model=slower)
    state = structs.replace(SETTLED, limits=fast.target)
    decision = decided(fast, fast, slow, state=state)
    assert decision.action is Action.TRY, decision.why
    own = decision.state.seqs["replica 3"]
    assert own < decision.state.trial.limits.max_num_seqs  # type: ignore[union-attr]
    assert decision.state.own("replica 3", structs.replace(PACED, max_num_seqs=60)).max_num_seqs == own
    assert not decision.findings.slow, "it is another device, which is no fault"


def StepModelOf(factor: float) -> Any:  # noqa: N802
    return structs.replace(
        MODEL,
        base_s=factor * MODEL.base_s,
        token_s=factor * MODEL.token_s,
        context_token_s=factor * MODEL.context_token_s,
    )


def test_capacity_and_headroom_are_found_each_round() -> None:
    findings = decided(seen(num_arrived=120)).findings
    assert findings.arrivals_per_s == 2.0
    assert findings.capacity_per_s == pytest.approx(3.8, abs=0.1)
    assert findings.headroom == pytest.approx(0.47, abs=0.02)


def test_recommend_decides_the_same_and_tries_nothing() -> None:
    decision = decided(seen(itl_over=4000), state=structs.replace(SETTLED, tuned=False), mode="Recommend")
    assert (decision.action, decision.reason) == (Action.CHANGE, Reason.INTER_TOKEN_LATENCY_OVER)


def test_a_change_can_lift_a_step_target() -> None:
    change = as_change(LIMITS)
    assert change.applied_to(PACED) == LIMITS
    assert isinstance(change, LimitsChange) and same(change.applied_to(PACED), LIMITS)


@pytest.mark.parametrize(
    ("value", "aim", "expected"),
    [(64, 70, None), (64, 71, 71), (64, 50, 50), (64, 500, 128), (128, 500, None), (1, 0, None)],
)
def test_a_move_stays_inside_its_span_and_outside_the_dead_band(
    value: float, aim: float, expected: float | None
) -> None:
    span = spans(TUNING.bounds, ENVELOPE, POSTED)[Knob.MAX_NUM_SEQS]
    assert towards(Knob.MAX_NUM_SEQS, value, aim, span) == expected


LIMITS_ANY = st.builds(
    Limits,
    max_num_seqs=st.integers(1, 200),
    kv_cache_fraction=st.floats(0.05, 1),
    max_num_batched_tokens=st.integers(1, 4000),
    step_time_target_ms=st.none() | st.floats(1, 1000),
)
EVIDENCE = st.builds(
    make_evidence,
    limits=LIMITS_ANY,
    revision=st.integers(0, 5),
    itl_over=st.integers(0, 20000),
    ttft_over=st.integers(0, 1000),
    blocked_by=st.dictionaries(st.sampled_from(["none", "seqs", "kv", "budget", "step_time"]), st.floats(0, 1)),
    num_recomputed_tokens=st.integers(0, 50_000),
    num_arrived=st.integers(0, 10_000),
    since_s=st.floats(0, 1000),
    step_model=st.none() | st.sampled_from([MODEL, StepModelOf(2), StepModelOf(20)]),
    lengths=st.none() | st.just(LENGTHS),
    posted=st.none() | st.just(POSTED),
    uptime_s=st.sampled_from([5.0, 600.0]),
    num_running=st.integers(0, 500),
    template=st.sampled_from(["t1", "t1", "t2"]),
)
STATES = st.sampled_from(
    [TunerState(), SETTLED, structs.replace(SETTLED, settled=False, fallback=LIMITS, moves=(move(30.0, 38.0),))]
)


@settings(max_examples=150)
@given(st.lists(st.none() | EVIDENCE, max_size=4), STATES, st.sampled_from(["Auto", "Recommend", "Disabled"]))
def test_what_holds_for_any_evidence(fleet: list[Evidence | None], state: TunerState, mode: Any) -> None:
    tuning, evidence = structs.replace(TUNING, mode=mode), tuple(pods(*fleet))
    decision = decide(tuning, state, evidence, now_s=NOW_S)
    record = DecisionRecord(
        time="t", deployment="d", tuning=tuning, state=state, evidence=evidence, now_s=NOW_S, decision=decision
    )
    assert from_line(to_line(record)).replay() == decision
    assert decision.why
    limits = decision.state.trial.limits if decision.state.trial else decision.limits
    if (
        decision.action in (Action.CHANGE, Action.TRY)
        and limits is not None
        and decision.reason is not Reason.OUT_OF_STEP
    ):
        allowed = spans(TUNING.bounds, ENVELOPE, POSTED)
        trial = decision.state.trial
        moved = [knob for knob in Knob if trial is not None and knob.of(limits) != knob.of(trial.before)]
        assert len(moved) == (trial is not None)
        assert all(allowed[knob].clamp(knob.of(limits)) == knob.of(limits) for knob in moved)
        assert decision.revision > max((one.revision for one in fleet if one and one.template == "t1"), default=0) or (
            len({one.template for one in fleet if one}) > 1
        )


@settings(max_examples=60)
@given(st.lists(EVIDENCE, min_size=1, max_size=3), st.sampled_from(["version", "nan", "negative", "stale", "silent"]))
def test_evidence_that_cannot_be_trusted_never_raises_a_limit(fleet: list[Evidence], lie: str) -> None:
    bad = {"version": {"version": 9}, "nan": {"blocked_by": {"kv": math.nan}}, "negative": {"num_steps": -1}}.get(
        lie, {}
    )
    evidence = pods(*[structs.replace(one, **bad) for one in fleet])
    if lie in ("stale", "silent"):
        evidence = [
            structs.replace(one, age_s=500.0, evidence=one.evidence if lie == "stale" else None) for one in evidence
        ]
    decision = decide(TUNING, SETTLED, evidence, now_s=NOW_S)
    assert decision.action is Action.HOLD

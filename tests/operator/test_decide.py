"""decide(): the symptom -> move table, case by case, and what must hold for any evidence."""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from flyball_operator.spec import Bounds, Objectives, Range
from flyball_operator.tuning import Action, Decision, Knob, Reason, TunerState, decide
from flyball_operator.tuning.knobs import spans
from flyball_operator.tuning.record import DecisionRecord, from_line, to_line
from flyball_operator.tuning.state import Direction
from flyball_protocol import Evidence, Limits
from operator_kit.evidence import ENVELOPE, LIMITS, TUNING, make_evidence, pods

NOW_S = 10_000.0


def decided(
    *evidence: Evidence | None, state: TunerState | None = None, now_s: float = NOW_S, **tuning: Any
) -> Decision:
    return decide(structs.replace(TUNING, **tuning), state or TunerState(), pods(*evidence), now_s=now_s)


@dataclass
class Case:
    evidence: dict[str, Any]
    reason: Reason
    changes: dict[str, float]


CASES = {
    "all well and nothing binding": Case({}, Reason.STEADY, {}),
    "ITL over cuts the token budget first": Case(
        {"itl_over": 4000}, Reason.INTER_TOKEN_LATENCY_OVER, {"max_num_batched_tokens": 358}
    ),
    "ITL over is more urgent than TTFT over": Case(
        {"itl_over": 4000, "ttft_over": 500, "blocked_by": {"budget": 0.9}},
        Reason.INTER_TOKEN_LATENCY_OVER,
        {"max_num_batched_tokens": 358},
    ),
    "ITL over with the budget at its floor cuts sequences": Case(
        {"itl_over": 4000, "limits": structs.replace(LIMITS, max_num_batched_tokens=64)},
        Reason.INTER_TOKEN_LATENCY_OVER,
        {"max_num_seqs": 44},
    ),
    "ITL over with nothing left to cut": Case(
        {"itl_over": 4000, "limits": Limits(max_num_seqs=1, kv_cache_fraction=0.8, max_num_batched_tokens=16)},
        Reason.AT_LIMIT,
        {},
    ),
    "TTFT over, blocked by sequences": Case(
        {"ttft_over": 500, "blocked_by": {"seqs": 0.4}}, Reason.TTFT_OVER, {"max_num_seqs": 80}
    ),
    "TTFT over, blocked by the budget": Case(
        {"ttft_over": 500, "blocked_by": {"budget": 0.4, "seqs": 0.2}},
        Reason.TTFT_OVER,
        {"max_num_batched_tokens": 640},
    ),
    "TTFT over, blocked by KV": Case(
        {"ttft_over": 500, "blocked_by": {"kv": 0.4}}, Reason.TTFT_OVER, {"kv_cache_fraction": 1.0}
    ),
    "TTFT over, but no limit blocks": Case(
        {"ttft_over": 500, "blocked_by": {"seqs": 0.1, "none": 0.9}}, Reason.NOT_THE_LIMITS, {}
    ),
    "TTFT over, the binding limit is at the envelope": Case(
        {"ttft_over": 500, "blocked_by": {"seqs": 0.5}, "limits": structs.replace(LIMITS, max_num_seqs=128)},
        Reason.AT_LIMIT,
        {},
    ),
    "TTFT over, the first binding limit is at the envelope, the second is not": Case(
        {
            "ttft_over": 500,
            "blocked_by": {"seqs": 0.5, "budget": 0.2},
            "limits": structs.replace(LIMITS, max_num_seqs=128),
        },
        Reason.TTFT_OVER,
        {"max_num_batched_tokens": 640},
    ),
    "TTFT over, but ITL is close to its budget": Case(
        {"ttft_over": 500, "itl_over": 1000, "blocked_by": {"seqs": 0.5}}, Reason.NEAR_OBJECTIVE, {}
    ),
    "TTFT over, but ITL has too few samples": Case(
        {"ttft_over": 500, "itl_count": 1999, "blocked_by": {"seqs": 0.5}}, Reason.FEW_SAMPLES, {}
    ),
    "preemption throws work away": Case({"num_recomputed_tokens": 5000}, Reason.PREEMPTING, {"max_num_seqs": 44}),
    "preemption throws as much away as is allowed": Case(
        {"num_prompt_tokens": 79_000, "num_recomputed_tokens": 1000}, Reason.STEADY, {}
    ),
    "objectives have room and a limit binds": Case({"blocked_by": {"seqs": 0.5}}, Reason.ROOM, {"max_num_seqs": 80}),
    "objectives are met without room": Case({"itl_over": 500, "blocked_by": {"seqs": 0.5}}, Reason.STEADY, {}),
    "too few first tokens": Case({"ttft_count": 99, "blocked_by": {"seqs": 0.5}}, Reason.FEW_SAMPLES, {}),
    "just started": Case({"uptime_s": 5.0, "itl_over": 4000}, Reason.NO_EVIDENCE, {}),
    "draining": Case({"draining": True, "itl_over": 4000}, Reason.NO_EVIDENCE, {}),
    "impossible shares": Case({"blocked_by": {"seqs": 7.0}}, Reason.NO_EVIDENCE, {}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_symptom_and_move(case: Case) -> None:
    evidence = make_evidence(**case.evidence)
    decision = decided(evidence)
    assert decision.reason is case.reason, decision.why
    assert decision.action is (Action.CHANGE if case.changes else Action.HOLD)
    assert decision.limits == structs.replace(evidence.target, **case.changes)
    assert decision.revision == evidence.revision + bool(case.changes)
    assert decision.why


def test_why_holds_the_numbers() -> None:
    why = decided(make_evidence(itl_over=4000)).why
    for word in ("max_num_batched_tokens 512 -> 358", "20.0% of 20000 inter-token gaps", "40 ms", "budget 5%"):
        assert word in why


TTFT = "50.0% of 1000 first tokens took longer than 1000 ms (46.9% to 53.1%; budget 5%)"
ITL = "20.0% of 20000 inter-token gaps took longer than 40 ms (19.5% to 20.6%; budget 5%)"
NONE_OVER = (
    "0.0% of 1000 first tokens took longer than 1000 ms (0.0% to 0.4%; budget 5%); "
    "0.0% of 20000 inter-token gaps took longer than 40 ms (0.0% to 0.0%; budget 5%)"
)
WHYS = {
    "all well and nothing binding": f"nothing to do: {NONE_OVER}",
    "ITL over cuts the token budget first": (
        f"max_num_batched_tokens 512 -> 358: {ITL}; shorter prefill chunks hold decodes up less"
    ),
    "ITL over with the budget at its floor cuts sequences": (
        f"max_num_seqs 64 -> 44: {ITL}; fewer sequences share a step, and the token budget cannot go lower"
    ),
    "ITL over with nothing left to cut": (
        f"{ITL}, and every limit is at its lower bound; add replicas or relax the objective"
    ),
    "TTFT over, but ITL is close to its budget": (
        f"{TTFT}, but a raise could push inter-token latency over: "
        "5.0% of 20000 inter-token gaps took longer than 40 ms (4.7% to 5.3%; budget 5%)"
    ),
    "TTFT over, blocked by sequences": f"max_num_seqs 64 -> 80: {TTFT}; 40% of steps waited for max_num_seqs",
    "TTFT over, but no limit blocks": (f"{TTFT}, but no limit holds the queue back (none 90%, seqs 10%); add replicas"),
    "TTFT over, the binding limit is at the envelope": f"{TTFT}, and max_num_seqs cannot go higher; add replicas",
    "preemption throws work away": (
        "max_num_seqs 64 -> 44: 4.0% of computed tokens were thrown away by preemption; "
        "fewer sequences fit the KV cache better"
    ),
    "objectives have room and a limit binds": (
        f"max_num_seqs 64 -> 80: objectives have room ({NONE_OVER}); 50% of steps waited for max_num_seqs"
    ),
    "too few first tokens": "too few samples in the last 60 s: 99 of 100 first tokens",
}


@pytest.mark.parametrize("name", WHYS)
def test_why_is_a_sentence(name: str) -> None:
    assert decided(make_evidence(**CASES[name].evidence)).why == WHYS[name]


def test_why_lists_several_things_with_separators() -> None:
    silent = decided(None, None)
    assert silent.why == ("no usable evidence (replica 1: no answer in 2.0 s; replica 2: no answer in 2.0 s)")
    assert decided().why == "no replica is ready"
    older = decided(make_evidence(revision=0), make_evidence(revision=2), make_evidence(revision=7))
    assert older.why == "replicas disagree: replica 1, replica 2 behind revision 7, which is in force"
    few = decided(make_evidence(ttft_count=9, itl_count=8))
    assert few.why == "too few samples in the last 60 s: 9 of 100 first tokens, 8 of 2000 inter-token gaps"
    bounds = Bounds(max_num_seqs=Range(max=32), kv_cache_percent=Range(max=50))
    outside = decided(make_evidence(), bounds=bounds)
    assert outside.why == (
        "max_num_seqs 64 -> 32, kv_cache_fraction 0.8 -> 0.5: the spec's bounds and the envelope say so"
    )
    top = structs.replace(LIMITS, max_num_seqs=128, max_num_batched_tokens=2048)
    both = decided(make_evidence(ttft_over=500, blocked_by={"seqs": 0.5, "budget": 0.4}, limits=top))
    assert both.why == f"{TTFT}, and max_num_seqs, max_num_batched_tokens cannot go higher; add replicas"
    nothing = decided(make_evidence(ttft_over=500, blocked_by={}))
    assert nothing.why == f"{TTFT}, but no limit holds the queue back (nothing); add replicas"
    strayed = decided(make_evidence(), make_evidence(limits=structs.replace(LIMITS, max_num_seqs=100)))
    assert strayed.why.startswith("not every replica at revision 3 has its limits")


def test_of_several_rules_the_most_urgent_decides() -> None:
    well, strayed = make_evidence(), make_evidence(limits=structs.replace(LIMITS, max_num_seqs=100))
    bounds = Bounds(max_num_seqs=Range(max=32))
    assert decided(well, strayed, bounds=bounds).reason is Reason.OUT_OF_BOUNDS
    behind = make_evidence(revision=2)
    assert decided(well, strayed, behind).reason is Reason.OUT_OF_STEP
    moved = decided(make_evidence(itl_over=4000)).state
    assert decided(well, state=moved, now_s=NOW_S + 1).reason is Reason.DISAGREEMENT
    both = decided(make_evidence(itl_over=4000, num_recomputed_tokens=5000))
    assert both.reason is Reason.INTER_TOKEN_LATENCY_OVER


def test_without_an_answer_no_revision_is_claimed() -> None:
    assert (decided().revision, decided(None).revision) == (0, 0)


def test_a_change_is_remembered_with_its_limits_and_direction() -> None:
    decision = decided(make_evidence(num_recomputed_tokens=5000))
    assert (decision.state.revision, decision.state.limits) == (4, decision.limits)
    (move,) = decision.state.moves
    assert (move.knob, move.direction, move.before, move.after) == (Knob.MAX_NUM_SEQS, Direction.CUT, 64, 44)
    raised = decided(make_evidence(blocked_by={"seqs": 0.5}))
    clamped = decided(make_evidence(), bounds=Bounds(max_num_seqs=Range(max=32), kv_cache_percent=Range(max=50)))
    assert [move.direction for move in raised.state.moves] == [Direction.RAISE]
    assert [move.direction for move in clamped.state.moves] == [Direction.CLAMP] * 2


def test_holds_say_how_long() -> None:
    first = decided(make_evidence(itl_over=4000))
    assert first.limits is not None
    same = {"limits": first.limits, "revision": first.revision}
    settling = decided(make_evidence(**same), state=first.state, now_s=NOW_S + 20)
    assert settling.why.endswith("for another 40 s")
    cooling = decided(make_evidence(itl_over=4000, window_s=5.0, **same), state=first.state, now_s=NOW_S + 10)
    assert cooling.why == (
        f"{ITL}; shorter prefill chunks hold decodes up less; the next cut of max_num_batched_tokens may come in 5 s"
    )


def test_without_objectives_nothing_is_raised() -> None:
    binding = make_evidence(blocked_by={"seqs": 0.9})
    assert decided(binding, objectives=Objectives()).action is Action.HOLD


def test_the_last_unit_of_a_fraction_is_a_percent() -> None:
    limits = structs.replace(LIMITS, kv_cache_fraction=0.31)
    decision = decided(make_evidence(ttft_over=500, blocked_by={"kv": 0.4}, limits=limits))
    assert decision.limits is not None and decision.limits.kv_cache_fraction == 0.38


def test_only_one_objective_is_enough() -> None:
    only_ttft = Objectives(ttft_p95_milliseconds=1000)
    decision = decided(make_evidence(ttft_over=500, itl_over=20000, blocked_by={"seqs": 0.5}), objectives=only_ttft)
    assert decision.reason is Reason.TTFT_OVER


def test_bounds_that_exclude_the_present_limits_pull_them_in_at_once() -> None:
    bounds = Bounds(max_num_seqs=Range(max=32), kv_cache_percent=Range(max=50))
    decision = decided(make_evidence(), bounds=bounds)
    assert decision.reason is Reason.OUT_OF_BOUNDS
    assert decision.limits == structs.replace(LIMITS, max_num_seqs=32, kv_cache_fraction=0.5)


def test_replicas_out_of_step_are_set_again_under_a_new_revision() -> None:
    strayed = structs.replace(LIMITS, max_num_seqs=100)
    decision = decided(make_evidence(), make_evidence(limits=strayed))
    assert (decision.reason, decision.action, decision.revision) == (Reason.OUT_OF_STEP, Action.CHANGE, 4)


def test_a_lease_that_ran_out_on_every_replica_is_noticed() -> None:
    state = TunerState(revision=3, limits=structs.replace(LIMITS, max_num_seqs=20))
    decision = decided(make_evidence(), state=state)
    assert (decision.reason, decision.limits) == (Reason.OUT_OF_STEP, state.limits)


def test_limits_survive_the_restart_of_every_replica() -> None:
    state = TunerState(revision=9, limits=structs.replace(LIMITS, max_num_seqs=20))
    decision = decided(make_evidence(revision=0), state=state)
    assert (decision.action, decision.revision, decision.limits) == (Action.HOLD, 9, state.limits)


def test_limits_survive_the_restart_of_the_operator() -> None:
    newer = structs.replace(LIMITS, max_num_seqs=20)
    decision = decided(make_evidence(revision=0), make_evidence(revision=7, limits=newer), state=TunerState())
    assert (decision.revision, decision.limits) == (7, newer)


def test_half_of_the_replicas_are_enough_and_fewer_are_not() -> None:
    over = make_evidence(itl_over=4000)
    assert decided(over, None).reason is Reason.INTER_TOKEN_LATENCY_OVER
    partial = decided(over, None, None)
    assert partial.reason is Reason.PARTIAL_EVIDENCE
    assert "1 of 3" in partial.why
    assert partial.limits == LIMITS


def test_no_replica_and_no_answer_hold() -> None:
    assert decided().reason is Reason.NO_REPLICAS
    silent = decided(None)
    assert (silent.reason, silent.limits) == (Reason.NO_EVIDENCE, None)
    assert "replica 1: no answer in 2.0 s" in silent.why


def test_stale_evidence_holds() -> None:
    for age_s, reason in (45.0, Reason.INTER_TOKEN_LATENCY_OVER), (46.0, Reason.NO_EVIDENCE):
        evidence = [structs.replace(pod, age_s=age_s) for pod in pods(make_evidence(itl_over=4000))]
        assert decide(TUNING, TunerState(), evidence, now_s=NOW_S).reason is reason


def test_after_a_change_the_window_must_pass_before_the_next() -> None:
    over = make_evidence(itl_over=4000)
    first = decided(over)
    assert first.limits is not None
    later = make_evidence(itl_over=4000, limits=first.limits, revision=first.revision)
    assert decided(later, state=first.state, now_s=NOW_S + 59).reason is Reason.SETTLING
    second = decided(later, state=first.state, now_s=NOW_S + 60)
    assert (second.reason, second.limits) == (
        Reason.INTER_TOKEN_LATENCY_OVER,
        structs.replace(LIMITS, max_num_batched_tokens=250),
    )


def test_a_raise_waits_the_whole_cool_down_and_a_second_cut_a_quarter() -> None:
    first = decided(make_evidence(itl_over=4000))
    assert first.limits is not None
    same = {"limits": first.limits, "revision": first.revision, "window_s": 5.0}
    cut_again, turn = make_evidence(itl_over=4000, **same), make_evidence(blocked_by={"budget": 0.5}, **same)
    assert decided(cut_again, state=first.state, now_s=NOW_S + 14).reason is Reason.COOLING_DOWN
    assert decided(cut_again, state=first.state, now_s=NOW_S + 15).action is Action.CHANGE
    assert decided(turn, state=first.state, now_s=NOW_S + 59).reason is Reason.COOLING_DOWN
    assert decided(turn, state=first.state, now_s=NOW_S + 60).action is Action.CHANGE


def test_turning_round_doubles_the_cool_down_each_time() -> None:
    state, now_s, limits, revision, waits = TunerState(), NOW_S, LIMITS, 3, []
    for turn in range(4):
        symptom: dict[str, Any] = {"itl_over": 4000} if turn % 2 == 0 else {"blocked_by": {"budget": 0.5}}
        evidence = make_evidence(limits=limits, revision=revision, window_s=1.0, **symptom)
        started_s = now_s
        while (decision := decided(evidence, state=state, now_s=now_s)).action is Action.HOLD:
            now_s += 1
        assert decision.limits is not None
        state, limits, revision = decision.state, decision.limits, decision.revision
        waits.append(now_s - started_s)
    assert waits == [0, 60, 120, 240]


# --- for any evidence -------------------------------------------------------------------------------------------------

limits_strategy = st.builds(
    Limits,
    max_num_seqs=st.integers(1, 128),
    kv_cache_fraction=st.integers(10, 100).map(lambda percent: percent / 100),
    max_num_batched_tokens=st.integers(16, 2048),
)
ranges = st.tuples(st.integers(1, 3000), st.integers(1, 3000)).map(lambda two: Range(min=min(two), max=max(two)))
percents = st.tuples(st.integers(1, 100), st.integers(1, 100)).map(lambda two: Range(min=min(two), max=max(two)))
bounds_strategy = st.builds(
    Bounds,
    max_num_seqs=st.one_of(st.just(Range()), ranges),
    max_num_batched_tokens=st.one_of(st.just(Range()), ranges),
    kv_cache_percent=st.one_of(st.just(Range()), percents),
)
shares = st.floats(0, 1)


@st.composite
def evidence_strategy(draw: st.DrawFn, limits: Limits | None = None) -> Evidence:
    ttft_count, itl_count = draw(st.integers(0, 2000)), draw(st.integers(0, 40000))
    return make_evidence(
        ttft_count=ttft_count,
        ttft_over=draw(st.integers(0, ttft_count)),
        itl_count=itl_count,
        itl_over=draw(st.integers(0, itl_count)),
        blocked_by={"seqs": draw(shares), "budget": draw(shares), "kv": draw(shares)},
        num_recomputed_tokens=draw(st.sampled_from([0, 100, 50_000])),
        limits=limits or draw(limits_strategy),
        revision=draw(st.integers(0, 5)),
        ready=draw(st.sampled_from([True, True, True, False])),
        window_s=draw(st.sampled_from([5.0, 60.0])),
    )


@given(bounds_strategy, st.lists(st.one_of(st.none(), evidence_strategy()), min_size=1, max_size=4))
def test_a_change_ends_inside_bounds_and_envelope(bounds: Bounds, evidence: list[Evidence | None]) -> None:
    decision = decided(*evidence, bounds=bounds)
    if decision.action is Action.HOLD:
        return
    assert decision.limits is not None
    if decision.reason is not Reason.OUT_OF_STEP:  # sets again what was in force; pulled into bounds in the next round
        allowed = spans(bounds, ENVELOPE, decision.limits)
        for knob in Knob:
            assert allowed[knob].low - 1e-9 <= knob.of(decision.limits) <= allowed[knob].high + 1e-9, (
                knob,
                decision.why,
            )
    assert 1 <= decision.limits.max_num_seqs <= ENVELOPE.max_num_seqs
    assert ENVELOPE.min_num_batched_tokens <= decision.limits.max_num_batched_tokens <= ENVELOPE.max_num_batched_tokens
    assert ENVELOPE.min_kv_cache_fraction <= decision.limits.kv_cache_fraction <= 1


@given(st.lists(st.one_of(st.none(), evidence_strategy(LIMITS)), min_size=1, max_size=5))
def test_nothing_is_raised_on_less_than_half_the_evidence(evidence: list[Evidence | None]) -> None:
    decision = decided(*evidence)
    usable = [one for one in evidence if one is not None and one.ready]
    if len(usable) < len(evidence) / 2:
        assert decision.action is Action.HOLD
        assert decision.limits in (None, LIMITS)


@given(evidence_strategy(LIMITS))
def test_one_decision_moves_one_knob_by_at_most_its_step(evidence: Evidence) -> None:
    decision = decided(evidence)
    assert decision.limits is not None
    ratios = [knob.of(decision.limits) / knob.of(LIMITS) for knob in Knob]
    assert sum(ratio != 1 for ratio in ratios) <= 1
    assert all(0.68 <= ratio <= 1.25 + 1e-9 for ratio in ratios)


@given(evidence_strategy(LIMITS), st.integers(0, 20000), st.integers(0, 20000))
def test_more_slow_tokens_never_lead_to_higher_limits(evidence: Evidence, one: int, other: int) -> None:
    few, many = sorted((one, other))
    low, high = (structs.replace(evidence, itl=make_evidence(itl_over=over).itl) for over in (few, many))
    after_few, after_many = decided(low).limits, decided(high).limits
    assert after_few is not None
    assert after_many is not None
    # More slow tokens may move the blame from KV pressure (cut sequences) to the budget (cut tokens), never raise.
    assert any(knob.of(after_many) < knob.of(LIMITS) for knob in Knob) or all(
        knob.of(after_many) <= max(knob.of(LIMITS), knob.of(after_few)) for knob in Knob
    )


@settings(max_examples=30)
@given(st.lists(evidence_strategy(LIMITS), min_size=5, max_size=25), st.integers(1, 40))
def test_no_knob_turns_round_within_the_cool_down(history: list[Evidence], pace_s: int) -> None:
    state, limits, revision = TunerState(), LIMITS, 3
    for step, sample in enumerate(history):
        evidence = structs.replace(sample, target=limits, effective=limits, revision=revision, ready=True, window_s=1.0)
        decision = decided(evidence, state=state, now_s=step * pace_s)
        state, revision = decision.state, decision.revision
        limits = decision.limits or limits
    for knob in Knob:
        own = [move for move in state.moves if move.knob is knob and move.direction != "clamp"]
        for first, second in itertools.pairwise(own):
            if first.direction is not second.direction:
                assert second.at_s - first.at_s >= TUNING.cooldown_seconds


@given(st.lists(st.one_of(st.none(), evidence_strategy()), max_size=3))
def test_a_recorded_decision_replays_to_itself(evidence: list[Evidence | None]) -> None:
    state = decided(make_evidence(itl_over=4000)).state
    decision = decided(*evidence, state=state, now_s=NOW_S + 100)
    record = DecisionRecord(
        time="2026-01-01T00:00:00.000+00:00",
        deployment="demo",
        tuning=TUNING,
        state=state,
        evidence=tuple(pods(*evidence)),
        now_s=NOW_S + 100,
        decision=decision,
    )
    assert from_line(to_line(record)).replay() == decision

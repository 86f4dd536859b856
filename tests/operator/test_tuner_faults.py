"""What an earlier tuner did wrong, scenario by scenario, with make-believe replicas that count as told."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from flyball_operator.spec import Objectives
from flyball_operator.tuning import Action, Reason
from flyball_operator.tuning.knobs import Knob
from flyball_protocol import KVBlocks, Limits, StepModel
from flyball_protocol import Objectives as PostedObjectives
from operator_kit.deployment import START, Deployment, Runtime
from operator_kit.evidence import LENGTHS, MODEL, TUNING, window

ROOMY = KVBlocks(total=20_000, capacity=16_000, free=10_000, used=8000, cached=2000)
PLANNED: dict[str, Any] = {"step_model": MODEL, "lengths": LENGTHS, "kv_blocks": ROOMY}
"""What is known of steps and requests, with a KV pool that is full only after steps are as long as the objective allows."""


def quiet(_: Runtime) -> dict[str, Any]:
    return dict(PLANNED)


def over_above(step_ms: float, share: float = 0.3) -> Callable[[Runtime], dict[str, Any]]:
    """So many gaps are over while steps aim higher than ``step_ms``."""
    return lambda one: PLANNED | {"itl_over": round(20000 * share) if one.step_ms > step_ms else 0}


def test_an_objective_between_two_edges_is_counted_exactly() -> None:
    """Gaps of 52 ms under an objective of 60 ms all fall into the bucket from 50 to 75 ms, and none is over."""
    tuning = structs.replace(TUNING, objectives=Objectives(inter_token_latency_p95_milliseconds=60))
    gaps = structs.replace(
        window(0.04, over=0, within=0), count=20000, counts=(0, 0, 0, 20000, 0, 0, 0, 0, 0), p95_s=0.052
    )
    deployment = Deployment(lambda _: PLANNED | {"itl": gaps}, tuning=tuning)
    deployment.minutes(20)
    assert deployment.changes == [("change", "ObjectivesSet"), ("commit", "Settled")]
    assert deployment.limits.max_num_batched_tokens == START.max_num_batched_tokens


def test_a_useless_cut_is_taken_back_and_banned() -> None:
    """One gap in ten is over whatever the limits: an earlier tuner cut 2048 tokens to 16, and 64 sequences to 1."""
    deployment = Deployment(lambda _: PLANNED | {"itl_over": 2000}, num_replicas=4)
    deployment.minutes(51)
    assert "promote" not in deployment.actions
    first = deployment.replicas[0].limits
    assert (first.max_num_seqs, first.max_num_batched_tokens) == (128, 2048)
    assert 2 <= deployment.actions.count("roll back") <= 6, "and it is tried ever less often"
    assert {one.reason for one in deployment.decisions if one.action is Action.ROLL_BACK} == {
        Reason.CANARY_GAINED_NOTHING
    }
    assert "gained nothing lately" in next(one.why for one in deployment.decisions if one.reason is Reason.BANNED)


@pytest.mark.parametrize("seed", range(5))
def test_gaps_of_one_step_are_not_independent_samples(seed: int) -> None:
    """A canary that does as the others do is not promoted: bursts of long steps, the same odds everywhere."""
    chance = random.Random(seed)

    def bursts(_: Runtime) -> dict[str, Any]:
        steps = sum(
            10 * (chance.random() < 0.12) for _ in range(100)
        )  # of 1000: a prefill makes ten long ones in a row
        return PLANNED | {"itl_over": 20 * steps, "itl_count": 20000}

    deployment = Deployment(bursts)
    deployment.minutes(60)
    assert deployment.actions.count("promote") <= 1
    assert deployment.actions.count("roll back") >= 1


def test_limits_that_have_settled_stay_when_the_operator_is_gone() -> None:
    deployment = Deployment(over_above(30))
    deployment.minutes(10)
    settled = deployment.limits
    assert deployment.actions[-1] == "commit"
    for one in deployment.replicas:
        one.lapse()
    assert deployment.limits == settled
    assert settled.step_time_target_ms is not None and settled.step_time_target_ms <= 30


def test_a_change_on_trial_falls_back_when_the_operator_is_gone() -> None:
    deployment = Deployment(over_above(30))
    while "try" not in deployment.actions:
        deployment.round()
    (canary,) = [one for one in deployment.replicas if one.revision == 2]
    assert canary.leased
    assert canary.step_ms < START_MS
    canary.lapse()
    assert canary.step_ms < START_MS, "a lapse never raises"


START_MS = 40.0


@pytest.mark.parametrize("mode", ["Disabled", "Recommend"])
def test_turning_tuning_off_restores_what_the_spec_says(mode: Any) -> None:
    deployment = Deployment(over_above(30))
    deployment.minutes(5)
    assert deployment.limits != START
    deployment.tuning = structs.replace(TUNING, mode=mode)
    deployment.minutes(1)
    assert [Knob.STEP_TIME.of(one.limits) for one in deployment.replicas] == [float("inf")] * 3
    assert all(one.limits.max_num_batched_tokens == 2048 and not one.leased for one in deployment.replicas)
    assert "restore" in deployment.actions


def test_replicas_of_another_template_are_not_pooled() -> None:
    def late(one: Runtime) -> dict[str, Any]:
        is_new = one.name == "replica 3"
        return PLANNED | {"template": "t2" if is_new else "t1", "itl_over": 20000 if is_new else 0}

    deployment = Deployment(late)
    deployment.minutes(20)
    assert deployment.changes == [("change", "ObjectivesSet"), ("commit", "Settled")]
    assert deployment.replicas[2].limits == START, "it is left alone until its template is that of most replicas"


FULL = KVBlocks(total=3000, capacity=3000, free=0, used=3000, cached=0)
CROWDED_S = 1120.0
"""The replicas have KV memory to spare until then: a step target that suits too little is not tried but set."""


def test_a_kv_pool_that_is_small_from_the_start_needs_no_trial() -> None:
    deployment = Deployment(lambda _: PLANNED | {"kv_blocks": FULL})
    deployment.minutes(5)
    assert deployment.changes == [("change", "ObjectivesSet"), ("commit", "Settled")]
    assert Knob.STEP_TIME.of(deployment.limits) < 30


def test_kv_pressure_lowers_the_step_target_and_not_only_asks_for_replicas() -> None:
    """With KV as the bottleneck, shorter steps let sequences end sooner."""

    def kv_bound(one: Runtime) -> dict[str, Any]:
        if one.now_s < CROWDED_S:
            return quiet(one)
        is_long = one.step_ms > 30
        blocked = {"kv": 0.6, "none": 0.4} if is_long else {"none": 1.0}
        return PLANNED | {"ttft_over": 600 if is_long else 10, "blocked_by": blocked, "kv_blocks": FULL}

    deployment = Deployment(kv_bound)
    deployment.minutes(8)
    assert ("promote", "CanaryGained") in deployment.changes
    target_ms = deployment.limits.step_time_target_ms
    assert target_ms is not None and target_ms < 30
    assert deployment.limits.max_num_batched_tokens == START.max_num_batched_tokens


def test_decodes_that_are_too_many_cost_sequences_and_not_token_budget() -> None:
    model = structs.replace(MODEL, context_token_s=3e-7)

    def crowded(one: Runtime) -> dict[str, Any]:
        over = 8000 if one.limits.max_num_seqs > 100 else 0
        return {"step_model": model, "lengths": LENGTHS, "itl_over": over, "num_running": one.limits.max_num_seqs}

    deployment = Deployment(crowded)
    deployment.minutes(6)
    assert deployment.limits.max_num_seqs < 100
    assert deployment.limits.max_num_batched_tokens == START.max_num_batched_tokens
    assert "without any prefill" in next(one.why for one in deployment.decisions if one.action is Action.TRY)


def test_a_clear_case_is_found_within_two_minutes() -> None:
    deployment = Deployment(over_above(30))
    deployment.minutes(2)
    assert "promote" in deployment.actions
    assert deployment.limits.step_time_target_ms is not None
    assert deployment.limits.step_time_target_ms <= 30


def test_what_is_healthy_is_left_alone() -> None:
    deployment = Deployment(quiet)
    deployment.minutes(30)
    assert deployment.changes == [("change", "ObjectivesSet"), ("commit", "Settled")]


def test_an_optimum_at_kv_pressure_is_not_raised_away() -> None:
    """Objectives that are met are no room: an earlier tuner raised the budget, and preemptions followed."""
    blocked = {"budget": 0.5, "kv": 0.05, "none": 0.45}
    deployment = Deployment(lambda _: PLANNED | {"blocked_by": blocked, "num_recomputed_tokens": 2500})
    deployment.minutes(30)
    assert deployment.limits.max_num_batched_tokens == START.max_num_batched_tokens
    assert deployment.limits.max_num_seqs == START.max_num_seqs
    assert "try" not in deployment.actions


def test_preemptions_lower_the_step_target_before_the_sequences() -> None:
    late = {"ttft_over": 600, "num_recomputed_tokens": 20_000, "kv_blocks": FULL, "blocked_by": {"kv": 0.9}}
    deployment = Deployment(lambda one: quiet(one) if one.now_s < CROWDED_S else PLANNED | late)
    deployment.minutes(30)
    knobs = [
        record.decision.state.trial.move.knob
        for record in deployment.records
        if record.decision.action is Action.TRY and record.decision.state.trial
    ]
    assert knobs[:2] == [Knob.STEP_TIME, Knob.MAX_NUM_SEQS]
    seqs = [record.decision.limits.max_num_seqs for record in deployment.records if record.decision.limits]
    assert min(seqs) >= 43, "never fewer than fit the pool"


def test_limits_do_not_cycle_across_a_cliff_that_was_seen() -> None:
    """Raised to 800 tokens, the budget falls off a cliff; an earlier tuner went there and back 21 times an hour."""

    def cliff(one: Runtime) -> dict[str, Any]:
        tokens = one.limits.max_num_batched_tokens
        late = 400 if tokens < 800 else 0
        return PLANNED | {"ttft_over": late, "itl_over": 0 if tokens < 800 else 12000, "blocked_by": {"budget": 0.5}}

    deployment = Deployment(cliff)
    for one in deployment.replicas:
        one.limits = one.last_known_good = structs.replace(START, max_num_batched_tokens=469)
    deployment.minutes(60)
    assert deployment.limits.max_num_batched_tokens == 469
    assert deployment.actions.count("try") <= 4


def test_a_slow_replica_is_named_and_nothing_is_throttled_for_it() -> None:
    slow = StepModel(
        base_s=0.030, token_s=1.8e-4, context_token_s=2e-7, attention_pair_s=9e-9, settled=True, num_steps=9000
    )

    def one_is_slow(one: Runtime) -> dict[str, Any]:
        is_slow = one.name == "replica 2"
        return PLANNED | {"step_model": slow if is_slow else MODEL, "itl_over": 15000 if is_slow else 0}

    deployment = Deployment(one_is_slow)
    deployment.minutes(10)
    assert deployment.changes == [("change", "ObjectivesSet"), ("commit", "Settled")]
    assert deployment.decisions[-1].reason is Reason.SLOW_REPLICA
    assert "replica 2: its steps take 3.0 times as long as the others'" in deployment.decisions[-1].why


def test_a_replica_that_becomes_slow_is_named_too() -> None:
    def slows(one: Runtime) -> dict[str, Any]:
        factor = 1.6 if one.now_s > 1300 else 1.0
        return PLANNED | {
            "step_model": structs.replace(
                MODEL, base_s=factor * 0.01, token_s=factor * 6e-5, context_token_s=factor * 8e-8
            )
        }

    deployment = Deployment(slows, num_replicas=1)
    deployment.minutes(10)
    assert "1.4 times as long as they did" in deployment.decisions[-1].findings.slow["replica 1"]


SHORT: dict[str, Any] = {
    "lengths": structs.replace(
        LENGTHS,
        prompt_tokens=6.0,
        computed_prompt_tokens=6.0,
        computed_prompt_tokens_squared=36.0,
        context_tokens=120.0,
    ),
    "num_prompt_tokens": 1800,
}
"""Of prompts of six tokens, nothing is learned about attention pairs: a fit may put all of a prompt's time on them."""
OF_SHORT = structs.replace(MODEL, attention_pair_s=1.7e-5)


def test_a_replica_that_saw_short_prompts_alone_is_not_slow_beside_one_that_is() -> None:
    slow = structs.replace(MODEL, base_s=0.030, token_s=1.8e-4, context_token_s=2.4e-7, attention_pair_s=9e-9)

    def sees(one: Runtime) -> dict[str, Any]:
        if one.name == "replica 1":
            return PLANNED | SHORT | {"step_model": OF_SHORT}
        return PLANNED | {"step_model": slow if one.name == "replica 2" else MODEL}

    deployment = Deployment(sees, num_replicas=4)
    deployment.minutes(10)
    assert deployment.decisions[-1].findings.slow == {"replica 2": "its steps take 3.0 times as long as the others'"}


def test_a_model_that_changes_what_it_says_of_unknown_steps_has_not_become_slow() -> None:
    def sees(one: Runtime) -> dict[str, Any]:
        return PLANNED | SHORT | {"step_model": MODEL if one.now_s < 1300 else OF_SHORT}

    deployment = Deployment(sees)
    deployment.minutes(10)
    assert not deployment.decisions[-1].findings.slow


def test_a_replica_is_compared_with_itself_by_the_same_step_under_another_load() -> None:
    """Long prompts come after short ones; the model has always been right."""

    def sees(one: Runtime) -> dict[str, Any]:
        return PLANNED | (SHORT if one.now_s < 1300 else {})

    deployment = Deployment(sees, num_replicas=1)
    deployment.minutes(10)
    assert not deployment.decisions[-1].findings.slow


def test_idle_replicas_are_not_compared() -> None:
    def sees(one: Runtime) -> dict[str, Any]:
        factor = 3.0 if one.name == "replica 1" else 1.0
        return PLANNED | {"step_model": structs.replace(MODEL, base_s=factor * 0.01), "num_steps": 0}

    deployment = Deployment(sees)
    deployment.minutes(10)
    assert not deployment.decisions[-1].findings.slow


def test_mode_recommend_settles_nothing() -> None:
    deployment = Deployment(quiet, tuning=structs.replace(TUNING, mode="Recommend"))
    deployment.minutes(5)
    assert [one for one in deployment.changes if one[1] != "ObjectivesSet"] == []
    assert deployment.decisions[-1].reason is Reason.STEADY
    assert deployment.limits == START


def test_every_decision_replays() -> None:
    deployment = Deployment(over_above(30))
    deployment.minutes(10)
    assert [record.replay() for record in deployment.records] == [record.decision for record in deployment.records]
    assert len(deployment.records) >= 5


def test_objectives_are_posted_with_the_limits() -> None:
    deployment = Deployment(quiet)
    deployment.round()
    assert {one.objectives for one in deployment.replicas} == {PostedObjectives(ttft_s=1.0, itl_s=0.04)}
    assert all(isinstance(one.limits, Limits) and one.step_ms < 40 for one in deployment.replicas)

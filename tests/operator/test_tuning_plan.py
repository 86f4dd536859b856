"""The closed forms of the plan, by hand and as properties."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flyball_operator.tuning.plan import (
    balanced_step_s,
    decode_step_s,
    least_itl_s,
    least_ttft_s,
    make_plan,
    margin,
    most_decodes,
    most_prefill,
    spare_share,
)
from flyball_protocol import Lengths, Objectives, StepModel
from operator_kit.evidence import ENVELOPE, LENGTHS, MODEL

BOTH = Objectives(ttft_s=2.0, itl_s=0.05)
WIDE = structs.replace(ENVELOPE, max_num_seqs=256, max_num_batched_tokens=8192)
MODELS = st.builds(
    StepModel,
    base_s=st.floats(1e-4, 0.05),
    token_s=st.floats(1e-6, 1e-3),
    knee_tokens=st.floats(0, 300),
    context_token_s=st.floats(0, 1e-6),
    attention_pair_s=st.floats(0, 1e-7),
    interaction_s=st.floats(0, 1e-7),
    residual_p95=st.none() | st.floats(0, 1),
    settled=st.just(True),
)
SIZES = st.floats(1, 5000)


@st.composite
def lengths(draw: st.DrawFn) -> Lengths:
    prompt, output = draw(SIZES), draw(SIZES)
    computed = prompt * draw(st.floats(0, 1))
    return Lengths(
        num_requests=100.0,
        prompt_tokens=prompt,
        computed_prompt_tokens=computed,
        computed_prompt_tokens_squared=1.3 * computed**2,
        output_tokens=output,
        output_tokens_p95=2 * output,
        context_tokens=prompt + output / 2,
    )


def test_a_balanced_step_brings_each_sequence_the_prompt_tokens_of_its_successor() -> None:
    decodes, prefill = 20, 100
    by_hand = MODEL.predict(prefill, decodes, 20 * 1100, round(20 * 1.5e6 / 2 / 200))
    assert balanced_step_s(MODEL, LENGTHS, decodes) == pytest.approx(by_hand)


def test_prefix_hits_leave_less_to_compute_and_more_to_attend_to() -> None:
    hits = structs.replace(LENGTHS, computed_prompt_tokens=200.0, computed_prompt_tokens_squared=6e4)
    assert balanced_step_s(MODEL, hits, 20) < balanced_step_s(MODEL, LENGTHS, 20)
    assert most_decodes(MODEL, hits, 0.05) > most_decodes(MODEL, LENGTHS, 0.05)


def test_with_memory_to_spare_the_objective_sets_the_step_time() -> None:
    plan = make_plan(MODEL, LENGTHS, BOTH, WIDE, kv_tokens=390_000)
    assert 0.04 < plan.step_s < 0.05
    assert plan.kv_step_s == plan.aim_s == plan.step_s
    assert plan.num_decoding == most_decodes(MODEL, LENGTHS, plan.step_s)
    assert plan.max_num_seqs == math.ceil(1.15 * plan.num_decoding)
    assert plan.max_num_batched_tokens >= plan.max_num_seqs + most_prefill(MODEL, plan.step_s, 8192)
    assert plan.capacity_per_s == pytest.approx(plan.num_decoding / (200 * plan.step_s), rel=0.02)


def test_with_little_memory_shorter_steps_are_planned() -> None:
    plan = make_plan(MODEL, LENGTHS, BOTH, WIDE, kv_tokens=22_000)
    assert plan.num_fitting == 20
    assert plan.kv_step_s == pytest.approx(0.9 * balanced_step_s(MODEL, LENGTHS, 20))
    assert plan.kv_step_s == plan.aim_s < 0.5 * plan.step_s
    assert plan.num_decoding == 20
    assert plan.max_num_seqs == 23


def test_sequences_that_share_their_prefixes_leave_room_for_longer_steps() -> None:
    """Half of each prompt is found in the prefix cache; if that is one system prompt, twice as many sequences fit."""
    hits = structs.replace(LENGTHS, context_tokens=1100.0, computed_prompt_tokens=450.0)
    plan = make_plan(MODEL, hits, BOTH, WIDE, kv_tokens=22_000)
    assert plan.num_fitting == 20
    assert plan.aim_s == pytest.approx(0.9 * balanced_step_s(MODEL, hits, 40))
    assert plan.kv_step_s < plan.aim_s < plan.step_s


def test_the_most_sequences_are_no_shortage_of_memory() -> None:
    few = structs.replace(WIDE, max_num_seqs=20)
    assert make_plan(MODEL, LENGTHS, BOTH, few, kv_tokens=22_000).aim_s > 0.04
    assert make_plan(MODEL, LENGTHS, BOTH, few, kv_tokens=20_900).aim_s < 0.025


def test_steps_are_not_planned_shorter_than_their_decodes_where_prefill_costs_nothing() -> None:
    """Below the knee prompts ride along free: on a device that is slow to read its weights, short steps only keep them out."""
    slow = structs.replace(MODEL, base_s=0.054, knee_tokens=330.0, context_token_s=4.4e-7)
    plan = make_plan(slow, LENGTHS, Objectives(ttft_s=4.0, itl_s=0.12), WIDE, kv_tokens=44_000)
    assert plan.kv_step_s == pytest.approx(1.06 * decode_step_s(slow, LENGTHS, 40))
    assert most_prefill(slow, plan.kv_step_s - decode_step_s(slow, LENGTHS, 40) + slow.base_s, 8192) > 200


def test_without_an_inter_token_objective_only_memory_bounds_the_step() -> None:
    plan = make_plan(MODEL, LENGTHS, Objectives(ttft_s=2.0), WIDE, kv_tokens=22_000)
    assert math.isinf(plan.step_s)
    assert math.isfinite(plan.kv_step_s)


def test_short_outputs_need_a_wider_margin() -> None:
    short = structs.replace(LENGTHS, output_tokens=13.0)
    assert 1.0 < margin(MODEL, LENGTHS) < margin(MODEL, short) < 1.2
    assert spare_share(1) == pytest.approx(0.05)
    assert spare_share(12) == pytest.approx(0.0043, abs=1e-3)
    assert spare_share(10_000) == pytest.approx(0.0464, abs=1e-3)


def test_a_target_near_what_any_step_takes_still_lets_a_few_sequences_run() -> None:
    slow = structs.replace(MODEL, base_s=0.047)
    plan = make_plan(slow, LENGTHS, BOTH, WIDE, kv_tokens=390_000)
    assert 0.05 >= plan.step_s > slow.predict(16, 4, 4400, 256)


def test_what_a_few_sequences_take_is_of_chunks_no_longer_than_prompts_are() -> None:
    """Of prompts of six tokens, nothing is learned about pairs: a fit may well put all of a prompt's time on them."""
    questions = structs.replace(
        LENGTHS,
        prompt_tokens=6.0,
        computed_prompt_tokens=6.0,
        computed_prompt_tokens_squared=42.0,
        context_tokens=106.0,
    )
    learned = structs.replace(MODEL, base_s=0.0014, token_s=3e-5, context_token_s=2.5e-7, attention_pair_s=3e-5)
    plan = make_plan(learned, questions, Objectives(itl_s=0.011), WIDE, kv_tokens=16_384)
    assert plan.least_step_s < 0.004


def test_the_trim_moves_the_step_time() -> None:
    whole, less = (make_plan(MODEL, LENGTHS, BOTH, WIDE, kv_tokens=390_000, trim=one) for one in (1.0, 0.8))
    assert less.step_s == pytest.approx(0.8 * whole.step_s)


def test_what_is_least_possible() -> None:
    assert least_itl_s(MODEL, LENGTHS) == pytest.approx(MODEL.predict(0, 1, 1100, 0))
    alone_s = least_ttft_s(MODEL, LENGTHS, None, 8192)
    paced_s = least_ttft_s(MODEL, LENGTHS, 0.02, 8192)
    assert alone_s == pytest.approx(MODEL.predict(1000, 1, 1100, 500_000))
    assert paced_s > alone_s
    assert math.isinf(least_ttft_s(MODEL, LENGTHS, 0.005, 8192)), "not even one token fits beside a decode"


@given(MODELS, lengths(), st.floats(0.001, 10), st.integers(1, 10**6))
def test_a_plan_stays_inside_the_envelope(model: StepModel, lengths: Lengths, itl_s: float, kv_tokens: int) -> None:
    plan = make_plan(model, lengths, Objectives(itl_s=itl_s), WIDE, kv_tokens=kv_tokens)
    assert 1 <= plan.max_num_seqs <= WIDE.max_num_seqs
    assert WIDE.min_num_batched_tokens <= plan.max_num_batched_tokens <= WIDE.max_num_batched_tokens
    assert 0 < plan.kv_step_s <= plan.aim_s <= plan.step_s
    assert 0 < plan.least_step_s <= plan.step_s
    assert plan.step_s <= itl_s or itl_s < least_itl_s(model, lengths)
    assert plan.capacity_per_s > 0


@given(MODELS, lengths(), st.floats(0.001, 1))
def test_more_decodes_never_fit_into_a_shorter_step(model: StepModel, lengths: Lengths, step_s: float) -> None:
    most = most_decodes(model, lengths, step_s)
    assert most_decodes(model, lengths, step_s / 2) <= most
    if 0 < most < 1 << 16:
        assert balanced_step_s(model, lengths, most) <= step_s < balanced_step_s(model, lengths, most + 1)


@given(MODELS, lengths(), st.integers(2, 10**5))
def test_more_memory_never_plans_shorter_steps(model: StepModel, lengths: Lengths, kv_tokens: int) -> None:
    small, large = (
        make_plan(model, lengths, BOTH, WIDE, kv_tokens=one).kv_step_s for one in (kv_tokens // 2, kv_tokens)
    )
    assert small <= large * 1.000001

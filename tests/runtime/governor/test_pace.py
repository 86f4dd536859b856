from bisect import bisect_left
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball_protocol import BootPrior, Limits, StepModel
from flyball_runtime.governor import MIN_CHUNK, Drafting, Governor, usable_prior
from flyball_runtime.governor.drafting import FORGET_STEPS, MIN_SHARES
from flyball_runtime.governor.pace import FIRST_CHUNK, NEXT_TO_NOTHING, _most_tokens, work_of
from flyball_runtime.governor.work import Work
from runtime.governor.plants import LINEAR, mixed, took


@dataclass
class Step:
    num_tokens: int
    num_decodes: int = 0
    num_context_tokens: int = 0
    prefill_work: int = 0


def governor(target_ms: float | None, model: StepModel | None = LINEAR) -> Governor:
    made = Governor(model)
    made.target_s = None if target_ms is None else target_ms / 1000
    return made


COEFFICIENT = st.floats(0, 1e-3)
MODEL = st.builds(
    StepModel,
    base_s=st.floats(0, 0.1),
    token_s=COEFFICIENT,
    knee_tokens=st.floats(0, 500),
    context_token_s=st.floats(0, 1e-6),
    attention_pair_s=st.floats(0, 1e-8),
    interaction_s=st.floats(0, 1e-6),
)


@settings(deadline=None)
@given(
    model=MODEL,
    target_ms=st.floats(0.1, 500),
    decodes=st.integers(1, 256),
    start=st.integers(0, 100_000),
    most=st.integers(0, 4096),
    least=st.integers(0, 64),
)
def test_a_chunk_is_the_longest_that_stays_within_the_target(
    model: StepModel, target_ms: float, decodes: int, start: int, most: int, least: int
):
    paced = governor(target_ms, model)
    step = Step(decodes, decodes, decodes * 1000)
    found = paced.chunk(step, start, most, least)
    assert min(least, most) <= found <= most

    def seconds(chunk: int) -> float:
        pairs = chunk * start + chunk * (chunk + 1) // 2
        return 1.25 * model.predict(chunk, decodes, decodes * 1000, pairs)  # the margin of what was never measured

    least_s, kept_s = model.predict(MIN_CHUNK, 1, 1000, MIN_CHUNK**2), target_ms / 1000 / 1.25
    if kept_s < least_s:
        kept_s = max(least_s, model.efficient_s)
    bound_s = max(1.25 * kept_s, NEXT_TO_NOTHING * seconds(0))
    if found > min(least, most):
        assert seconds(found) <= bound_s * 1.0001
    if found < most:
        assert seconds(found + MIN_CHUNK) >= bound_s * 0.9999


@settings(deadline=None)
@given(
    model=MODEL,
    work=st.builds(Work, *(st.integers(0, most) for most in (2000, 256, 300_000, 10**7))),
    start=st.integers(0, 100_000),
    most=st.integers(0, 2048),
    seconds=st.floats(0, 1),
)
def test_the_longest_chunk_is_what_trying_all_finds(
    model: StepModel, work: Work, start: int, most: int, seconds: float
):
    """Rounding may decide whether a chunk that takes all of the time still fits, so the tries differ a little from it."""
    found = _most_tokens(model, work, start, most, seconds)
    assert _longest(model, work, start, most, 0.999999 * seconds) <= found
    assert found <= _longest(model, work, start, most, 1.000001 * seconds)


def _longest(model: StepModel, work: Work, start: int, most: int, seconds: float) -> int:
    prefill, decodes, context, pairs = work

    def too_long(num: int) -> bool:
        added = num * start + num * (num + 1) // 2
        return model.predict(prefill + num, decodes, context, pairs + added) > seconds

    return bisect_left(range(1, most + 1), True, key=too_long)


@settings(deadline=None)
@given(
    model=MODEL,
    target_ms=st.floats(0.1, 500),
    decodes=st.integers(1, 256),
    prompts=st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 4096)), max_size=32),
)
def test_chunks_of_many_prompts_stay_within_the_target_together(
    model: StepModel, target_ms: float, decodes: int, prompts: list[tuple[int, int]]
):
    """The first prompt alone has a chunk that it gets in any case."""
    paced = governor(target_ms, model)
    step = Step(decodes, decodes, decodes * 1000)
    least_s, kept_s = model.predict(MIN_CHUNK, 1, 1000, MIN_CHUNK**2), target_ms / 1000 / 1.25
    available_s = kept_s if kept_s >= least_s else max(least_s, model.efficient_s)
    bound_s = max(available_s, NEXT_TO_NOTHING * model.predict(0, decodes, decodes * 1000, 0))
    least = MIN_CHUNK
    for start, most in prompts:
        least = min(least, most)
        bound_s = max(bound_s, model.predict(*work_of(_with_chunk(step, start, least))))
        step, least = _with_chunk(step, start, paced.chunk(step, start, most, least)), 0
        assert model.predict(*work_of(step)) <= bound_s * 1.0001


def _with_chunk(step: Step, start: int, num_tokens: int) -> Step:
    work = step.prefill_work + num_tokens * start + num_tokens * (num_tokens + 1) // 2
    return Step(step.num_tokens + num_tokens, step.num_decodes, step.num_context_tokens, work)


@pytest.mark.parametrize("target_ms", [0.1, 1.0, 10.0, 12.0])
def test_under_a_target_that_no_step_can_keep_steps_are_efficient(target_ms: float):
    """One sequence beside the smallest chunk takes 12.06 ms, 11 ms of them whatever it computes."""
    paced = governor(target_ms)
    num = max(num for num in range(1, 1000) if paced.fits(num, 500 * num))
    efficient_s = LINEAR.predict(MIN_CHUNK, num, 500 * num, MIN_CHUNK**2)
    assert efficient_s == pytest.approx(0.011 / 0.2, rel=0.01)
    chunk = paced.chunk(Step(16, 16, 8000), 0, 2048)
    assert chunk + 16 >= 0.75 * 0.8 * 0.055 / LINEAR.token_s, "a fifth at most is lost, and what its attention takes"
    assert paced.first_token_s(Step(16, 16, 8000), 1600) < 5 * 0.055


def test_a_target_that_a_lone_sequence_can_keep_is_kept():
    paced = governor(1.25 * 12.5)  # with the margin of what was never measured
    assert paced.fits(2, 1000) and not paced.fits(20, 10_000)
    assert paced.chunk(Step(1, 1, 500), 0, 2048) <= 2 * MIN_CHUNK


def test_long_contexts_that_miss_the_target_by_themselves_run_together():
    """60,000 tokens of context take 4.8 ms to read, on top of 11 ms; a target of 14 ms is out of reach with one of them."""
    assert governor(1.25 * 14.0).fits(4, 4000) and not governor(1.25 * 14.0).fits(40, 40_000)
    assert governor(1.25 * 14.0).fits(4, 4 * 60_000)


def test_where_decodes_alone_miss_the_target_tokens_below_the_knee_are_not_held_back():
    paced = governor(53.0, StepModel(base_s=0.020, token_s=5e-5, knee_tokens=1000.0, context_token_s=1e-6))
    assert paced.chunk(Step(8, 8, 80_000), 0, 2048) >= 900


def test_without_a_target_or_decodes_a_step_has_time_for_all():
    assert governor(None).chunk(Step(8, 8, 8000), 0, 2048) == 2048
    assert governor(1.0).chunk(Step(0), 0, 2048) == 2048
    assert governor(1.0).chunk(Step(512, 0, 0, 10**6), 0, 512) == 512


def test_a_prompt_once_begun_gets_its_least():
    paced, many = governor(20.0), Step(80, 80, 80_000)
    assert paced.chunk(many, 0, 2048) == 0
    assert paced.chunk(many, 0, 2048, MIN_CHUNK) == MIN_CHUNK
    assert paced.chunk(many, 0, 5, MIN_CHUNK) == 5


def test_a_long_context_makes_chunks_shorter():
    paced, step = governor(50.0), Step(20, 20, 20_000)
    assert paced.chunk(step, 100_000, 2048) < paced.chunk(step, 0, 2048) < 2048


def test_before_anything_is_known_chunks_grow_with_what_was_seen():
    paced = governor(50.0, model=None)
    step = Step(4, 4, 400)
    assert (paced.predict(work_of(step)), paced.chunk(step, 0, 2048)) == (None, FIRST_CHUNK)
    paced.observe(work_of(Step(304, 4, 400, 45_000)), 0.02)
    assert paced.predict(work_of(step)) is not None
    paced.target_s = 1e6
    assert paced.chunk(step, 0, 2048) == 600 // 16 * 16


def test_admission_asks_whether_all_could_decode_in_time():
    paced = governor(30.0)
    assert paced.fits(10, 10_000)
    assert not paced.fits(200, 400_000)
    assert paced.fits(1, 400_000), "a lone sequence runs, whatever it takes"
    assert governor(None).fits(200, 400_000)
    assert governor(30.0, model=None).fits(200, 400_000)


def test_admission_asks_for_no_longer_a_chunk_than_any_prompt_was():
    """Of prompts of six tokens, nothing is learned about pairs: a fit may well put all of a prompt's time on them."""
    learned = StepModel(base_s=0.0014, token_s=3e-5, context_token_s=2.5e-7, attention_pair_s=3e-5)
    paced = governor(5.0, learned)
    assert not paced.fits(3, 300)
    paced.observe(work_of(Step(6, 0, 0, 21)), 0.002)
    assert paced.fits(3, 300)


def test_a_first_token_is_as_far_away_as_the_steps_before_it_take():
    step = Step(40, 40, 40_000)
    at_once = LINEAR.predict(1000, 40, 40_000, 500_500)
    assert governor(None).first_token_s(step, 1000) == pytest.approx(at_once)
    paced = governor(40.0)
    chunk = paced.chunk(step, 500, 1000)
    assert paced.first_token_s(step, 1000) == pytest.approx(0.04 / 1.25 * 1000 / chunk, rel=0.25)
    assert paced.first_token_s(step, 1000) > at_once
    assert governor(20.0).first_token_s(step, 160) == pytest.approx(10 * LINEAR.predict(16, 40, 40_000, 1288), rel=0.01)
    assert governor(40.0, model=None).first_token_s(step, 1000) == governor(40.0).first_token_s(step, 0) == 0.0


def test_what_it_learns_is_what_steps_took():
    paced, rng = Governor(), Random(1)
    for work in mixed(rng, 400):
        paced.observe(work, took(rng, LINEAR, work, 0.02))
    assert paced.num_steps == 400 and paced.model is not None and paced.model.settled
    step = Step(140, 40, 40_000, 5050)
    assert paced.predict(work_of(step)) == pytest.approx(LINEAR.predict(*work_of(step)), rel=0.05)


LIMITS = Limits(max_num_seqs=8, kv_cache_fraction=0.5, max_num_batched_tokens=64)


@pytest.mark.parametrize(
    ("prior", "model", "says"),
    [
        (None, None, ""),
        (BootPrior(revision=1, limits=LIMITS, key="m/bf16/gpu/1"), None, ""),
        (BootPrior(revision=1, limits=LIMITS, key="m/bf16/gpu/1", step_model=LINEAR), LINEAR, ""),
        (BootPrior(revision=1, limits=LIMITS, key="m/bf16/gpu/0", step_model=LINEAR), None, "'m/bf16/gpu/0'"),
        (BootPrior(revision=1, limits=LIMITS, step_model=LINEAR), None, "is of '', and this runtime is 'm/bf16/gpu/1'"),
    ],
)
def test_a_prior_of_another_key_is_not_used(prior: BootPrior | None, model: StepModel | None, says: str):
    found, why = usable_prior(prior, "m/bf16/gpu/1")
    assert found == model and says in why and bool(why) == bool(says)


def test_the_first_token_takes_the_steps_that_its_chunks_need():
    free, paced = governor(None), governor(30.0)
    step = Step(64, 64, 64_000)
    alone = free.first_token_s(Step(0), 1000, 2048)
    assert alone == pytest.approx(LINEAR.predict(1000, 0, 0, 500_000), rel=0.3)
    assert free.first_token_s(Step(0), 1000, 100) > alone, "ten steps"
    assert paced.first_token_s(step, 1000, 2048) > free.first_token_s(step, 1000, 2048) > alone
    assert governor(None, None).first_token_s(step, 1000, 2048) == 0.0, "nothing is known"
    assert free.first_token_s(step, 0, 2048) == 0.0


@pytest.mark.parametrize(
    ("num_decodes", "num_accepted", "pays"),
    [(1, 0.3, False), (1, 0.4, True), (8, 1.7, False), (8, 1.8, True), (64, 3.4, False), (64, 3.5, True)],
)
def test_drafts_pay_where_a_step_gives_more_tokens_a_second(num_decodes: int, num_accepted: float, pays: bool):
    """Four drafts take 4 ms. A step of 1 decode takes 11 ms: 4 are worth 0.37 tokens. One of 8 takes 18 ms: 1.78."""
    made = governor(None, StepModel(base_s=0.010, token_s=0.001, knee_tokens=0.0))
    step = Step(num_decodes, num_decodes, 100 * num_decodes)
    without, with_drafts = made.tokens_per_s(step, 0, 0, 0.0), made.tokens_per_s(step, 1, 4, num_accepted)
    assert without is not None and with_drafts is not None
    assert (with_drafts > without) == pays


def test_a_decode_with_drafts_costs_what_the_step_that_verifies_them_does():
    """It is computed as a chunk of a prompt is, of which it sees all tokens before."""
    made = governor(None, LINEAR)
    planned = Step(8 + 5, 7, 7 * 101, prefill_work=6 * 101)
    assert made.tokens_per_s(Step(8, 8, 8 * 101), 1, 5, 2.0) == pytest.approx(
        10 / (made.predict(work_of(planned)) or 0.0)
    )


def test_tokens_a_second_are_unknown_at_first():
    assert governor(None, None).tokens_per_s(Step(8, 8, 800), 1, 4, 0.1) is None


@settings(deadline=None)
@given(model=MODEL, decodes=st.integers(1, 256), start=st.integers(0, 1000), data=st.data())
def test_tokens_a_second_of_any_model(model: StepModel, decodes: int, start: int, data: st.DataObject):
    """A first fit may find that a step takes no time at all."""
    num_drafted = data.draw(st.integers(0, decodes))
    made, step = governor(None, model), Step(decodes, decodes, decodes * (start + 1))
    rate = made.tokens_per_s(step, num_drafted, 4 * num_drafted, 2.0)
    assert rate is None or rate > 0.0
    assert made.predict(work_of(step)) or made.tokens_per_s(step, 0, 0, 0.0) is None


def drafting(target_ms: float | None = None, pass_s: float = 0.0055) -> Governor:
    """A governor beside a draft model, a pass of which takes half a step of one decode."""
    made = governor(target_ms, StepModel(base_s=0.010, token_s=0.001, knee_tokens=0.0))
    for _ in range(MIN_SHARES):
        made.observe_drafting(Drafting(1, 4, 100), 4 * pass_s)
    return made


@pytest.mark.parametrize(("num_accepted", "pays"), [(2.3, False), (2.5, True)])
def test_drafts_of_a_model_have_to_pay_for_its_passes(num_accepted: float, pays: bool):
    """A step of 1 decode takes 11 ms; with four drafts it takes 15 ms, and their passes 22: worth 2.36 tokens."""
    made, step = drafting(), Step(1, 1, 100)
    without, with_drafts = made.tokens_per_s(step, 0, 0, 0.0), made.tokens_per_s(step, 1, 4, num_accepted)
    assert without is not None and with_drafts is not None
    assert (with_drafts > without) == pays


def test_passes_of_more_sequences_take_longer_as_steps_do():
    assert drafting().drafting_s(Drafting(8, 32, 100)) == pytest.approx(4 * 0.009)
    assert drafting().drafting_s(Drafting(8, 8, 100)) == pytest.approx(0.009)
    assert governor(None).drafting_s(Drafting(8, 32, 100)) == 0.0, "unknown, so that it is tried"
    assert drafting().drafting_s(Drafting(0, 0, 0)) == 0.0


def test_one_long_pass_says_nothing():
    made = drafting()
    made.observe_drafting(Drafting(1, 4, 100), 10.0)
    assert made.drafting_s(Drafting(1, 4, 100)) == pytest.approx(0.022)


@pytest.mark.parametrize(("target_ms", "expected"), [(37.0, 0), (50.0, 4)])
def test_drafts_stay_within_the_target_passes_included(target_ms: float, expected: int):
    """A step of a decode and four drafts takes 15 ms, their passes 22 ms, and nothing measured a margin of 25 %."""
    assert drafting(target_ms).drafts(Step(1, 1, 100), 1, 4) == expected


def test_what_drafting_costs_is_measured_again_after_a_time_without():
    made = drafting(pass_s=1.0)
    for _ in range(FORGET_STEPS - 1):
        made.observe_drafting(Drafting(0, 0, 0), 0.0)
    assert made.drafting_s(Drafting(1, 4, 100)) == pytest.approx(4.0)
    made.observe_drafting(Drafting(0, 0, 0), 0.0)
    assert made.drafting_s(Drafting(1, 4, 100)) == 0.0

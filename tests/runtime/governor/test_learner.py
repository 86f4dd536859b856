"""What the learner makes of machines whose truth is known."""

import math
import random
from statistics import quantiles

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball_protocol import StepModel
from flyball_runtime.governor import StepTimeLearner
from flyball_runtime.governor.store import rescaled
from flyball_runtime.governor.work import Work
from runtime.governor.plants import (
    CPU,
    KNEE,
    L4,
    LINEAR,
    PLANTS,
    THROTTLED,
    decodes_only,
    mixed,
    paced,
    throttled,
    took,
)


def learned(
    plant: StepModel, noise: float, num_steps: int = 1500, seed: int = 1
) -> tuple[StepTimeLearner, random.Random]:
    learner, rng = StepTimeLearner(), random.Random(seed)
    for work in mixed(rng, num_steps):
        learner.observe(work, took(rng, plant, work, noise))
    return learner, rng


def errors(learner: StepTimeLearner, plant: StepModel) -> tuple[float, float]:
    """Return median and 95th percentile of the relative error over mixed steps without noise."""
    model = learner.coefficients
    assert model is not None
    found = [abs(model.predict(*work) / plant.predict(*work) - 1) for work in mixed(random.Random(99), 300)]
    cuts = quantiles(found, n=20)
    return cuts[9], cuts[18]


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
@pytest.mark.parametrize(("noise", "median", "p95"), [(0.05, 0.03, 0.10), (0.25, 0.10, 0.25)])
def test_it_converges_on_machines_of_all_kinds(plant: StepModel, noise: float, median: float, p95: float):
    learner, _ = learned(plant, noise)
    found = errors(learner, plant)
    assert found[0] <= median and found[1] <= p95
    model = learner.model
    assert model is not None and model.settled and model.num_steps == 1500
    assert model.residual_p50 is not None and model.residual_p95 is not None
    assert model.residual_p50 <= noise and model.residual_p95 <= 3 * noise


@pytest.mark.parametrize("noise", [0.05, 0.25])
def test_steady_serving_does_not_wreck_what_it_does_not_excite(noise: float):
    """5000 steps of decodes alone, then prompts again: exponential forgetting would have lost all of them."""
    learner, rng = learned(LINEAR, noise)
    for work in decodes_only(rng, 5000):
        learner.observe(work, took(rng, LINEAR, work, noise))
    median, p95 = errors(learner, LINEAR)
    assert median <= 0.15 and p95 <= 0.30
    for work in mixed(rng, 100):
        learner.observe(work, took(rng, LINEAR, work, noise))
    assert errors(learner, LINEAR)[0] <= 0.15


@pytest.mark.parametrize("plant", [LINEAR, KNEE, CPU], ids=["linear", "knee", "cpu"])
@pytest.mark.parametrize(("noise", "bound"), [(0.05, 0.15), (0.25, 0.25)])
def test_a_machine_that_slows_down_is_followed_and_back(plant: StepModel, noise: float, bound: float):
    learner, rng = learned(plant, noise)
    for slower in (1.6, 1.0):
        for work in mixed(rng, 120):
            learner.observe(work, took(rng, plant, work, noise, slower))
        assert errors(learner, rescaled(plant, slower))[0] <= bound


@pytest.mark.parametrize("wrong", [0.5, 2.0])
@pytest.mark.parametrize("noise", [0.05, 0.25])
def test_a_wrong_prior_is_left_behind(wrong: float, noise: float):
    learner, rng = StepTimeLearner(rescaled(LINEAR, wrong)), random.Random(5)
    assert errors(learner, LINEAR)[0] >= 0.4
    for work in mixed(rng, 100):
        learner.observe(work, took(rng, LINEAR, work, noise))
    assert errors(learner, LINEAR)[0] <= 0.15


def test_a_right_prior_is_used_from_the_first_step_on():
    learner, rng = StepTimeLearner(KNEE), random.Random(5)
    for work in mixed(rng, 40):
        learner.observe(work, took(rng, KNEE, work, 0.05))
        assert errors(learner, KNEE)[1] <= 0.1
    assert learner.is_settled


def test_a_knee_just_below_the_steps_of_a_paced_replica_is_found():
    """If tokens above it seemed to cost half as much, whole prompts would seem to fit into a step."""
    learner = StepTimeLearner()
    paced(random.Random(1), learner, L4, 1500, target_s=0.074)
    model = learner.coefficients
    assert model is not None
    assert model.token_s == pytest.approx(L4.token_s, rel=0.25)


def test_a_hiccup_changes_little():
    learner, rng = learned(LINEAR, 0.05)
    for work in mixed(rng, 5):
        learner.observe(work, 50 * LINEAR.predict(*work))
    assert errors(learner, LINEAR)[1] <= 0.15


def test_a_machine_that_is_interrupted_all_the_time_is_known_all_the_same():
    """One step in seven takes 2 to 10 times as long, as on a machine that others use."""
    learner, rng = StepTimeLearner(), random.Random(4)
    for work in mixed(rng, 1500):
        longer = rng.uniform(2, 10) if rng.random() < 0.15 else 1.0
        learner.observe(work, took(rng, LINEAR, work, 0.05, longer))
    assert errors(learner, LINEAR)[0] <= 0.10
    assert learner.margin <= 0.10


@pytest.mark.parametrize("noise", [0.05, 0.25])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_under_a_cpu_limit_it_learns_what_a_step_takes_when_it_runs(noise: float, seed: int):
    learner = StepTimeLearner()
    for work, seconds in throttled(random.Random(seed), 1500, noise):
        learner.observe(work, seconds)
    model = learner.model
    assert model is not None and model.settled
    median, p95 = errors(learner, THROTTLED)
    assert median <= 0.10 and p95 <= 0.35
    assert model.interrupted_share == pytest.approx(0.17, abs=0.10)
    assert model.interruption_s == pytest.approx(0.060, rel=0.1)
    assert model.residual_p95 is not None and model.residual_p95 <= 3 * noise, "of the steps that ran through"
    assert learner.margin <= 0.75 * noise


@pytest.mark.parametrize("noise", [0.05, 0.25])
def test_a_machine_at_another_speed_is_not_interrupted(noise: float):
    learner, rng = learned(LINEAR, noise)
    assert learner.interrupted_share <= 0.02
    for slower in (2.5, 1.0):
        for work in mixed(rng, 150):
            learner.observe(work, took(rng, LINEAR, work, noise, slower))
        assert learner.interrupted_share <= 0.05
        assert errors(learner, rescaled(LINEAR, slower))[0] <= 0.25


def test_nothing_is_known_before_the_first_step():
    learner = StepTimeLearner()
    assert (learner.model, learner.coefficients, learner.is_settled) == (None, None, False)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        ((0, 0, 0, 0), 0.01),
        ((1, 0, 0, 0), 0.0),
        ((1, 0, 0, 0), -1.0),
        ((1, 0, 0, 0), math.nan),
        ((1, 0, 0, 0), math.inf),
        ((1, 0, 0, 0), 1e6),
        ((-1, 5, 0, 0), 0.01),
        ((1, 0, 0, 2**80), 0.01),
    ],
)
def test_what_no_step_can_be_is_left_out(work: tuple[int, int, int, int], seconds: float):
    learner = StepTimeLearner()
    learner.observe(Work(*work), seconds)
    assert (learner.num_steps, learner.model) == (0, None)


COUNT = st.one_of(st.just(0), st.integers(0, 4096), st.integers(0, 2**53))
SECONDS = st.floats(allow_nan=True, allow_infinity=True) | st.floats(1e-6, 10.0)
STEPS = st.lists(st.tuples(COUNT, COUNT, COUNT, COUNT, SECONDS, st.integers(1, 40)), max_size=12)
PRIOR = st.none() | st.builds(
    StepModel,
    base_s=st.floats(0, 10),
    token_s=st.floats(0, 1),
    knee_tokens=st.floats(0, 1000),
    context_token_s=st.floats(0, 1),
    attention_pair_s=st.floats(0, 1),
    interaction_s=st.floats(0, 1),
)


@settings(deadline=None, max_examples=60)
@given(steps=STEPS, prior=PRIOR)
def test_whatever_comes_the_model_is_finite_and_not_negative(
    steps: list[tuple[int, int, int, int, float, int]], prior: StepModel | None
):
    learner = StepTimeLearner(prior)
    for *work, seconds, times in steps:
        for _ in range(times):
            learner.observe(Work(*work), seconds)
    model = learner.model
    if model is None:
        return
    assert msgspec.json.decode(msgspec.json.encode(model), type=StepModel).num_steps == learner.num_steps
    numbers = (model.base_s, model.token_s, model.knee_tokens, model.context_token_s, model.attention_pair_s)
    assert all(math.isfinite(one) and one >= 0 for one in (*numbers, model.interaction_s))
    assert all(math.isfinite(one) for one in model.covariance)
    assert math.isfinite(learner.margin) and learner.margin >= 0.02


@pytest.mark.parametrize(("seed", "num_steps"), [(1027, 1500), (1115, 40), (1135, 1600)])
def test_steps_that_are_nearly_all_alike_do_not_hold_it_up(seed: int, num_steps: int) -> None:
    """Full batches of decodes on a throttled CPU: the fits have next to nothing to tell the coefficients apart by."""
    rng, learner = np.random.default_rng(seed), StepTimeLearner()
    lengths = [int(length) for length in rng.integers(0, 1500, 12)]
    for _ in range(num_steps):
        prefill = int(rng.integers(2, 11)) if rng.random() < 0.03 else 0
        decodes = len(lengths) - bool(prefill)
        for row in range(decodes):
            lengths[row] = lengths[row] + 1 if lengths[row] < 1800 else 3
        context = sum(lengths[:decodes])
        seconds = (0.9e-3 + 5e-5 * (prefill + decodes) + 2e-8 * context) * (1 + abs(rng.normal(0, 0.1)))
        if rng.random() < 0.05:
            seconds += 0.06
        learner.observe(Work(prefill, decodes, context, prefill * (prefill + 1) // 2), seconds)
    assert learner.num_steps == num_steps

"""The engine with its governor, on a machine whose step times are known."""

import logging
from random import Random

import pytest

from flyball_protocol import BootPrior, Limits, LimitsChange, LimitsStatus, LimitsUpdate, StepModel
from flyball_runtime.core.clock import FakeClock
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.request import Request
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.core.speculation import SpeculativeConfig
from flyball_runtime.core.stats import EngineInfo, Sampled, StepStats
from flyball_runtime.engine.engine import Engine
from flyball_runtime.scheduler import BatchPlan
from runtime.governor.plants import LINEAR

RESIZE_S = 5.0


class Plant:
    """An executor that takes as long as a model says, and a resize 5 s."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, clock: FakeClock, model: StepModel = LINEAR) -> None:
        self.info = EngineInfo(
            model="plant",
            dtype="bfloat16",
            device="none",
            kernel_backend="none",
            max_model_len=4096,
            max_num_batched_tokens=2048,
            vocab_size=10,
            block_size=16,
            kv_windows=(None,),
            num_kv_blocks=10_000,
            num_start_kv_blocks=10_000,
            num_parameters=0,
            startup_s={},
            longest_pause_s=0.0,
        )
        self.model = model
        self._clock = clock
        self._free_s = 0.0

    def launch(self, plan: BatchPlan) -> tuple[float, int]:
        work = (plan.num_prefill_tokens, plan.num_decodes, plan.num_context_tokens, plan.prefill_work)
        self._free_s = max(self._clock.now(), self._free_s) + self.model.predict(*work)
        return self._free_s, plan.samples.count(True)

    def resize(self, num_blocks: int) -> None:
        self._clock.advance_to(max(self._clock.now(), self._free_s) + RESIZE_S)

    def collect(self, handle: tuple[float, int]) -> Sampled:
        self._clock.advance_to(handle[0])
        return Sampled([1] * handle[1])


def make(
    *, ahead: bool = False, caching: bool = False, prior: BootPrior | None = None, kv_drain_timeout_s: float = 30.0
) -> tuple[Engine, FakeClock]:
    clock = FakeClock()
    config = EngineConfig(
        model="plant",
        served_model_name="plant",
        max_num_seqs=64,
        async_scheduling=ahead,
        boot_prior=prior,
        enable_prefix_caching=caching,
        kv_drain_timeout_s=kv_drain_timeout_s,
    )
    return Engine(config, Plant(clock), clock), clock


PASS_S = 0.020


class DraftingPlant(Plant):
    """With a draft model, each pass of which takes 20 ms; the drafts are accepted."""

    def launch(self, plan: BatchPlan) -> tuple[float, BatchPlan]:  # type: ignore[override]
        work = (plan.num_tokens - plan.num_decodes, plan.num_decodes, plan.num_context_tokens, plan.prefill_work)
        seconds = self.model.predict(*work) + PASS_S * max(plan.num_drafts, default=0)
        self._free_s = max(self._clock.now(), self._free_s) + seconds
        return self._free_s, plan

    def collect(self, handle: tuple[float, BatchPlan]) -> Sampled:  # type: ignore[override]
        ends_s, plan = handle
        self._clock.advance_to(ends_s)
        return Sampled(
            [1] * sum(plan.samples),
            num_accepted=plan.num_drafts,
            drafts=[1] * sum(plan.num_drafts),
            drafting_s=PASS_S * max(plan.num_drafts, default=0),
        )


def make_drafting(num_tokens: int) -> Engine:
    clock = FakeClock()
    speculation = SpeculativeConfig(num_speculative_tokens=num_tokens, model="draft")
    config = EngineConfig(
        model="plant", served_model_name="plant", max_num_seqs=64, speculative_config=speculation, fair_share=False
    )
    return Engine(config, DraftingPlant(clock), clock)


def load(engine: Engine, num_requests: int, seed: int = 1) -> None:
    rng = Random(seed)
    for _ in range(num_requests):
        engine.submit(
            Request(
                request_id=str(rng.random()),
                prompt_token_ids=[1] * rng.randint(20, 1500),
                sampling=SamplingParams(max_tokens=rng.randint(1, 200), ignore_eos=True),
            )
        )


def drain(engine: Engine) -> list[StepStats]:
    stats = []
    while engine.has_work():
        engine.tick()
        stats.append(engine.step().stats)
    return stats


@pytest.mark.parametrize("ahead", [False, True])
def test_the_engine_learns_what_its_steps_take(ahead: bool) -> None:
    engine, _ = make(ahead=ahead)
    load(engine, 150)
    stats = drain(engine)
    late = [one for one in stats[200:] if one.predicted_s]
    right = [one for one in late if one.predicted_s == pytest.approx(one.duration_s, rel=0.05)]
    assert len(right) >= 0.9 * len(late) > 100
    model = engine.state().step_model
    assert model is not None and model.settled and model.num_steps >= len(stats) - 3
    assert model.predict(200, 20, 20_000, 20_100) == pytest.approx(LINEAR.predict(200, 20, 20_000, 20_100), rel=0.05)


def test_what_a_draft_model_takes_is_not_taken_for_what_tokens_cost() -> None:
    engine = make_drafting(2)
    engine.governor.tokens_per_s = lambda *_: None  # type: ignore[method-assign]  pay whatever drafts cost
    load(engine, 150)
    stats = drain(engine)
    late = [one for one in stats[100:] if one.predicted_s]
    right = [one for one in late if one.predicted_s == pytest.approx(one.duration_s, rel=0.15)]
    assert len(right) >= 0.8 * len(late) > 50
    assert any(one.num_drafts for one in stats[100:])
    model = engine.state().step_model
    assert model is not None
    assert model.predict(200, 20, 20_000, 20_100) == pytest.approx(LINEAR.predict(200, 20, 20_000, 20_100), rel=0.05)


def test_a_draft_model_that_takes_too_long_is_left_alone() -> None:
    """A step takes some 12 ms, and four passes 80 ms: five tokens come sooner one at a time."""
    engine = make_drafting(4)
    engine.submit(
        Request(
            request_id="a",
            prompt_token_ids=[1] * 50,
            sampling=SamplingParams(max_tokens=800, ignore_eos=True),
        )
    )
    stats = drain(engine)
    num_drafted = sum(one.num_drafts for one in stats)
    assert 4 <= num_drafted < 0.1 * len(stats)


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_stay_within_their_target_and_say_what_waits_for_it(ahead: bool) -> None:
    engine, _ = make(ahead=ahead)
    load(engine, 100)
    drain(engine)
    ack = engine.post_limits(LimitsUpdate(revision=1, limits=LimitsChange(step_time_target_ms=20.0)))
    assert (ack.status, ack.target.step_time_target_ms) == (LimitsStatus.APPLIED, 20.0)
    load(engine, 100, seed=2)
    stats = drain(engine)
    beside_decodes = [one.duration_s for one in stats if one.num_decodes and one.num_prefill_tokens]
    assert len(beside_decodes) > 50
    assert sum(seconds <= 0.021 for seconds in beside_decodes) >= 0.95 * len(beside_decodes)
    assert max(beside_decodes) > 0.018, "the target is used"
    assert "step_time" in {one.blocked_by for one in stats}


def test_a_resize_and_the_first_step_after_a_pause_teach_nothing() -> None:
    engine, clock = make()
    load(engine, 20)
    drain(engine)
    known = engine.governor.num_steps
    clock.advance(100.0)
    load(engine, 1, seed=7)
    num_steps = len(drain(engine))
    assert engine.governor.num_steps == known + num_steps - 1
    load(engine, 40, seed=3)
    engine.step()
    engine.post_limits(LimitsUpdate(revision=1, limits=LimitsChange(kv_cache_fraction=0.5)))
    drain(engine)
    assert engine.info.num_kv_blocks == 10_000 and engine.kv_cache.size == 5_000
    assert max(engine.governor._learner._residuals) < 3.0, "a step of 5 s would be some 300 times too long"


KEY = "plant/bfloat16/none/"


@pytest.mark.parametrize("fits", [True, False])
def test_a_prior_is_used_if_it_is_of_this_runtime(fits: bool, caplog: pytest.LogCaptureFixture) -> None:
    key = make()[0].info.key if fits else KEY + "another"
    limits = Limits(max_num_seqs=32, kv_cache_fraction=1.0, max_num_batched_tokens=512, step_time_target_ms=30.0)
    with caplog.at_level(logging.WARNING):
        engine, _ = make(prior=BootPrior(revision=3, limits=limits, step_model=LINEAR, key=key))
    assert engine.limits().target == limits
    assert (engine.governor.model is not None) == fits
    assert fits or f"is of '{KEY}another', and this runtime is '{KEY}" in caplog.text


def test_lengths_are_those_of_what_ended_and_of_what_was_given_up() -> None:
    engine, _ = make()
    load(engine, 30)
    drain(engine)
    before = engine.state().lengths
    assert before is not None and before.num_requests == pytest.approx(30, rel=0.05)
    engine.submit(Request(request_id="a", prompt_token_ids=[1] * 10, sampling=SamplingParams(max_tokens=90)))
    for _ in range(5):
        engine.step()
    engine.abort("a")
    after = engine.state().lengths
    assert after is not None and after.num_requests > before.num_requests


def test_prompts_that_come_again_show_in_the_curve_of_the_ghost_cache() -> None:
    engine, _ = make(caching=True)
    for name in "ab":
        request = Request(
            request_id=name,
            prompt_token_ids=list(range(1, 1602)),
            sampling=SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0),
        )
        engine.submit(request)
        stats = drain(engine)
    assert stats[0].num_prefix_hit_tokens == 1600
    curve = engine.state().prefix_hits
    assert curve[0].num_blocks == 1250 and [point.share for point in curve] == pytest.approx([1600 / 3202] * 8, rel=0.1)
    assert make()[0].state().prefix_hits == ()


@pytest.mark.parametrize(
    ("timeouts", "expected"),
    [
        ([None], 4.0),
        ([1.0], 1.0),
        ([1.0, None], 4.0),
        ([1.0, "renewed"], 1.0),
        ([None, "stale"], 4.0),
    ],
)
def test_a_lowered_kv_limit_waits_as_long_as_its_post_says(timeouts: list[float | str | None], expected: float) -> None:
    """Two long requests hold the cache. When the time is over, one of them is preempted."""
    engine, clock = make(kv_drain_timeout_s=4.0)
    for name in "ab":
        sampling = SamplingParams(max_tokens=1000, ignore_eos=True)
        engine.submit(Request(request_id=name, prompt_token_ids=[1] * 3000, sampling=sampling))
    while engine.scheduler.num_waiting or not engine.scheduler.num_running:
        engine.step()
    limits = LimitsChange(kv_cache_fraction=engine.limits().envelope.min_kv_cache_fraction)
    revision = 5
    for timeout in timeouts:
        if timeout == "renewed":
            engine.post_limits(LimitsUpdate(revision=revision, limits=limits, ttl_s=60))
        elif timeout == "stale":
            engine.post_limits(LimitsUpdate(revision=1, limits=limits, kv_drain_timeout_s=0.1))
        else:
            revision += 1
            assert isinstance(timeout, float | None)
            engine.post_limits(LimitsUpdate(revision=revision, limits=limits, kv_drain_timeout_s=timeout))
    assert engine.scheduler.kv_drains
    start_s = last_s = clock.now()
    while engine.scheduler.kv_drains:
        last_s = clock.now()
        engine.step()
    assert last_s - start_s == pytest.approx(expected, abs=0.5)

"""What an engine does beside tokens: abort, limits, seeds, refusals."""

import gc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from checkpoints import make_checkpoint, poison
from engines import GREEDY, generate, kv_block_bytes, make_engine, random_prompts
from flyball_protocol import LimitsChange, LimitsStatus, LimitsUpdate
from flyball_runtime.core.clock import FakeClock
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.request import Failed, Finished, Request, Sequence
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.core.stats import EngineInfo, Sampled, StepOutput
from flyball_runtime.engine.engine import Engine
from flyball_runtime.scheduler import BatchPlan


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


def request(name: str = "a", prompt: list[int] | None = None, **sampling: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[5, 6, 7] if prompt is None else prompt,
        sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **sampling}),
    )


def test_a_seed_gives_the_same_output_whatever_else_runs(path: Path) -> None:
    engine = make_engine(path)
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=20, ignore_eos=True)
    prompts = random_prompts([12, 30, 5, 44])
    alone = generate(engine, prompts[:1], sampling)
    together = generate(engine, prompts, sampling)
    assert together[0] == alone[0]
    other = generate(engine, prompts[:1], msgspec.structs.replace(sampling, seed=8))
    assert other != alone


@pytest.mark.parametrize(
    ("settings", "num_runs"),
    [
        ({"max_num_batched_tokens": 8, "enable_prefix_caching": False}, 1),  # in chunks
        ({}, 2),  # the second time from the prefix cache
        ({"max_num_batched_tokens": 11}, 2),  # both, and the chunks end elsewhere
    ],
)
def test_a_seed_gives_the_same_output_however_the_prompt_is_computed(
    path: Path, settings: dict[str, Any], num_runs: int
) -> None:
    sampling = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
    prompts = random_prompts([50])
    expected = generate(make_engine(path, enable_prefix_caching=False), prompts, sampling)
    engine = make_engine(path, **settings)
    assert [generate(engine, prompts, sampling) for _ in range(num_runs)] == [expected] * num_runs


def test_a_seed_gives_the_same_output_after_a_preemption(path: Path) -> None:
    """Four sequences of 28 + 30 tokens want 16 blocks of 16 tokens; there are 12."""
    sampling = SamplingParams(temperature=1.0, seed=7, max_tokens=30, ignore_eos=True)
    prompts = random_prompts([28, 28, 28, 28])
    expected = generate(make_engine(path), prompts, sampling)
    kv_bytes = 12 * kv_block_bytes(path)
    engine = make_engine(path, max_model_len=64, kv_cache_memory_bytes=kv_bytes, enable_prefix_caching=False)
    preemptions = []
    step = engine.step

    def counting_step() -> StepOutput:
        output = step()
        preemptions.append(output.stats.num_preemptions)
        return output

    engine.step = counting_step  # type: ignore[method-assign]
    assert generate(engine, prompts, sampling) == expected
    assert sum(preemptions) > 0


def test_without_a_seed_two_runs_differ_and_the_engine_seed_repeats_them(path: Path) -> None:
    sampling = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    first = make_engine(path, seed=1, enable_prefix_caching=False)
    runs = [generate(first, [[5, 6, 7]], sampling) for _ in range(2)]
    assert runs[0] != runs[1]
    second = make_engine(path, seed=1, enable_prefix_caching=False)
    assert [generate(second, [[5, 6, 7]], sampling) for _ in range(2)] == runs


def test_without_an_engine_seed_two_engines_differ(path: Path) -> None:
    """Replicas of one deployment, or one before and after a restart: their clients ask for different outputs."""
    sampling = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    first, second = make_engine(path), make_engine(path)
    assert generate(first, [[5, 6, 7]], sampling) != generate(second, [[5, 6, 7]], sampling)


def test_an_ended_sequence_is_not_kept(path: Path) -> None:
    engine = make_engine(path)
    for name in ("ended-a", "ended-b"):
        engine.submit(request(name, temperature=1.0))
    while engine.has_work():
        engine.step()
    kept = [one for one in gc.get_objects() if type(one) is Sequence and one.request_id.startswith("ended-")]
    assert kept == []


def test_abort_frees_the_blocks_at_once_and_is_idempotent(path: Path) -> None:
    engine = make_engine(path, enable_prefix_caching=False)
    engine.submit(request("a", prompt=list(range(4, 100))))
    engine.submit(request("b"))
    engine.step()
    assert engine.kv_cache.counts().used > 6
    assert engine.abort("a") == Finished("a", "abort", 96, 1)
    assert engine.abort("a") is None
    assert engine.kv_cache.counts().used == 1
    assert engine.step().request_ids == ["b"]


def test_one_bad_request_fails_alone(path: Path) -> None:
    engine = make_engine(path)
    engine.submit(request("good"))
    for bad, code in (
        (request("bad", prompt=[5] * 256), "context_length_exceeded"),
        (request("good"), "invalid_request"),
    ):
        failed = engine.submit(bad)
        assert isinstance(failed, Failed)
        assert (failed.request_id, failed.status, failed.code) == (bad.request_id, 400, code)
    endings = []
    while engine.has_work():
        endings += engine.step().endings
    assert endings == [Finished("good", "length", 3, 8)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sequence_with_nan_logits_fails_alone(tmp_path: Path, temperature: float, ahead: bool) -> None:
    path = make_checkpoint(tmp_path, "llama2")
    sampling = SamplingParams(temperature=temperature, seed=3, max_tokens=20, ignore_eos=True)
    prompts = random_prompts([40, 33, 5], vocab_size=300)
    expected = generate(make_engine(path), prompts, sampling)
    poisoned = next(token for token in range(300, 384) if not any(token in output for output in expected))
    poison(path, poisoned)
    engine = make_engine(path, async_scheduling=ahead)
    for index, prompt in enumerate(prompts):
        engine.submit(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    engine.submit(request("bad", prompt=[*prompts[0][:35], poisoned], temperature=temperature))
    outputs: dict[str, list[int]] = {str(index): [] for index in range(3)}
    endings = []
    while engine.has_work():
        step = engine.step()
        endings += step.endings
        for request_id, token_id in zip(step.request_ids, step.token_ids, strict=True):
            outputs[request_id].append(token_id)
    assert list(outputs.values()) == expected
    failed = endings.pop(0)
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.status, failed.code) == ("bad", 500, "invalid_logits")
    assert "no usable logits after 0 output tokens" in failed.message
    assert [(ending.request_id, ending.reason) for ending in endings] == [(str(i), "length") for i in range(3)]
    assert engine.kv_cache.counts().used == 0
    assert engine.abort("bad") is None


def test_planned_ahead_nothing_that_has_ended_is_left_behind(path: Path) -> None:
    """Stop tokens and aborts leave steps in flight that compute more than was needed."""
    (free,) = generate(make_engine(path), [[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    engine = make_engine(path, async_scheduling=True, enable_prefix_caching=False)
    engine.submit(request("stops", stop_token_ids=(free[2],)))
    engine.submit(request("goes", prompt=list(range(4, 100))))
    tokens, endings = [], []
    while engine.has_work():
        output = engine.step()
        tokens += [token for name, token in zip(output.request_ids, output.token_ids, strict=True) if name == "stops"]
        endings += output.endings
        if len(tokens) == 2 and (gone := engine.abort("goes")) is not None:
            endings.append(gone)
    assert tokens == free[: free.index(free[2]) + 1]
    assert {ending.request_id: ending.reason for ending in endings} == {"stops": "stop", "goes": "abort"}  # type: ignore[union-attr]
    assert engine.kv_cache.counts().used == 0


@pytest.mark.parametrize(("architecture", "most"), [("mistral", 4), ("qwen3 windows", 10 + 2 * 4)])
def test_what_lies_behind_a_window_takes_no_blocks(tmp_path: Path, architecture: str, most: int) -> None:
    """Windows of 24 and 20 tokens, and in the second model one layer of three that keeps all 160."""
    engine = make_engine(make_checkpoint(tmp_path, architecture), enable_prefix_caching=False)
    engine.submit(request("a", prompt=list(range(4, 64)), max_tokens=100))
    used = []
    while engine.has_work():
        engine.step()
        used.append(engine.kv_cache.counts().used)
    assert max(used) <= most
    assert used[-1] == 0


class StandIn:
    """An executor without a model: every token is 7, and each step takes a time that its plan says."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, info: EngineInfo, clock: FakeClock) -> None:
        self.info = info
        self._clock = clock

    def launch(self, plan: BatchPlan) -> BatchPlan:
        return plan

    def collect(self, handle: BatchPlan) -> Sampled:
        self._clock.advance(handle.num_tokens * 0.5)
        return Sampled([7] * sum(handle.samples))


@pytest.mark.parametrize("ahead", [False, True])
def test_executor_and_clock_come_from_outside(path: Path, ahead: bool) -> None:
    clock = FakeClock(100.0)
    config = EngineConfig(
        model="", served_model_name="", max_num_seqs=4, max_num_batched_tokens=8, async_scheduling=ahead
    )
    engine = Engine(config, StandIn(make_engine(path, max_num_batched_tokens=8, max_num_seqs=4).info, clock), clock)
    engine.submit(request("a", prompt=[5] * 10, max_tokens=3))
    durations = []
    while engine.has_work():
        durations.append(engine.step().stats.duration_s)
    assert durations == [4.0, 1.0, 0.5, 0.5]
    assert clock.now() == 106.0


def test_output_stops_at_the_context_length(path: Path) -> None:
    engine = make_engine(path, max_model_len=32)
    (output,) = generate(engine, [[5] * 30], SamplingParams(temperature=0.0, ignore_eos=True))
    assert len(output) == 2


def test_lowered_limits_drain_and_change_no_token(path: Path) -> None:
    prompts = random_prompts([20, 33, 47, 8, 15, 26])
    expected = generate(make_engine(path), prompts)
    engine = make_engine(path)
    for index, prompt in enumerate(prompts):
        engine.submit(Request(request_id=str(index), prompt_token_ids=prompt, sampling=GREEDY))
    outputs: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    changes = [
        LimitsChange(max_num_seqs=2),
        LimitsChange(kv_cache_fraction=0.3, max_num_batched_tokens=9),
        LimitsChange(max_num_seqs=8, kv_cache_fraction=1.0, max_num_batched_tokens=256),
    ]
    statuses, step = [], 0
    while engine.has_work():
        if step % 5 == 3 and changes:
            ack = engine.post_limits(LimitsUpdate(revision=4 - len(changes), limits=changes.pop(0)))
            statuses.append(ack.status)
        output = engine.step()
        step += 1
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            outputs[request_id].append(token_id)
    assert list(outputs.values()) == expected
    assert statuses[0] is LimitsStatus.DEFERRED
    assert statuses[-1] is LimitsStatus.APPLIED


def test_each_step_tells_how_far_a_lowered_limit_has_drained(path: Path) -> None:
    engine = make_engine(path)
    for name in "abcd":
        engine.submit(request(name, max_tokens=4 if name < "c" else 8))
    engine.step()
    ack = engine.post_limits(LimitsUpdate(revision=1, limits=LimitsChange(max_num_seqs=2)))
    assert (ack.status, ack.effective.max_num_seqs) == (LimitsStatus.DEFERRED, 4)
    effective = []
    while engine.has_work():
        stats = engine.step().stats
        assert stats is not None
        effective.append(stats.effective.max_num_seqs)
    assert effective == [4, 4, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kv_cache_memory_bytes": 1000}, "0 blocks"),
        ({"max_model_len": 513}, "positions end at 512"),
        ({"dtype": "int4"}, "--dtype is 'int4'"),
        ({"max_num_seqs": 0}, "--max-num-seqs is 0"),
        ({"max_num_seqs": 300}, "--max-num-batched-tokens is 256, below --max-num-seqs 300"),
        ({"device": "cuda"}, "no CUDA device"),
        ({"kernel_backend": "triton"}, "--kernel-backend triton"),
        ({"attention_backend": "flash_attn"}, "--attention-backend flash_attn: .* runs on cuda, not on cpu"),
    ],
)
def test_settings_that_cannot_work_stop_the_start(
    path: Path, settings: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=says):
        make_engine(path, **settings)

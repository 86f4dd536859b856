"""Memory of the KV cache that is given back and taken again while sequences run."""

import random
from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from engines import GREEDY, INT8_KV, generate, kv_block_bytes, make_engine, random_prompts
from flyball_protocol import LimitsChange, LimitsStatus, LimitsUpdate
from flyball_runtime.core.checkpoint import KVDType
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.request import Request
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.engine.engine import Engine
from flyball_runtime.engine.runner import ModelRunner

MAX_MODEL_LEN = 128


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


def set_fraction(engine: Engine, revision: int, fraction: float) -> LimitsStatus:
    change = LimitsChange(kv_cache_fraction=fraction)
    ack = engine.post_limits(LimitsUpdate(revision=revision, limits=change))
    assert ack.status in (LimitsStatus.APPLIED, LimitsStatus.DEFERRED), ack.reason
    return ack.status


@pytest.mark.parametrize("ahead", [False, True])
def test_a_hundred_resizes_under_load_change_no_token_and_lose_nothing(path: Path, ahead: bool) -> None:
    rng = random.Random(ahead)
    prompts = random_prompts([rng.randrange(1, 90) for _ in range(40)])
    prompts += [[*prompt[:48], 7] for prompt in prompts[:10]]  # found in the cache, or not any more
    expected = generate(make_engine(path, max_model_len=MAX_MODEL_LEN), prompts)
    settings = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 6, "kv_cache_memory_bytes": 24 * kv_block_bytes(path)}
    engine = make_engine(path, async_scheduling=ahead, kv_drain_timeout_s=0.02, max_num_batched_tokens=64, **settings)
    outputs: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    waiting = [Request(request_id=name, prompt_token_ids=prompts[int(name)], sampling=GREEDY) for name in outputs]
    statuses, sizes, num_resizes = [], set(), 0
    while engine.has_work() or waiting or num_resizes < 100:
        if waiting and engine.scheduler.num_waiting < 3:
            assert engine.submit(waiting.pop(0)) is None
        if num_resizes < 100 and rng.random() < 0.7:
            num_resizes += 1
            statuses.append(set_fraction(engine, num_resizes, rng.uniform(1 / 3, 1.0)))
        engine.tick()
        sizes.add(engine.kv_cache.size)
        if engine.has_work():
            output = engine.step()
            for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
                outputs[request_id].append(token_id)
    assert list(outputs.values()) == expected
    assert {LimitsStatus.APPLIED, LimitsStatus.DEFERRED} == set(statuses)
    assert len(sizes) > 8
    assert engine.kv_cache.counts().used == 0


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose KV blocks are large beside what else an engine allocates."""
    sizes = {"num_key_value_heads": 4, "num_attention_heads": 4, "head_dim": 128}
    return make_checkpoint(tmp_path_factory.mktemp("wide"), "qwen3", **sizes)


def fill(engine: Engine, number: int) -> None:
    """Leave as much in the prefix cache as there is room for."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    for index in range(engine.kv_cache.capacity // 15 + 1):
        prompt = random_prompts([241], seed=1000 * number + index)[0]
        engine.submit(Request(request_id=f"{number}-{index}", prompt_token_ids=prompt, sampling=sampling))
    while engine.has_work():
        engine.step()
    assert engine.kv_cache.counts().cached >= engine.kv_cache.capacity - 15


def test_memory_falls_and_rises_as_the_pool_says(wide: Path) -> None:
    """Between 64 and 1024 blocks of 128 KiB; the cache starts with 512."""
    a_block = kv_block_bytes(wide)
    engine = make_engine(
        wide, kv_cache_memory_bytes=512 * a_block, kv_cache_memory_max_bytes=1024 * a_block, max_num_seqs=64
    )
    assert (engine.limits().target.kv_cache_fraction, engine.kv_cache.size) == (0.5, 512)
    fill(engine, 0)
    for revision, fraction in enumerate((0.125, 1.0, 0.25, 0.75), 1):
        before, size = resident_bytes(), engine.kv_cache.size
        assert set_fraction(engine, revision, fraction) in (LimitsStatus.APPLIED, LimitsStatus.DEFERRED)
        engine.tick()
        assert engine.kv_cache.size == 1024 * fraction
        if engine.kv_cache.size > size:
            fill(engine, revision)
        moved = (engine.kv_cache.size - size) * a_block
        assert abs(resident_bytes() - before - moved) <= 0.1 * abs(moved), f"to {fraction}"


def test_more_memory_than_at_the_start_has_to_be_more(path: Path) -> None:
    a_block = kv_block_bytes(path)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-max is \d+ bytes, and the KV cache starts with"):
        make_engine(path, kv_cache_memory_bytes=32 * a_block, kv_cache_memory_max_bytes=31 * a_block)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_the_engine_says_what_a_block_takes_and_how_many_there_are(path: Path, kv_dtype: KVDType) -> None:
    a_block = kv_block_bytes(path, kv_dtype=kv_dtype)
    engine = make_engine(path, kv_cache_memory_bytes=40 * a_block, **(INT8_KV if kv_dtype == "int8" else {}))
    assert engine.info.kv_block_bytes == a_block
    assert engine.state().num_allocated_kv_blocks == 40
    runner = engine._executor
    assert isinstance(runner, ModelRunner)
    blocks = runner._blocks
    assert blocks.num_blocks * blocks.numel * blocks.dtype.itemsize == 40 * a_block

"""How many KV blocks the engine gets."""

from pathlib import Path

import pytest
import torch

from checkpoints import make_checkpoint
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.kv_layout import KVLayout
from flyball_runtime.core.model_config import ModelConfig
from flyball_runtime.engine.start_up import KVCacheSize, device_name, resolve_kv_cache

BLOCK_BYTES = 2 * 2 * 2 * 24 * 4 * 16  # K and V, layers, KV heads, head_dim, fp32, tokens
CUDA = torch.device("cuda")
LAYOUT = KVLayout.of((None, None), 512)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig.from_dir(make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3"))


def size(model: ModelConfig, *, step_bytes: int = 0, max_model_len: int = 64, **settings: float) -> KVCacheSize:
    config = EngineConfig(model="", served_model_name="", **settings)  # type: ignore[arg-type]
    return resolve_kv_cache(
        config,
        model,
        LAYOUT,
        kv_dtype="float32",
        device=CUDA,
        max_model_len=max_model_len,
        step_tokens=2048,
        step_bytes=step_bytes,
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 blocks of memory, of which 700 are free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (700 * BLOCK_BYTES, 1000 * BLOCK_BYTES))


@pytest.mark.usefixtures("gpu")
def test_a_gpu_gives_what_weights_and_steps_leave(model: ModelConfig) -> None:
    got = size(model, gpu_memory_utilization=0.75, step_bytes=50 * BLOCK_BYTES)
    assert got == (400, 400)


@pytest.mark.usefixtures("gpu")
def test_no_more_than_full_sequences_need(model: ModelConfig) -> None:
    assert size(model, max_num_seqs=3) == (12, 12)


@pytest.mark.usefixtures("gpu")
def test_too_little_for_one_sequence(model: ModelConfig) -> None:
    with pytest.raises(
        ConfigError, match=r"3 blocks of .*; one sequence of --max-model-len 64 needs 4\. Raise --kv-cache"
    ):
        size(model, gpu_memory_utilization=0.75, step_bytes=447 * BLOCK_BYTES)
    with pytest.raises(ConfigError, match="0 blocks of"):
        size(model, gpu_memory_utilization=0.1)


def test_the_flag_wins(model: ModelConfig) -> None:
    assert size(model, kv_cache_memory_bytes=5 * BLOCK_BYTES + 1) == (5, 5)


def test_it_may_grow_past_its_start_where_memory_comes_on_use(model: ModelConfig) -> None:
    sizes = {"kv_cache_memory_bytes": 5 * BLOCK_BYTES, "kv_cache_memory_max_bytes": 9 * BLOCK_BYTES}
    config = EngineConfig(model="", served_model_name="", max_num_seqs=2, **sizes)
    on_cpu = {"kv_dtype": "float32", "device": torch.device("cpu"), "step_tokens": 512, "step_bytes": 0}
    assert resolve_kv_cache(config, model, LAYOUT, max_model_len=80, **on_cpu) == (5, 9)  # type: ignore[arg-type]
    assert resolve_kv_cache(config, model, LAYOUT, max_model_len=64, **on_cpu) == (5, 8), "two sequences need no more"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--kv-cache-memory-max needs a KV cache that can grow"):
        size(model, **sizes)


def test_a_device_is_known_by_what_its_step_times_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    cpu = torch.device("cpu")
    assert device_name(CUDA) == "NVIDIA H200"
    assert device_name(cpu, tmp_path) == "riscv64 x4"
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: Made  up CPU @ 2GHz\nprocessor\t: 1\n")
    assert device_name(cpu, tmp_path) == "Made up CPU @ 2GHz x4"

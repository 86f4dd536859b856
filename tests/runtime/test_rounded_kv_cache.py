"""A KV cache in 8 bits: what it holds, and what it changes. Tokens: ``engine/test_tokens.py``."""

from pathlib import Path

import pytest
import torch

from checkpoints import make_checkpoint
from engines import FP8_KV, GREEDY, INT8_KV, Reference, generate, make_engine, random_prompts
from flyball_kernels.kv_cache import SCALE_BYTES
from flyball_runtime.core.checkpoint import KV_SCALE_BYTES
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.model_config import ModelConfig
from flyball_runtime.llm import LLM


@pytest.mark.parametrize("rounded", [INT8_KV, FP8_KV | {"kernel_backend": "torch"}], ids=["int8", "fp8"])
def test_the_same_memory_holds_nearly_twice_the_tokens(tmp_path: Path, rounded: dict[str, str]) -> None:
    path = make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, head_dim=64)
    memory = {"dtype": "bfloat16", "kv_cache_memory_bytes": 2**20, "max_num_seqs": 64}
    bf16, bits_8 = make_engine(path, **memory).info, make_engine(path, **memory, **rounded).info
    assert (bf16.kv_block_bytes, bits_8.kv_block_bytes) == (2 * 2 * 2 * 16 * 64 * 2, 2 * 2 * 2 * 16 * (64 + 4))
    assert bits_8.num_kv_blocks == int(bf16.num_kv_blocks * 128 / 68)
    assert bits_8.kv_dtype == bits_8.kv_cache_dtype == rounded["kv_cache_dtype"]
    assert (bf16.kv_dtype, bf16.kv_cache_dtype) == ("bfloat16", "auto")
    assert bits_8.key.split("/")[-3] == f"bfloat16+kv_{rounded['kv_cache_dtype']}", (
        "step times differ, so what is learned is not shared"
    )


def test_pool_and_kernels_have_the_same_room_for_scales() -> None:
    assert KV_SCALE_BYTES == SCALE_BYTES


@pytest.mark.parametrize(
    ("backend", "rounded"),
    [
        ("auto", INT8_KV),
        pytest.param("triton", INT8_KV, marks=pytest.mark.slow),
        pytest.param("triton", FP8_KV, marks=pytest.mark.slow),
    ],
    ids=["auto-int8", "triton-int8", "triton-fp8"],
)
def test_tokens_are_those_of_the_torch_reference(tmp_path: Path, backend: str, rounded: dict[str, str]) -> None:
    path, prompts = make_checkpoint(tmp_path, "qwen3"), random_prompts([30, 8, 70])
    expected = generate(make_engine(path, kernel_backend="torch", **rounded), prompts)
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    assert generate(make_engine(path, device=device, kernel_backend=backend, **rounded), prompts) == expected


def test_tokens_of_fp8_are_those_of_transformers(tmp_path: Path) -> None:
    path, prompts = make_checkpoint(tmp_path, "qwen3"), random_prompts([30, 8, 70])
    expected = Reference(path, kv="fp8").generate(prompts)
    assert generate(make_engine(path, kernel_backend="torch", **FP8_KV), prompts) == expected
    assert Reference(path).generate(prompts) != expected  # the rounding is there


def test_fp8_with_cpp_is_refused_with_what_does_as_well(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match=r"C\+\+ ops have no code for\. On a CPU use int8_per_token_head"):
        make_engine(path, kernel_backend="cpp", **FP8_KV)


def test_from_python() -> None:
    demo = Path(__file__).parents[2] / "examples" / "demo_model" / "checkpoint"
    outputs = LLM(demo, dtype="bfloat16", max_model_len=128, **INT8_KV).generate(["What is a KV cache?"], GREEDY)
    assert len(outputs[0].text) > 20


def test_other_dtypes_are_refused() -> None:
    for name in ("int8", "fp8", "fp8_e5m2"):
        with pytest.raises(
            ConfigError, match=f"--kv-cache-dtype is '{name}'; it must be one of auto, int8_per_token_head, fp8"
        ):
            EngineConfig(model="m", served_model_name="m", kv_cache_dtype=name)


@pytest.mark.parametrize(("head_dim", "saving"), [(64, 1.88), (128, 1.93)])
def test_what_is_saved_beside_bf16(tmp_path: Path, head_dim: int, saving: float) -> None:
    config = ModelConfig.from_dir(make_checkpoint(tmp_path, "qwen3", head_dim=head_dim))
    assert config.kv_bytes_per_layer("bfloat16") / config.kv_bytes_per_layer("int8") == pytest.approx(saving, abs=0.01)

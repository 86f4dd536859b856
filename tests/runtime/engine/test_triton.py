"""The whole engine on the Triton kernels, in Triton's interpreter: what a GPU runs, without one."""

from pathlib import Path

import pytest
import torch

import flash_attention
from checkpoints import make_checkpoint
from engines import Reference, generate, make_engine, random_prompts
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.sampling_params import SamplingParams

NUM_TOKENS = 6

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, test_tokens.py runs the compiled kernels"
)


# a sliding window; norms on query and key; experts, with one that all tokens use, stacked ones with biases
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["mistral", "qwen3", "qwen2 moe", "gpt-oss"])
def test_tokens_equal_transformers(arch: str, tmp_path: Path) -> None:
    """Prefill in chunks of 16 beside decodes, over several blocks."""
    path = make_checkpoint(tmp_path, arch)
    prompts = random_prompts([3, 17, 40])
    engine = make_engine(path, kernel_backend="triton", max_num_batched_tokens=16)
    assert engine.info.kernel_backend == "triton"
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    assert generate(engine, prompts, sampling) == Reference(path).generate(prompts, NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["mistral", "qwen3"])
def test_flash_attention_gives_the_same_tokens(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what FlashAttention 3 documents in its place."""
    flash_attention.install(monkeypatch)
    monkeypatch.setattr("flyball_kernels.flash_attention.check_can_run", lambda device: None)
    path = make_checkpoint(tmp_path, arch, head_dim=16)
    prompts, sampling = random_prompts([3, 17, 40]), SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    settings = {"dtype": "float16", "max_num_batched_tokens": 16}
    engine = make_engine(path, kernel_backend="triton", attention_backend="flash_attn", **settings)
    assert engine.info.attention_backend == "flash_attn"
    assert generate(engine, prompts, sampling) == generate(
        make_engine(path, kernel_backend="torch", **settings), prompts, sampling
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dtype": "float32"}, "computes in torch.float32"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "int8_per_token_head"}, "keeps keys and values in torch.int8"),
    ],
)
def test_flash_attention_without_code_for_a_model_stops_the_start(
    settings: dict[str, str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flyball_kernels.flash_attention.check_can_run", lambda device: None)
    path = make_checkpoint(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match=f"--attention-backend flash_attn: .*{says}"):
        make_engine(path, kernel_backend="triton", attention_backend="flash_attn", **settings)

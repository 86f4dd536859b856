"""The whole engine on the Triton kernels, in Triton's interpreter: what a GPU runs, without one."""

from pathlib import Path

import pytest
import torch

from checkpoints import make_checkpoint
from engines import Reference, generate, make_engine, random_prompts
from flyball_runtime.core.sampling_params import SamplingParams

NUM_TOKENS = 6

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, test_tokens.py runs the compiled kernels"
)


# a sliding window; norms on query and key
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["mistral", "qwen3"])
def test_tokens_equal_transformers(arch: str, tmp_path: Path) -> None:
    """Prefill in chunks of 16 beside decodes, over several blocks."""
    path = make_checkpoint(tmp_path, arch)
    prompts = random_prompts([3, 17, 40])
    engine = make_engine(path, kernel_backend="triton", max_num_batched_tokens=16)
    assert engine.info.kernel_backend == "triton"
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    assert generate(engine, prompts, sampling) == Reference(path).generate(prompts, NUM_TOKENS)

"""Linear layers in 8 bits: how little they change what a model says, and that nothing else changes it."""

import math
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch

from checkpoints import make_checkpoint
from engines import GREEDY, generate, make_engine, random_prompts
from flyball_kernels import Backend
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.model_config import ModelConfig
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.llm import LLM
from flyball_runtime.model.attention_probe import probe
from flyball_runtime.model.loader import load_model

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo_model"


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Texts of the kind that the demo model was trained on."""
    monkeypatch.syspath_prepend(DEMO_MODEL)
    import corpus

    yield list(islice(corpus.documents(seed=4_000_000), 40))
    for name in ("corpus", "families", "grammar", "stories", "words"):
        sys.modules.pop(name, None)


def nats_per_token(texts: list[str], **settings: object) -> float:
    llm = LLM(DEMO_MODEL / "checkpoint", **settings)
    outputs = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0))
    found = [one.logprob for output in outputs for one in (output.prompt_logprobs or [])[1:] if one is not None]
    return -math.fsum(one for one in found if one is not None) / len(found)


def test_the_perplexity_of_a_trained_model_hardly_grows(texts: list[str]) -> None:
    exact = nats_per_token(texts, dtype="float32")
    rounded = nats_per_token(texts, dtype="bfloat16", quantization="int8")
    print(exact, nats_per_token(texts, dtype="bfloat16"), rounded)
    assert rounded != exact
    assert math.exp(rounded - exact) < 1.01


@pytest.mark.parametrize("architecture", ["llama3", "gemma3", "mixtral", "gpt-oss"])
def test_tokens_do_not_depend_on_other_requests_chunks_or_threads(tmp_path: Path, architecture: str) -> None:
    path = make_checkpoint(tmp_path, architecture)
    prompts = random_prompts([40, 3, 70, 1, 25])
    whole = make_engine(path, quantization="int8")
    expected = [generate(whole, [prompt])[0] for prompt in prompts]
    assert generate(whole, prompts) == expected
    chunked = make_engine(path, quantization="int8", max_num_batched_tokens=16, enable_prefix_caching=False)
    assert generate(chunked, prompts) == expected
    assert whole.info.key.split("/")[1:][-3] == "float32+int8"


def test_the_reference_says_the_same(tmp_path: Path) -> None:
    path, prompts = make_checkpoint(tmp_path, "qwen3"), random_prompts([30, 8])
    expected = generate(make_engine(path, quantization="int8", kernel_backend="torch"), prompts)
    assert generate(make_engine(path, quantization="int8"), prompts) == expected
    assert generate(make_engine(path), prompts, GREEDY) != expected


def test_what_cannot_be_rounded_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama3")
    with pytest.raises(ConfigError, match="--quantization is 'int3'; it must be one of none, int8"):
        EngineConfig(model=str(path), served_model_name="m", quantization="int3")
    settings = {"dtype": torch.float32, "device": "cpu", "quantization": "int8"}
    with pytest.raises(ConfigError, match="runs in transformers, whose layers are not rounded"):
        load_model(path, probe(path), backend=Backend("torch"), **settings)
    with pytest.raises(ConfigError, match="--quantization int8 is for CPUs; this model runs on cpu"):
        load_model(path, ModelConfig.from_dir(path), backend=Backend("triton"), **settings)

"""Log probabilities equal those of transformers, however the work is cut up, and whatever changes the logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from transformers import AutoModelForCausalLM

from checkpoints import ALL_ARCHITECTURES, make_checkpoint
from engines import kv_block_bytes, make_engine, random_prompts
from flyball_runtime.core.request import Request, TokenLogprobs
from flyball_runtime.core.sampling_params import SamplingParams

PROMPTS = random_prompts([1, 5, 17, 40, 100])
BASE = SamplingParams(max_tokens=12, ignore_eos=True, seed=3)
SETTINGS = [
    structs.replace(BASE, logprobs=0),
    structs.replace(BASE, logprobs=20, temperature=0.0),
    BASE,
    structs.replace(BASE, logprobs=3, presence_penalty=2.0, temperature=1.7, logit_bias={9: 100.0}),
    structs.replace(BASE, logprobs=5, allowed_token_ids=(4, 5, 6, 7), top_k=2),
]

FAST = ["qwen3", "mistral"]
SLOW = [pytest.param(arch, marks=pytest.mark.slow) for arch in ALL_ARCHITECTURES if arch not in FAST]


@pytest.fixture(scope="module", params=[*FAST, *SLOW])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def check(model: Any, prompt: list[int], tokens: list[int], logprobs: list[TokenLogprobs], count: int) -> None:
    """Compare with transformers' logits of prompt and tokens."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(dim=-1)
    assert [one.token_id for one in logprobs] == tokens
    for row, one in zip(expected, logprobs, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
        assert len(one.top_ids) == count
        assert one.top_logprobs == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)
        assert one.top_logprobs == pytest.approx(row[one.top_ids].tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_num_seqs": 4, "max_num_batched_tokens": 7},
        {"async_scheduling": True},
        {"async_scheduling": True, "few_blocks": True},
        pytest.param({"device": "cuda", "async_scheduling": True}, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_logprobs_equal_transformers(path: Path, model: Any, config: dict[str, Any]) -> None:
    settings = dict(config)
    if settings.pop("few_blocks", False):
        settings |= {"max_model_len": 128, "kv_cache_memory_bytes": 10 * kv_block_bytes(path, 128)}
    engine = make_engine(path, **settings)
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, SETTINGS, strict=True)):
        assert engine.submit(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling)) is None
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    logprobs: list[list[TokenLogprobs]] = [[] for _ in PROMPTS]
    while engine.has_work():
        step = engine.step()
        assert step.logprobs.keys() <= set(step.request_ids)
        for request_id, token_id in zip(step.request_ids, step.token_ids, strict=True):
            tokens[int(request_id)].append(token_id)
        for request_id, one in step.logprobs.items():
            logprobs[int(request_id)].append(one)
    assert logprobs[2] == []
    for index in (0, 1, 3, 4):
        check(model, PROMPTS[index], tokens[index], logprobs[index], SETTINGS[index].logprobs or 0)

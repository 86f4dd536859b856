"""Log probabilities of prompts equal those of transformers, however the prompts are cut up, cached or preempted."""

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
from flyball_runtime.engine.engine import Engine
from flyball_runtime.model import prompt_logprobs

PROMPTS = [*random_prompts([1, 2, 17, 40, 100]), random_prompts([100])[0][:64]]
BASE = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0)
SETTINGS = [structs.replace(BASE, prompt_logprobs=count) for count in (3, 0, None, 20, 5, 1)]

FAST = ["qwen3 windows", "mistral"]
SLOW = [pytest.param(arch, marks=pytest.mark.slow) for arch in ALL_ARCHITECTURES if arch not in FAST]


@pytest.fixture(scope="module", params=[*FAST, *SLOW])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def run(engine: Engine) -> tuple[list[list[TokenLogprobs]], int]:
    """Submit all prompts at once; return what comes of each, and the number of preemptions."""
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, SETTINGS, strict=True)):
        assert engine.submit(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling)) is None
    scores: list[list[TokenLogprobs]] = [[] for _ in PROMPTS]
    started, num_preemptions = set(), 0
    while engine.has_work():
        step = engine.step()
        assert not started & step.prompt_logprobs.keys(), "all of them come with the first token"
        for request_id, some in step.prompt_logprobs.items():
            scores[int(request_id)] += some
        started |= set(step.request_ids)
        num_preemptions += step.stats.num_preemptions
    return scores, num_preemptions


@torch.inference_mode()
def check(model: Any, prompt: list[int], scores: list[TokenLogprobs], count: int | None) -> None:
    if count is None:
        assert scores == []
        return
    expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(dim=-1)
    assert [one.token_id for one in scores] == prompt[1:]
    for row, one in zip(expected, scores, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
        assert int((row > one.logprob + 1e-4).sum()) < one.rank <= 1 + int((row > one.logprob - 1e-4).sum())
        assert len(one.top_ids) == count
        assert one.top_logprobs == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)
        assert one.top_logprobs == pytest.approx(row[one.top_ids].tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_num_seqs": 4, "max_num_batched_tokens": 7},
        {"max_num_seqs": 4, "max_num_batched_tokens": 30, "async_scheduling": True, "few_blocks": True},
        pytest.param({"device": "cuda", "async_scheduling": True}, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_they_equal_transformers(
    path: Path, model: Any, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time all prompts are in the prefix cache. With few blocks, some of them are preempted."""
    monkeypatch.setattr(prompt_logprobs, "SLICE_BYTES", 4 * 384 * 9)
    settings = dict(config)
    if few_blocks := settings.pop("few_blocks", False):
        settings |= {"max_model_len": 128, "kv_cache_memory_bytes": 9 * kv_block_bytes(path, 128)}
    engine = make_engine(path, **settings)
    for _ in range(2):
        scores, num_preemptions = run(engine)
        assert bool(num_preemptions) == few_blocks
        for index, prompt in enumerate(PROMPTS):
            check(model, prompt, scores[index], SETTINGS[index].prompt_logprobs)


def test_a_prompt_that_is_scored_already_is_not_scored_again(path: Path) -> None:
    """A preempted request may use the prefix cache for what it has told, and computes the rest."""
    engine = make_engine(path, max_num_batched_tokens=32, max_num_seqs=4)
    prompt = random_prompts([100])[0]
    engine.submit(Request(request_id="a", prompt_token_ids=prompt, sampling=structs.replace(BASE, prompt_logprobs=0)))
    first = engine.step().prompt_logprobs["a"]
    assert len(first) == 32
    seq = engine._sequences["a"]
    engine.scheduler._waiting.push(seq)
    engine.scheduler._seats.stop(seq)
    seq.status = type(seq.status).WAITING
    seq.num_preemptions += 1
    rest: list[TokenLogprobs] = []
    num_computed = 0
    while not seq.num_output_tokens:
        step = engine.step()
        rest += step.prompt_logprobs.get("a", [])
        num_computed += step.stats.num_tokens
    assert [one.token_id for one in first + rest] == prompt[1:]
    assert num_computed == 100 - 32

"""Pooled hidden states equal those of transformers, however prompts are cut up, cached or preempted, and beside others."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints import make_checkpoint
from engines import GREEDY, Reference, kv_block_bytes, make_engine, random_prompts
from flyball_runtime.core.pooling import Pooling
from flyball_runtime.core.request import Failed, Finished, Request
from flyball_runtime.engine.engine import Engine

PROMPTS = [*random_prompts([1, 2, 17, 40, 100, 33]), random_prompts([100])[0][:64]]
POOLINGS: list[Pooling | None] = ["last", "mean", None, "last", "mean", None, "last"]
MODELS = ["qwen3 windows", "llama3"]


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
@torch.inference_mode()
def expected(path: Path) -> list[Any]:
    """For each prompt its vector, or for one that is not pooled, its greedy tokens."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokens = Reference(path).generate(PROMPTS)
    found: list[Any] = []
    for prompt, pooling, output in zip(PROMPTS, POOLINGS, tokens, strict=True):
        hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
        found.append(output if pooling is None else (hidden[-1] if pooling == "last" else hidden.mean(dim=0)).numpy())
    return found


def submit(engine: Engine, prompts: list[list[int]], poolings: list[Pooling | None]) -> None:
    for index, (prompt, pooling) in enumerate(zip(prompts, poolings, strict=True)):
        request = Request(request_id=str(index), prompt_token_ids=prompt, sampling=GREEDY, pooling=pooling)
        assert engine.submit(request) is None


def run(engine: Engine) -> tuple[dict[int, list[int]], dict[int, Finished | Failed], int]:
    """Return tokens and endings by request, and the number of preemptions."""
    tokens: dict[int, list[int]] = {}
    endings: dict[int, Finished | Failed] = {}
    num_preemptions = 0
    while engine.has_work():
        step = engine.step()
        for request_id, token_id in zip(step.request_ids, step.token_ids, strict=True):
            tokens.setdefault(int(request_id), []).append(token_id)
        for ending in step.endings:
            assert int(ending.request_id) not in endings
            endings[int(ending.request_id)] = ending
        num_preemptions += step.stats.num_preemptions
    return tokens, endings, num_preemptions


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_num_seqs": 4, "max_num_batched_tokens": 7},
        {"max_num_seqs": 4, "max_num_batched_tokens": 30, "async_scheduling": True},
        pytest.param({"device": "cuda", "async_scheduling": True}, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_they_equal_transformers(path: Path, expected: list[Any], config: dict[str, Any]) -> None:
    """The second time all prompts are in the prefix cache."""
    engine = make_engine(path, **config)
    for _ in range(2):
        submit(engine, PROMPTS, POOLINGS)
        tokens, endings, _ = run(engine)
        for index, (wanted, pooling) in enumerate(zip(expected, POOLINGS, strict=True)):
            ending = endings[index]
            assert isinstance(ending, Finished)
            if pooling is None:
                assert tokens[index] == wanted and ending.pooled == b""
            else:
                assert (index not in tokens, ending.reason, ending.num_output_tokens) == (True, "stop", 0)
                assert np.frombuffer(ending.pooled, np.float32) == pytest.approx(wanted, abs=1e-4)
    assert engine.kv_cache.counts().used == 0


@pytest.mark.parametrize("path", ["llama3"], indirect=True)
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_preempted_prompt_is_pooled_as_if_it_had_not_been(path: Path, pooling: Pooling) -> None:
    """Two others grow while the prompt is computed in small chunks, and there are 9 blocks."""
    prompts, poolings = random_prompts([4, 4, 105]), [None, None, pooling]
    vectors = []
    for num_blocks in (9, 40):
        memory = num_blocks * kv_block_bytes(path, 128)
        engine = make_engine(path, max_model_len=128, max_num_batched_tokens=8, kv_cache_memory_bytes=memory)
        submit(engine, prompts, poolings)
        _, endings, num_preemptions = run(engine)
        assert bool(num_preemptions) == (num_blocks == 9)
        ending = endings[2]
        assert isinstance(ending, Finished)
        vectors.append(np.frombuffer(ending.pooled, np.float32))
    assert vectors[0] == pytest.approx(vectors[1], abs=1e-5)


def test_the_prefix_cache_serves_the_last_token_and_not_the_mean(path: Path) -> None:
    engine, prompt = make_engine(path), random_prompts([100])[0]
    hits = []
    for pooling in ("mean", "mean", "last"):
        submit(engine, [prompt], [pooling])
        step = engine.step()
        hits.append((step.stats.num_prefix_queried_tokens, step.stats.num_prefix_hit_tokens))
    assert hits == [(0, 0), (0, 0), (100, 96)]


def test_states_that_are_not_finite_fail_their_request_alone(path: Path) -> None:
    engine = make_engine(path)
    weight = engine._executor._model.embedding  # type: ignore[attr-defined]
    good, bad = random_prompts([40, 40])
    bad = [383 if index == 20 else token_id for index, token_id in enumerate(bad)]
    good = [5 if token_id == 383 else token_id for token_id in good]
    weight[383] = float("nan")
    submit(engine, [bad, good, bad, good], ["last", "mean", "mean", None])
    tokens, endings, _ = run(engine)
    kinds = [type(endings[index]) for index in range(4)]
    assert kinds == [Failed, Finished, Failed, Finished]
    failed = endings[0]
    assert isinstance(failed, Failed) and (failed.status, failed.code) == (500, "invalid_hidden_states")
    assert len(tokens[3]) > 0
    submit(engine, [bad], ["last"])
    assert engine.step().stats.num_prefix_hit_tokens == 0, "its blocks have left the prefix cache"


def test_an_aborted_prompt_leaves_nothing_for_the_next_in_its_row(path: Path, expected: list[Any]) -> None:
    engine = make_engine(path, max_num_seqs=1, max_num_batched_tokens=16)
    submit(engine, [random_prompts([100], seed=1)[0]], ["mean"])
    engine.step()
    assert engine.abort("0") is not None
    submit(engine, [PROMPTS[4]], ["mean"])
    _, endings, _ = run(engine)
    assert isinstance(endings[0], Finished)
    assert np.frombuffer(endings[0].pooled, np.float32) == pytest.approx(expected[4], abs=1e-4)

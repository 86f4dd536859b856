"""Tokens that a smaller model drafts, in the blocks of the model that verifies them."""

import random
from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from engines import Reference, generate, make_engine, random_prompts
from flyball_protocol import LimitsChange, LimitsStatus, LimitsUpdate
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.request import Request
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.core.speculation import SpeculativeConfig
from flyball_runtime.engine.engine import Engine

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=30, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
TIGHT = {"max_num_seqs": 4, "max_num_batched_tokens": 23, "max_model_len": 144}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("served"), "llama3")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another architecture and other weights, with the same vocabulary."""
    return make_checkpoint(tmp_path_factory.mktemp("draft"), "qwen3", seed=3)


def speculating(path: Path, draft: Path, num: int = 4, **settings: float) -> Engine:
    engine = make_engine(
        path, speculative_config=SpeculativeConfig(num_speculative_tokens=num, model=str(draft)), **settings
    )
    engine.governor.tokens_per_s = lambda *_: None  # type: ignore[method-assign]  pay whatever drafts cost
    return engine


def counts(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> tuple[int, int, int]:
    """Return how many tokens were drafted, how many of them were accepted, and how many sequences were preempted."""
    for index, prompt in enumerate(prompts):
        engine.submit(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    drafted = accepted = preempted = 0
    while engine.has_work():
        stats = engine.step().stats
        assert stats is not None
        drafted += stats.num_draft_tokens
        accepted += stats.num_accepted_tokens
        preempted += stats.num_preemptions
    return drafted, accepted, preempted


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_outputs_are_those_of_the_served_model(path: Path, other: Path, sampling: SamplingParams) -> None:
    prompts = random_prompts([1, 5, 17, 40, 70])
    expected = generate(make_engine(path), prompts, sampling)
    engine = speculating(path, other, **TIGHT)
    assert generate(engine, prompts, sampling) == expected
    assert generate(engine, prompts, sampling) == expected, "from the prefix cache"


def test_greedy_outputs_are_those_of_transformers(path: Path) -> None:
    prompts = random_prompts([3, 40])
    assert generate(speculating(path, path), prompts) == Reference(path).generate(prompts)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num", [1, 5])
def test_a_model_agrees_with_itself(path: Path, sampling: SamplingParams, num: int) -> None:
    """Through chunks, prefix hits, preemptions and drafts that are cut short: any gap in its keys would show."""
    kv_bytes = 2 * 10 * make_engine(path).info.kv_block_bytes
    engine = speculating(path, path, num, kv_cache_memory_bytes=kv_bytes, **TIGHT)
    for _ in range(2):
        drafted, accepted, preempted = counts(engine, random_prompts([1, 5, 17, 40, 70]), sampling)
        assert drafted == accepted > 50
    assert preempted > 0


def test_it_agrees_with_itself_while_memory_is_given_back_and_taken_again(path: Path) -> None:
    rng = random.Random(0)
    engine = speculating(
        path,
        path,
        kv_cache_memory_bytes=2 * 40 * make_engine(path).info.kv_block_bytes,
        kv_drain_timeout_s=0.0,
        **TIGHT,
    )
    for index, prompt in enumerate(random_prompts([rng.randrange(1, 90) for _ in range(20)])):
        engine.submit(Request(request_id=str(index), prompt_token_ids=prompt, sampling=GREEDY))
    drafted = accepted = revision = 0
    while engine.has_work():
        if rng.random() < 0.3:
            revision += 1
            change = LimitsChange(kv_cache_fraction=rng.uniform(0.3, 1.0))
            status = engine.post_limits(LimitsUpdate(revision=revision, limits=change)).status
            assert status in (LimitsStatus.APPLIED, LimitsStatus.DEFERRED)
        engine.tick()
        stats = engine.step().stats
        assert stats is not None
        drafted += stats.num_draft_tokens
        accepted += stats.num_accepted_tokens
    assert drafted == accepted > 50
    assert revision > 10


def test_its_keys_count_towards_the_kv_cache(path: Path, other: Path) -> None:
    alone, draft = make_engine(path).info.kv_block_bytes, make_engine(other).info.kv_block_bytes
    assert speculating(path, other).info.kv_block_bytes == alone + draft


@pytest.mark.parametrize(
    ("arch", "overrides", "named"),
    [
        ("qwen3", {"vocab_size": 400}, "has a vocabulary of 400 tokens, and the served model one of 384"),
        ("qwen3", {"max_position_embeddings": 128}, "takes 128 tokens, and --max-model-len is 256"),
        ("mistral", {}, "has sliding windows"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    path: Path, tmp_path: Path, arch: str, overrides: dict[str, int], named: str
) -> None:
    draft = make_checkpoint(tmp_path, arch, **overrides)
    with pytest.raises(ConfigError, match=named):
        speculating(path, draft)


def test_a_model_that_is_not_there_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        speculating(path, tmp_path / "none")

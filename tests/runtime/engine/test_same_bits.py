"""A token has the same bits however the work is cut up: log probabilities in bf16 are equal, and not merely close.

The C++ ops promise it, linear layers included; torch's layers, which run on some CPUs, do not.
"""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from adapters import ATTENTION, MLP, make_adapter
from checkpoints import make_checkpoint
from engines import INT8_KV, Oracle, generate, have_drafted, kv_block_bytes, make_engine, random_prompts
from flyball_protocol import LimitsChange, LimitsUpdate
from flyball_runtime.core.lora import LoraConfig, LoraModule
from flyball_runtime.core.request import Request
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.core.speculation import SpeculativeConfig
from flyball_runtime.engine.engine import Engine

SAMPLING = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
PROMPTS = random_prompts([1, 2, 17, 40, 150, 600])
GROWING = random_prompts([1, 5, 16, 17, 40, 100])
"""Of which more fit into ten blocks than can grow there."""
MAX_LEN = 640
"""Longer than a run of keys, whose sums attention adds up by themselves."""

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama3": ("llama3", {"head_dim": 64}, {}),
    "one query head for each KV head": ("llama2", {}, {}),
    "windows and soft caps": ("gemma2", {"sliding_window": 50}, {}),
    "windows, sinks and experts": ("gpt-oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {}),
    "keys and values in int8": ("qwen3", {"head_dim": 64}, INT8_KV),
    "weights in int8": ("qwen3", {}, {"quantization": "int8"}),
    "weights alone in int8": ("qwen2", {}, {"quantization": "w8a16"}),
    "weights in int4": ("mistral", {"head_dim": 32}, {"quantization": "int4"}),
    "weights in int4, inputs in int8": ("mistral", {"head_dim": 32}, {"quantization": "w4a8"}),
}

CUTS: dict[str, dict[str, Any]] = {
    "together": {},
    "a token at a time": {"max_num_seqs": 1, "max_num_batched_tokens": 1},
    "chunks of 3": {"max_num_seqs": 3, "max_num_batched_tokens": 3},
    "chunks of 50": {"max_num_seqs": 4, "max_num_batched_tokens": 50, "async_scheduling": True},
    "chunks of 7, planned ahead": {"max_num_seqs": 4, "max_num_batched_tokens": 7, "async_scheduling": True},
}


@pytest.fixture(scope="module", params=CASES)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    arch, overrides, settings = CASES[request.param]
    path = make_checkpoint(tmp_path_factory.mktemp("model"), arch, max_position_embeddings=MAX_LEN, **overrides)

    def make(num_blocks: int | None = None, **more: Any) -> Engine:
        if num_blocks is not None:
            dtype = "int8" if settings is INT8_KV else "bfloat16"
            length = more.get("max_model_len", MAX_LEN)
            more["kv_cache_memory_bytes"] = num_blocks * kv_block_bytes(path, length, dtype)
        return make_engine(
            path, dtype="bfloat16", kernel_backend="cpp", **({"max_model_len": MAX_LEN} | settings | more)
        )

    return make


@pytest.fixture(scope="module")
def expected(make: Any) -> list[list[tuple[int, float]]]:
    engine = make(enable_prefix_caching=False)
    return [run(engine, [prompt])[0] for prompt in PROMPTS]


def run(
    engine: Engine,
    prompts: list[list[int]],
    shake: random.Random | None = None,
    counts: Counter[str] | None = None,
    adapters: list[int | None] | None = None,
) -> list[list[tuple[int, float]]]:
    """Return the tokens of each prompt with their log probabilities.

    Args:
        shake: limits change all the time.
        counts: gets what has happened.
        adapters: number of the LoRA adapter of each prompt.
    """
    results: list[list[tuple[int, float]]] = [[] for _ in prompts]
    for index, (prompt, adapter) in enumerate(zip(prompts, adapters or [None] * len(prompts), strict=True)):
        request = Request(request_id=str(index), prompt_token_ids=prompt, sampling=SAMPLING, adapter=adapter)
        assert engine.submit(request) is None
    num_steps = 0
    while engine.has_work():
        num_steps += 1
        if shake is not None and num_steps % 5 == 0:
            change = LimitsChange(
                kv_cache_fraction=shake.uniform(engine.scheduler.envelope.min_kv_cache_fraction, 1.0),
                max_num_batched_tokens=shake.choice((8, 9, 30, 200)),
                max_num_seqs=shake.choice((2, 5, 8)),
            )
            engine.post_limits(LimitsUpdate(revision=num_steps, limits=change))
        engine.tick()
        step = engine.step()
        if counts is not None:
            counts["preemptions"] += step.stats.num_preemptions
            counts["hits"] += step.stats.num_prefix_hit_tokens
        for request_id, one in step.logprobs.items():
            results[int(request_id)].append((one.token_id, one.logprob))
    return results


@pytest.mark.parametrize("settings", CUTS.values(), ids=CUTS)
def test_log_probabilities_are_the_same_bits(make: Any, expected: Any, settings: dict[str, Any]) -> None:
    assert run(make(**settings), PROMPTS) == expected


@pytest.mark.parametrize(
    "settings", [{"enable_prefix_caching": False}, {"max_num_batched_tokens": 21}, {"swap_space_bytes": 2**22}], ids=str
)
def test_preempted(make: Any, settings: dict[str, Any]) -> None:
    counts: Counter[str] = Counter()
    engine = make(num_blocks=10, max_model_len=144, **settings)
    assert run(engine, GROWING, counts=counts) == run(make(enable_prefix_caching=False), GROWING)
    assert counts["preemptions"] > 0


def test_with_prefixes_that_other_requests_have_computed(make: Any, expected: Any) -> None:
    """What a decode has written is read as a prompt, and the other way round."""
    engine = make(max_num_batched_tokens=40)
    assert run(engine, PROMPTS) == expected
    longer = [prompt + [token for token, _ in tokens[:17]] for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    fresh = make(enable_prefix_caching=False, max_num_batched_tokens=64)
    counts: Counter[str] = Counter()
    assert run(engine, longer, counts=counts) == run(fresh, longer)
    assert counts["hits"] > sum(map(len, PROMPTS)) - 16 * len(PROMPTS), "blocks with outputs are among them"


def test_with_drafts(make: Any, expected: Any) -> None:
    """Which are verified with the token before them. Requests that ask for log probabilities get none."""
    tokens = [[token for token, _ in one] for one in expected]
    engine = make(speculative_config=SpeculativeConfig(num_speculative_tokens=5))
    oracle = Oracle(5, [prompt + output for prompt, output in zip(PROMPTS, tokens, strict=True)])
    have_drafted(engine, oracle)
    assert generate(engine, PROMPTS, structs.replace(SAMPLING, logprobs=None)) == tokens
    assert 0 < oracle.num_accepted < oracle.num_drafts


def test_while_limits_change(make: Any, expected: Any) -> None:
    for seed in range(3):
        assert run(make(num_blocks=80, swap_space_bytes=2**22), PROMPTS, random.Random(seed)) == expected


def test_with_other_numbers_of_threads(make: Any, expected: Any) -> None:
    threads = torch.get_num_threads()
    try:
        for num in (1, 3):
            torch.set_num_threads(num)
            assert run(make(), PROMPTS) == expected
    finally:
        torch.set_num_threads(threads)


def test_with_lora_adapters_in_a_batch(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3")
    paths = [
        make_adapter(tmp_path / str(rank), base, seed=rank, rank=rank, targets=(*ATTENTION, *MLP)) for rank in (3, 8)
    ]
    lora = LoraConfig(max_loras=2, modules=tuple(LoraModule(name=path.name, path=str(path)) for path in paths))
    numbers: list[int | None] = [None, 0, 1]

    def make(**settings: Any) -> Engine:
        return make_engine(base, dtype="bfloat16", kernel_backend="cpp", lora=lora, **settings)

    alone = make(enable_prefix_caching=False)
    expected = [run(alone, [prompt], adapters=[number])[0] for prompt in GROWING for number in numbers]
    assert expected[0] != expected[1] != expected[2]
    prompts, adapters = [prompt for prompt in GROWING for _ in numbers], numbers * len(GROWING)
    for settings in ({}, {"max_num_seqs": 3, "max_num_batched_tokens": 3}, {"max_num_batched_tokens": 21}):
        assert run(make(**settings), prompts, adapters=adapters) == expected

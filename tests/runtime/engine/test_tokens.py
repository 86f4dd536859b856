"""Greedy tokens equal those of transformers, however the scheduler cuts the work up; on a GPU too (``-m gpu``)."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import ALL_ARCHITECTURES, ARCHITECTURES, make_checkpoint
from engines import (
    FP8_KV,
    GREEDY,
    INT8_KV,
    Oracle,
    Reference,
    generate,
    have_drafted,
    kv_block_bytes,
    make_engine,
    random_prompts,
    shake,
    tight,
)
from flyball_runtime.core.kv_layout import KVGroup, KVLayout
from flyball_runtime.core.model_config import ModelConfig
from flyball_runtime.core.request import Request
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.core.speculation import SpeculativeConfig
from flyball_runtime.engine.engine import Engine
from flyball_runtime.scheduler.drafts import FIRST_ACCEPTANCE

LENGTHS = [1, 5, 16, 17, 40, 100]
ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
INT8, FP8 = "int8 kv, ", "fp8 kv, "
"""Of an architecture whose keys and values are rounded, here and in the reference."""
FAST = [*ARCHITECTURES, INT8 + "qwen3", INT8 + "gemma2"]
SLOW = [arch for arch in ALL_ARCHITECTURES if arch not in ARCHITECTURES]
SLOW += [FP8 + "gemma2"]
SLOW += [INT8 + arch for arch in ("llama2", "qwen3 windows", "gemma3", "gpt-oss", "gpt-neox")]
ALL = [*FAST, *(pytest.param(arch, marks=pytest.mark.slow) for arch in SLOW)]


@dataclass(frozen=True)
class Case:
    path: Path
    prompts: list[list[int]]
    expected: list[list[int]]
    kv: str | None = None
    device: str = "cpu"

    def engine(self, **settings: Any) -> Engine:
        kv = {None: {}, "int8": INT8_KV, "fp8": FP8_KV}[self.kv]
        if self.kv == "fp8" and self.device == "cpu":
            kv = kv | {"kernel_backend": "torch"}
        return make_engine(self.path, device=self.device, **(kv | settings))


@pytest.fixture(scope="module", params=ALL)
def cpu_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    kind, _, arch = request.param.rpartition(" kv, ")
    kv = kind or None
    path = make_checkpoint(tmp_path_factory.mktemp("model"), arch)
    prompts = random_prompts(LENGTHS)
    return Case(path, prompts, Reference(path, kv=kv).generate(prompts), kv)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def case(request: pytest.FixtureRequest, cpu_case: Case) -> Case:
    return replace(cpu_case, device=request.param)


def test_alone(case: Case) -> None:
    engine = case.engine(enable_prefix_caching=False)
    assert [generate(engine, [prompt])[0] for prompt in case.prompts] == case.expected


def test_batched(case: Case) -> None:
    assert generate(case.engine(), case.prompts) == case.expected


@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_chunked(case: Case, chunk: int) -> None:
    engine = case.engine(max_num_seqs=min(4, chunk), max_num_batched_tokens=chunk)
    assert generate(engine, case.prompts) == case.expected


def test_prefix_cached(case: Case) -> None:
    engine = case.engine()
    generate(engine, case.prompts)
    hits = 0
    for index, prompt in enumerate(case.prompts):
        engine.submit(Request(request_id=str(index), prompt_token_ids=prompt, sampling=GREEDY))
    outputs: dict[str, list[int]] = {}
    while engine.has_work():
        output = engine.step()
        assert output.stats is not None
        hits += output.stats.num_prefix_hit_tokens
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            outputs.setdefault(request_id, []).append(token_id)
    assert [outputs[str(index)] for index in range(len(case.prompts))] == case.expected
    # whole blocks of 16 before each prompt's last token: 16 of 17, 32 of 40, 96 of 100
    assert hits == 16 + 32 + 96


@pytest.mark.parametrize("settings", [{"async_scheduling": True, "max_num_batched_tokens": 30}, {"max_num_seqs": 2}])
def test_forked(case: Case, settings: dict[str, int]) -> None:
    """Three requests of each prompt share its blocks, without a prefix cache."""
    engine = case.engine(enable_prefix_caching=False, **settings)
    prompts = [prompt for prompt in case.prompts for _ in range(3)]
    expected = [output for output in case.expected for _ in range(3)]
    assert generate(engine, prompts, forked=True) == expected


def test_preempted(case: Case) -> None:
    """Ten blocks for six growing sequences: some must lose theirs and be computed again."""
    engine = case.engine(max_model_len=144, kv_cache_memory_bytes=_bytes_of_blocks(case, 10))
    preempted = 0
    outputs: dict[str, list[int]] = {}
    for index, prompt in enumerate(case.prompts):
        engine.submit(Request(request_id=str(index), prompt_token_ids=prompt, sampling=GREEDY))
    while engine.has_work():
        output = engine.step()
        assert output.stats is not None
        preempted += output.stats.num_preemptions
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            outputs.setdefault(request_id, []).append(token_id)
    assert preempted > 0
    assert [outputs[str(index)] for index in range(len(case.prompts))] == case.expected


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_seqs": 4, "max_num_batched_tokens": 7}, {"max_num_seqs": 1}],
    ids=["whole", "chunked", "alone"],
)
def test_planned_ahead(case: Case, settings: dict[str, int]) -> None:
    assert generate(case.engine(async_scheduling=True, **settings), case.prompts) == case.expected


def test_planned_ahead_and_preempted(case: Case) -> None:
    kv_bytes = _bytes_of_blocks(case, 10)
    engine = case.engine(async_scheduling=True, max_model_len=144, kv_cache_memory_bytes=kv_bytes)
    assert generate(engine, case.prompts) == case.expected


@pytest.mark.parametrize("num_steps", [2, 16])
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_seqs": 4, "max_num_batched_tokens": 7}, {"max_num_seqs": 1}],
    ids=["whole", "chunked", "alone"],
)
def test_several_tokens_at_once(case: Case, settings: dict[str, int], num_steps: int) -> None:
    assert generate(case.engine(num_scheduler_steps=num_steps, **settings), case.prompts) == case.expected


def test_several_tokens_at_once_and_preempted(case: Case) -> None:
    kv_bytes = _bytes_of_blocks(case, 10)
    engine = case.engine(num_scheduler_steps=8, max_model_len=144, kv_cache_memory_bytes=kv_bytes)
    assert generate(engine, case.prompts) == case.expected


def test_several_tokens_at_once_and_sampled(case: Case) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01, top_k=40, seed=11, max_tokens=24)
    expected = generate(case.engine(), case.prompts, sampling)
    assert generate(case.engine(num_scheduler_steps=8), case.prompts, sampling) == expected


def test_speculated(case: Case) -> None:
    """Beside chunks, prefix hits and preemptions, with drafts across the edges of blocks."""
    engine = case.engine(
        speculative_config=SpeculativeConfig(num_speculative_tokens=7),
        max_num_batched_tokens=40,
        max_model_len=144,
        kv_cache_memory_bytes=_bytes_of_blocks(case, 12),
    )
    oracle = Oracle(7, [prompt + output for prompt, output in zip(case.prompts, case.expected, strict=True)])
    have_drafted(engine, oracle)
    assert generate(engine, case.prompts) == case.expected
    assert generate(engine, case.prompts) == case.expected
    assert 0 < oracle.num_accepted < oracle.num_drafts


def test_speculated_and_alone(case: Case) -> None:
    prompt, expected = max(zip(case.prompts, case.expected, strict=True), key=lambda one: len(one[1]))
    engine = case.engine(speculative_config=SpeculativeConfig(num_speculative_tokens=5))
    have_drafted(engine, Oracle(5, [prompt + expected]))
    engine.submit(Request(request_id="a", prompt_token_ids=prompt, sampling=GREEDY))
    steps = []
    while engine.has_work():
        steps.append(engine.step())
    assert [token for step in steps for token in step.token_ids] == expected
    assert len(steps) < len(expected)
    stats = [step.stats for step in steps]
    assert sum(one.num_draft_tokens for one in stats) >= sum(one.num_accepted_tokens for one in stats)
    num_tokens = sum(one.num_accepted_tokens + one.num_drafts for one in stats)
    assert num_tokens == sum(len(step.token_ids) for step in steps if step.stats.num_drafts)
    assert all(one.num_decodes == 1 and one.num_prefill_tokens == 0 for one in stats if one.num_drafts)


def test_speculated_and_sampled(case: Case) -> None:
    """A seed gives the same tokens, whether they are verified or come one at a time."""
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=24)
    outputs = generate(case.engine(), case.prompts, sampling)
    engine = case.engine(speculative_config=SpeculativeConfig(num_speculative_tokens=4))
    oracle = Oracle(4, [prompt + output for prompt, output in zip(case.prompts, outputs, strict=True)])
    have_drafted(engine, oracle)
    assert generate(engine, case.prompts, sampling) == outputs
    assert 0 < oracle.num_accepted < oracle.num_drafts


def test_drafts_from_the_sequence_itself(case: Case) -> None:
    """With two tokens to choose from, an output soon repeats itself."""
    sampling = SamplingParams(temperature=1.0, top_k=2, ignore_eos=True, seed=3, max_tokens=50)
    prompts = [prompt[:30] for prompt in case.prompts]
    engine = case.engine(speculative_config=SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_min=1))
    engine.governor.tokens_per_s = lambda *_: None
    assert generate(engine, prompts, sampling) == generate(case.engine(), prompts, sampling)
    assert engine.scheduler._drafter is not None and engine.scheduler._drafter.acceptance != FIRST_ACCEPTANCE


@pytest.mark.parametrize("ahead", [False, True])
def test_all_at_once(case: Case, ahead: bool) -> None:
    """Chunks, prefix hits, forks, blocks in host memory, preemptions, a hundred resizes, drafts and cancellations."""
    rng = random.Random(ahead)
    engine = case.engine(**tight(_bytes_of_blocks(case, 1), ahead))
    if not ahead:
        known = [prompt + output for prompt, output in zip(case.prompts, case.expected, strict=True)]
        have_drafted(engine, Oracle(5, known))
    shake(engine, _requests(case, rng), case.expected, rng)


def test_all_at_once_with_several_tokens_at_once(case: Case) -> None:
    rng = random.Random(2)
    settings = tight(_bytes_of_blocks(case, 1), True) | {"async_scheduling": False, "num_scheduler_steps": 5}
    shake(case.engine(**settings), _requests(case, rng), case.expected, rng)


def _requests(case: Case, rng: random.Random) -> list[Request]:
    """Return each prompt six times, half of the time as two choices, of which one in three is to be cancelled."""
    requests = []
    for number in rng.sample(range(6 * len(case.prompts)), 6 * len(case.prompts)):
        at, is_forked = number % len(case.prompts), rng.random() < 0.5
        for choice in range(1 + is_forked):
            name = f"{at} of {number}.{choice}{' cancelled' if rng.random() < 1 / 3 else ''}"
            group = str(number) if is_forked else None
            prompt = case.prompts[at]
            requests.append(Request(request_id=name, prompt_token_ids=prompt, sampling=GREEDY, fork_group=group))
    return requests


def _bytes_of_blocks(case: Case, num_blocks: int) -> int:
    return num_blocks * kv_block_bytes(case.path, kv_dtype=case.kv or "float32")


@pytest.mark.parametrize(("architecture", "num_blocks"), [("mistral", 8), ("qwen3 windows", 28 + 2 * 8)])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_prompt_longer_than_the_blocks_of_a_window(
    tmp_path: Path, architecture: str, num_blocks: int, ahead: bool
) -> None:
    """A window of 64 tokens and steps of 32: 8 blocks of 16 tokens hold no more than 128 of its 400 at a time."""
    path = make_checkpoint(tmp_path, architecture, sliding_window=64)
    prompts = random_prompts([400, 230, 300])
    engine = make_engine(
        path,
        max_model_len=440,
        max_num_batched_tokens=32,
        kv_cache_memory_bytes=num_blocks * kv_block_bytes(path, 440) // len(groups(path)),
        async_scheduling=ahead,
    )
    assert engine.info.num_kv_blocks == num_blocks
    assert generate(engine, prompts) == Reference(path).generate(prompts)


def groups(path: Path) -> tuple[KVGroup, ...]:
    return KVLayout.of(ModelConfig.from_dir(path).sliding_windows, 440).groups

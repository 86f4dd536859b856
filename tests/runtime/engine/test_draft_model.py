"""Tokens that a smaller model drafts, in the blocks of the model that verifies them."""

import json
import random
import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint
from engines import INT8_KV, Reference, generate, make_engine, random_prompts
from flyball_protocol import LimitsChange, LimitsStatus, LimitsUpdate
from flyball_runtime.core.beam_search import BeamSearch
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.request import Request
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.core.speculation import SpeculativeConfig
from flyball_runtime.engine.engine import Engine
from flyball_runtime.engine.start_up import WarmUp
from flyball_runtime.model.loader import describe_model

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


@pytest.fixture(scope="module")
def similar(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served model with some noise in its weights: it is right more often than not."""
    draft = shutil.copytree(path, tmp_path_factory.mktemp("similar") / "draft")
    generator = torch.Generator().manual_seed(0)
    file = draft / "model.safetensors"
    tensors = load_file(file)
    for name, one in tensors.items():
        if "norm" not in name:
            tensors[name] = one + 0.2 * one.std() * torch.randn(one.shape, generator=generator)
    save_file(tensors, file, metadata={"format": "pt"})
    return draft


def speculating(path: Path, draft: Path, num: int = 4, **settings: float) -> Engine:
    engine = make_engine(
        path, speculative_config=SpeculativeConfig(num_speculative_tokens=num, model=str(draft)), **settings
    )
    engine.governor.tokens_per_s = lambda *_: None  # type: ignore[method-assign]  pay whatever drafts cost
    return engine


class Counts(NamedTuple):
    """Tokens that were drafted and accepted, sequences that were preempted, and blocks that came back from host memory."""

    drafted: int
    accepted: int
    preempted: int
    back: int


def counts(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> Counts:
    """Run the prompts to their ends, all at once, and return what happened."""
    for index, prompt in enumerate(prompts):
        engine.submit(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    drafted = accepted = preempted = back = 0
    while engine.has_work():
        stats = engine.step().stats
        assert stats is not None
        drafted += stats.num_draft_tokens
        accepted += stats.num_accepted_tokens
        preempted += stats.num_preemptions
        back += stats.num_swapped_in_blocks
    return Counts(drafted, accepted, preempted, back)


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
    runs = [counts(engine, random_prompts([1, 5, 17, 40, 70]), sampling) for _ in range(2)]
    assert all(one.drafted == one.accepted > 50 for one in runs)
    assert runs[-1].preempted > 0


@pytest.mark.parametrize("kv", [{}, INT8_KV], ids=["auto", "int8"])
def test_it_agrees_with_itself_on_prefixes_from_host_memory(path: Path, kv: dict[str, str]) -> None:
    """A block goes there and comes back with the keys of both models in it."""
    block_bytes = 2 * make_engine(path, **kv).info.kv_block_bytes
    memory = {"kv_cache_memory_bytes": 10 * block_bytes, "swap_space_bytes": 40 * block_bytes}
    engine = speculating(path, path, **memory, **TIGHT, **kv)
    runs = [counts(engine, random_prompts([70, 75, 80, 85]), GREEDY) for _ in range(2)]
    assert all(one.drafted == one.accepted > 50 for one in runs)
    assert sum(one.back for one in runs) > 0


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


def test_it_agrees_with_itself_beside_requests_without_drafts_and_after_aborts(path: Path) -> None:
    """They share their prompts, so that most are found in the prefix cache: computed with drafts, without, or in part."""
    rng = random.Random(1)
    engine = speculating(path, path, kv_cache_memory_bytes=2 * 30 * make_engine(path).info.kv_block_bytes, **TIGHT)
    shared = random_prompts([60])[0]
    kinds = [GREEDY, SAMPLED, structs.replace(SAMPLED, logprobs=1), structs.replace(GREEDY, presence_penalty=1.0)]
    for index in range(40):
        prompt = shared[: rng.randrange(1, 60)] + [rng.randrange(4, 384) for _ in range(rng.randrange(30))]
        pooling = "mean" if index % 7 == 0 else None
        request = Request(request_id=str(index), prompt_token_ids=prompt or [5], sampling=rng.choice(kinds))
        assert engine.submit(structs.replace(request, pooling=pooling)) is None
    drafted = accepted = hits = 0
    while engine.has_work():
        if rng.random() < 0.05:
            engine.abort(str(rng.randrange(40)))
            if not engine.has_work():
                break
        stats = engine.step().stats
        assert stats is not None
        drafted += stats.num_draft_tokens
        accepted += stats.num_accepted_tokens
        hits += stats.num_prefix_hit_tokens
    assert drafted == accepted > 50
    assert hits > 500


def test_it_agrees_with_itself_in_forks_and_beside_a_beam_search(path: Path) -> None:
    """Choices of a prompt get a copy of its last block, with the keys of both models in it; beams are not drafted for."""
    engine = speculating(path, path, enable_prefix_caching=False, max_num_seqs=12)
    for number, prompt in enumerate(random_prompts([5, 21, 40])):
        for seed in range(3):
            sampling = structs.replace(SAMPLED, seed=seed)
            request = Request(
                request_id=f"{number}/{seed}", prompt_token_ids=prompt, sampling=sampling, fork_group=str(number)
            )
            assert engine.submit(request) is None
    search = SamplingParams(temperature=0.0, max_tokens=8, beam_search=BeamSearch(width=3))
    assert engine.submit(Request(request_id="search", prompt_token_ids=[7, 8, 9], sampling=search)) is None
    drafted = accepted = 0
    found: list[list[int]] = []
    while engine.has_work():
        output = engine.step()
        assert output.stats is not None
        drafted += output.stats.num_draft_tokens
        accepted += output.stats.num_accepted_tokens
        found += [one.token_ids for one in output.hypotheses.get("search", [])]
    assert drafted == accepted > 50
    alone = make_engine(path, enable_prefix_caching=False)
    alone.submit(Request(request_id="search", prompt_token_ids=[7, 8, 9], sampling=search))
    expected: list[list[int]] = []
    while alone.has_work():
        expected += [one.token_ids for one in alone.step().hypotheses.get("search", [])]
    assert found == expected != []


def test_sampled_tokens_have_the_distribution_of_the_served_model(path: Path, similar: Path) -> None:
    """Three tokens, two of them drafted, for 1,500 seeds, against the probabilities by transformers of what they may be."""
    num, prompt = 1500, [7]
    engine = speculating(path, similar, num=2, max_num_seqs=32)
    sampling = [
        SamplingParams(temperature=0.7, top_k=3, seed=seed, max_tokens=4, ignore_eos=True) for seed in range(num)
    ]
    for seed, one in enumerate(sampling):
        engine.submit(Request(request_id=str(seed), prompt_token_ids=prompt, sampling=one))
    outputs: dict[str, list[int]] = defaultdict(list)
    num_rejected = num_accepted = 0
    while engine.has_work():
        output = engine.step()
        assert output.stats is not None
        num_accepted += output.stats.num_accepted_tokens
        num_rejected += output.stats.num_draft_tokens - output.stats.num_accepted_tokens
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            outputs[request_id].append(token_id)
    assert min(num_accepted, num_rejected) > 300

    reference = Reference(path)
    counts = Counter(tuple(tokens[:3]) for tokens in outputs.values())
    chi_square, expected = 0.0, _outcomes(reference, prompt, 3)
    assert set(counts) <= set(expected)
    for outcome, probability in expected.items():
        chi_square += (counts[outcome] - num * probability) ** 2 / (num * probability)
    assert len(expected) == 27
    assert chi_square < 54.1  # the seeds are fixed; the 99.9 % point of 26 degrees of freedom


def _outcomes(reference: Reference, prompt: list[int], num_tokens: int) -> dict[tuple[int, ...], float]:
    """Return the probability of each output of so many tokens, at temperature 0.7 and top_k 3."""
    outcomes: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, probability in outcomes.items():
            top = reference.logits([*prompt, *tokens]).topk(3)
            shares = (top.values / 0.7).softmax(dim=0).tolist()
            longer |= {(*tokens, int(one)): probability * share for one, share in zip(top.indices, shares, strict=True)}
        outcomes = longer
    return outcomes


def test_its_keys_count_towards_the_kv_cache(path: Path, other: Path) -> None:
    alone, draft = make_engine(path).info.kv_block_bytes, make_engine(other).info.kv_block_bytes
    assert speculating(path, other).info.kv_block_bytes == alone + draft


def test_its_step_times_are_not_those_of_the_served_model_alone(path: Path, other: Path) -> None:
    alone, drafting = make_engine(path).info.key, speculating(path, other).info.key
    assert drafting == alone.replace("test/", f"test+{other}/", 1)


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


def test_a_model_whose_tokens_have_other_numbers_is_refused(path: Path, tmp_path: Path) -> None:
    """The vocabulary is as large: without a look at the tokens, hardly a draft would ever be accepted."""
    draft = make_checkpoint(tmp_path, "qwen3")
    file = draft / "tokenizer.json"
    tokenizer = json.loads(file.read_bytes())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"has other tokens than the served model: .* number them differently"):
        speculating(path, draft)


def test_both_models_are_warmed_up(path: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would compile the kernels of the other one's shapes while a request waits."""
    timed = []
    monkeypatch.setattr(WarmUp, "longest_pause_s", lambda self: float(timed.append(self._model.config) or len(timed)))
    engine = speculating(path, other)
    assert [one.num_key_value_heads * one.head_dim for one in timed] == [
        describe_model(one, "auto").num_key_value_heads * describe_model(one, "auto").head_dim for one in (path, other)
    ]
    assert engine.info.longest_pause_s == 2.0, "the longer one"


def test_a_model_that_is_not_there_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        speculating(path, tmp_path / "none")

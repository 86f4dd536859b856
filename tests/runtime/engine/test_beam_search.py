"""Beam search finds what transformers' ``generate(num_beams=...)`` does, with its scores, however the beams are computed."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints import ALL_ARCHITECTURES, make_checkpoint
from engines import GREEDY, generate, kv_block_bytes, make_engine, random_prompts
from flyball_protocol import LimitsChange, LimitsUpdate
from flyball_runtime.core.beam_search import BeamSearch
from flyball_runtime.core.request import Failed, Finished, Hypothesis, Request
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.engine.engine import Engine

MAX_TOKENS = 12
STOPS = tuple(range(5, 384, 5))
"""So many that outputs end."""

SETTINGS = (
    SamplingParams(max_tokens=MAX_TOKENS, beam_search=BeamSearch(width=3)),
    SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=STOPS, beam_search=BeamSearch(width=4)),
    SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=STOPS, beam_search=BeamSearch(width=2, early_stopping=True)),
    SamplingParams(
        max_tokens=MAX_TOKENS,
        stop_token_ids=STOPS,
        beam_search=BeamSearch(width=3, early_stopping="never", length_penalty=1.5),
    ),
    SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=STOPS, beam_search=BeamSearch(width=3, length_penalty=-1.0)),
    SamplingParams(max_tokens=1, beam_search=BeamSearch(width=5)),
    SamplingParams(max_tokens=MAX_TOKENS, beam_search=BeamSearch(width=1)),
)

Found = list[tuple[list[int], float]]
"""Outputs and their scores, the best first."""


@dataclass(frozen=True)
class Case:
    """A checkpoint, prompts with settings, and what transformers finds."""

    path: Path
    searches: list[tuple[list[int], SamplingParams]]
    expected: list[Found]

    def engine(self, **settings: Any) -> Engine:
        return make_engine(self.path, **settings)


@torch.inference_mode()
def expected_of(model: Any, prompt: list[int], sampling: SamplingParams) -> Found:
    search = sampling.beam_search
    assert search is not None
    inputs = torch.tensor([prompt])
    found = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        num_beams=search.width,
        num_return_sequences=search.width,
        max_new_tokens=sampling.max_tokens,
        eos_token_id=[*model.generation_config.eos_token_id, *sampling.stop_token_ids],
        pad_token_id=0,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        output_scores=True,
        return_dict_in_generate=True,
    )
    lengths = (found.beam_indices >= 0).sum(dim=1) if search.width > 1 else [sampling.max_tokens]
    outputs = [one[len(prompt) :][:length].tolist() for one, length in zip(found.sequences, lengths, strict=True)]
    if search.width == 1:
        logprobs = [
            score.log_softmax(-1)[0, token].item() for score, token in zip(found.scores, outputs[0], strict=True)
        ]
        return [(outputs[0], sum(logprobs) / len(logprobs))]
    return list(zip(outputs, found.sequences_scores.tolist(), strict=True))


def make_case(path: Path, arch: str, lengths: list[int]) -> Case:
    make_checkpoint(path, arch)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    searches = list(zip(random_prompts(lengths), SETTINGS, strict=False))
    return Case(path, searches, [expected_of(model, *one) for one in searches])


@pytest.fixture(scope="module", params=["qwen3 windows", pytest.param("llama3", marks=pytest.mark.slow)])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("checkpoint"), request.param, [17, 3, 40, 32, 20, 9, 30])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ALL_ARCHITECTURES)
def test_every_architecture(arch: str, tmp_path: Path) -> None:
    case = make_case(tmp_path, arch, [17, 40])
    check(search(case.engine(enable_prefix_caching=False, max_num_batched_tokens=30), case.searches), case.expected)


def search(engine: Engine, searches: list[tuple[list[int], SamplingParams]], seed: int | None = None) -> list[Found]:
    """Run searches to their ends, all at once. With a ``seed``, limits move at random, and other requests come and go."""
    rng = random.Random(seed)
    found: dict[str, list[Hypothesis]] = {}
    for index, (prompt, sampling) in enumerate(searches):
        assert engine.submit(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling)) is None
    ended, num_moves = [], 0
    while engine.has_work():
        if seed is not None:
            num_moves += 1
            disturb(engine, rng, num_moves)
        output = engine.step()
        found |= output.hypotheses
        ended += [one for one in output.endings if isinstance(one, Failed) or one.reason != "abort"]
        assert not set(output.request_ids) & {str(index) for index in range(len(searches))}, "beams are not told"
    assert all(isinstance(one, Finished) for one in ended)
    assert {one.request_id for one in ended} >= set(found) == {str(index) for index in range(len(searches))}
    return [[(one.token_ids, one.score) for one in found[str(index)]] for index in range(len(searches))]


def disturb(engine: Engine, rng: random.Random, number: int) -> None:
    if number > 60:
        return
    least = engine.scheduler.envelope.min_kv_cache_fraction
    change = LimitsChange(
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.randint(4, 64),
        kv_cache_fraction=rng.uniform(least, 1),
    )
    engine.post_limits(LimitsUpdate(revision=number, limits=change, kv_drain_timeout_s=0.0))
    engine.submit(Request(request_id=f"x{number}", prompt_token_ids=[number] * rng.randint(1, 40), sampling=GREEDY))
    engine.abort(f"x{rng.randint(1, number)}")


def check(found: list[Found], expected: list[Found]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert [token_ids for token_ids, _ in one] == [token_ids for token_ids, _ in other]
        # sums of up to a dozen log probabilities in float32, by other kernels
        assert [score for _, score in one] == pytest.approx([score for _, score in other], abs=1e-4)


def test_alone(case: Case) -> None:
    engine = case.engine(enable_prefix_caching=False)
    check([search(engine, [one])[0] for one in case.searches], case.expected)
    lengths = {len(token_ids) for found in case.expected for token_ids, _ in found}
    assert len(lengths) > 3, "outputs end at stop tokens and at their greatest length"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 9, "max_num_seqs": 6},
        {"async_scheduling": True, "max_num_seqs": 16},
    ],
    ids=["whole", "chunked", "planned ahead"],
)
def test_together(case: Case, settings: dict[str, Any]) -> None:
    check(search(case.engine(**settings), case.searches), case.expected)


@pytest.mark.parametrize("caching", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_without_room_for_all_beams(case: Case, caching: bool) -> None:
    """Blocks for one sequence of the model's length, and hardly more: beams take turns."""
    num_bytes = 8 * kv_block_bytes(case.path, 64)
    engine = case.engine(max_model_len=64, kv_cache_memory_bytes=num_bytes, enable_prefix_caching=caching)
    check(search(engine, case.searches), case.expected)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_under_moving_limits_and_beside_other_requests(case: Case, seed: int) -> None:
    num_bytes = 20 * kv_block_bytes(case.path, 64)
    engine = case.engine(max_model_len=64, kv_cache_memory_bytes=num_bytes, async_scheduling=seed == 2)
    check(search(engine, case.searches, seed), case.expected)
    assert generate(engine, [[7, 8, 9]])[0], "nothing is left behind"
    assert engine.kv_cache.counts().used == 0


def test_the_prompt_is_computed_once_and_its_blocks_are_shared(case: Case) -> None:
    engine = case.engine(enable_prefix_caching=False)
    prompt, sampling = random_prompts([100])[0], SamplingParams(max_tokens=6, beam_search=BeamSearch(width=4))
    engine.submit(Request(request_id="a", prompt_token_ids=prompt, sampling=sampling))
    num_computed, most_blocks, num_groups = 0, 0, len(engine.info.kv_windows)
    while engine.has_work():
        stats = engine.step().stats
        num_computed += stats.num_tokens
        most_blocks = max(most_blocks, stats.kv_blocks.used)
    assert num_computed == 100 + 5 * 4
    assert most_blocks <= num_groups * (100 // 16 + 4)


def test_an_aborted_search_leaves_nothing_behind(case: Case) -> None:
    engine = case.engine()
    prompt, sampling = case.searches[0]
    for num_steps in range(6):
        engine.submit(Request(request_id="a", prompt_token_ids=prompt, sampling=sampling))
        for _ in range(num_steps):
            engine.step()
        assert engine.abort("a") == Finished("a", "abort", len(prompt), 0) if num_steps == 0 else engine.abort("a")
        assert not engine.has_work() and engine.kv_cache.counts().used == 0


def test_more_beams_than_seats_are_refused(case: Case) -> None:
    sampling = SamplingParams(max_tokens=4, beam_search=BeamSearch(width=9))
    failed = case.engine(max_num_seqs=8).submit(Request(request_id="a", prompt_token_ids=[5], sampling=sampling))
    assert failed is not None and failed.status == 400
    assert "at most 8 sequences" in failed.message and "--max-num-seqs" in failed.message


def test_log_probabilities_add_up_to_the_score(case: Case) -> None:
    search_for = BeamSearch(width=3, length_penalty=0.5)
    sampling = SamplingParams(max_tokens=5, logprobs=2, beam_search=search_for)
    engine = case.engine()
    engine.submit(Request(request_id="a", prompt_token_ids=[5, 6, 7], sampling=sampling))
    found: list[Hypothesis] = []
    while engine.has_work():
        found += engine.step().hypotheses.get("a", [])
    assert len(found) == 3
    for one in found:
        assert [token.token_id for token in one.logprobs] == one.token_ids
        assert all(len(token.top_ids) == 2 for token in one.logprobs)
        total = sum(token.logprob or 0.0 for token in one.logprobs)
        assert (one.cum_logprob, one.score) == pytest.approx((total, total / 5**0.5))

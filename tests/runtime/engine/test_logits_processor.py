"""Tokens under bans, biases and penalties equal those of a loop over transformers' logits, however the work is cut up."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from msgspec import structs
from transformers import AutoModelForCausalLM

from checkpoints import EOS_ID, make_checkpoint
from engines import GREEDY, kv_block_bytes, make_engine, random_prompts
from flyball_runtime.core.request import Failed, Finished, Request
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.engine.engine import Engine

VOCAB_SIZE = 384
PROMPTS = random_prompts([1, 5, 17, 40, 100, 100])
PLAIN = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


class Loop:
    """Greedy tokens, one prompt at a time: transformers' logits, changed as the fields of SamplingParams are documented."""

    def __init__(self, path: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(self, prompt: list[int], sampling: SamplingParams, ending: int | None = None) -> list[int]:
        output: list[int] = []
        while len(output) < (sampling.max_tokens or 0) and (not output or output[-1] != ending):
            logits = self._model(torch.tensor([prompt + output])).logits[0, -1].tolist()
            output.append(self._choose(logits, prompt, output, sampling, ending))
        return output

    @staticmethod
    def _choose(
        logits: list[float], prompt: list[int], output: list[int], sampling: SamplingParams, ending: int | None
    ) -> int:
        banned = (
            set() if sampling.allowed_token_ids is None else set(range(VOCAB_SIZE)) - set(sampling.allowed_token_ids)
        )
        for *before, last in sampling.bad_words_token_ids:
            if not before or output[-len(before) :] == before:
                banned.add(last)
        if ending is not None and len(output) < sampling.min_tokens:
            banned.add(ending)
        for token_id in range(VOCAB_SIZE):
            logit = logits[token_id] + sampling.logit_bias.get(token_id, 0.0)
            if token_id in prompt or token_id in output:
                logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
            count = output.count(token_id)
            logit -= sampling.frequency_penalty * count + (sampling.presence_penalty if count else 0.0)
            logits[token_id] = -torch.inf if token_id in banned else logit
        return logits.index(max(logits))


@pytest.fixture(scope="module")
def loop(path: Path) -> Loop:
    return Loop(path)


@pytest.fixture(scope="module")
def settings(loop: Loop) -> list[SamplingParams]:
    """For each of PROMPTS, one of which asks for nothing, with words to ban that would come."""
    plain = [loop.generate(prompt, PLAIN) for prompt in PROMPTS]
    words = tuple(tuple(tokens[at : at + length]) for tokens in plain for at, length in ((0, 1), (2, 2), (6, 3)))
    return [
        structs.replace(PLAIN, repetition_penalty=1.8),
        structs.replace(PLAIN, presence_penalty=1.5, logit_bias={plain[1][0]: -3.0, 7: 1.5}),
        structs.replace(PLAIN, frequency_penalty=-0.7, allowed_token_ids=tuple(range(0, VOCAB_SIZE, 3))),
        structs.replace(PLAIN, bad_words_token_ids=words),
        PLAIN,
        structs.replace(PLAIN, repetition_penalty=0.9, frequency_penalty=0.5, bad_words_token_ids=words[:4]),
    ]


@pytest.fixture(scope="module")
def expected(loop: Loop, settings: list[SamplingParams]) -> list[list[int]]:
    return [loop.generate(prompt, one) for prompt, one in zip(PROMPTS, settings, strict=True)]


def run(
    engine: Engine, settings: list[SamplingParams], prompts: list[list[int]] = PROMPTS
) -> tuple[list[list[int]], int]:
    """Return the outputs, and how many preemptions there were."""
    outputs: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for request_id, prompt, sampling in zip(outputs, prompts, settings, strict=True):
        assert engine.submit(Request(request_id=request_id, prompt_token_ids=prompt, sampling=sampling)) is None
    preempted = 0
    while engine.has_work():
        step = engine.step()
        assert step.stats is not None
        preempted += step.stats.num_preemptions
        for request_id, token_id in zip(step.request_ids, step.token_ids, strict=True):
            outputs[request_id].append(token_id)
        assert all(isinstance(ending, Finished) for ending in step.endings)
    return list(outputs.values()), preempted


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"kernel_backend": "torch"},
        {"max_num_seqs": 4, "max_num_batched_tokens": 7},
        {"max_num_seqs": 1},
        {"async_scheduling": True},
        {"async_scheduling": True, "max_num_seqs": 3, "max_num_batched_tokens": 16},
        pytest.param({"device": "cuda"}, marks=pytest.mark.gpu),
        pytest.param({"device": "cuda", "async_scheduling": True, "max_num_seqs": 3}, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_tokens_equal_the_loop(
    path: Path, settings: list[SamplingParams], expected: list[list[int]], config: dict[str, Any]
) -> None:
    engine = make_engine(path, **config)
    assert run(engine, settings)[0] == expected
    assert run(engine, settings)[0] == expected, "with prompts that are in the prefix cache"


@pytest.mark.parametrize("ahead", [False, True])
def test_a_preempted_sequence_goes_on_counting(
    path: Path, settings: list[SamplingParams], expected: list[list[int]], ahead: bool
) -> None:
    engine = make_engine(
        path, async_scheduling=ahead, max_model_len=144, kv_cache_memory_bytes=18 * kv_block_bytes(path)
    )
    outputs, preempted = run(engine, settings)
    assert preempted > 0
    assert outputs == expected


@examples(max_examples=15, deadline=None)
@given(
    order=st.permutations(range(len(PROMPTS))),
    chosen=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    seqs=st.integers(1, 6),
    chunk=st.integers(6, 60),
    seed=st.integers(0, 2**63 - 6),  # five more are added
)
@pytest.mark.slow
def test_sampled_tokens_depend_on_their_own_request_alone(
    path: Path,
    settings: list[SamplingParams],
    order: list[int],
    chosen: list[int],
    seqs: int,
    chunk: int,
    seed: int,
) -> None:
    """Temperature 1: each request alone, and all of them in some order, in chunks, with few blocks and few seats."""
    wanted = [structs.replace(settings[index], temperature=1.0, seed=seed + index) for index in chosen]
    alone = make_engine(path, enable_prefix_caching=False)
    outputs = [run(alone, [one], [prompt])[0][0] for prompt, one in zip(PROMPTS, wanted, strict=True)]
    engine = make_engine(
        path,
        async_scheduling=bool(seed % 2),
        max_num_seqs=seqs,
        max_num_batched_tokens=chunk,
        max_model_len=144,
        kv_cache_memory_bytes=18 * kv_block_bytes(path),
    )
    got, _ = run(engine, [wanted[index] for index in order], [PROMPTS[index] for index in order])
    assert got == [outputs[index] for index in order]


def test_min_tokens_hold_back_what_ends_the_output(path: Path, loop: Loop) -> None:
    first = loop.generate(PROMPTS[2], PLAIN)[1]
    ends = structs.replace(PLAIN, stop_token_ids=(first,))
    waits = structs.replace(ends, min_tokens=6)
    eos = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=8, logit_bias={EOS_ID: 100.0})
    engine = make_engine(path)
    prompts = [PROMPTS[2]] * 3
    (short, long, held), _ = run(engine, [ends, waits, eos], prompts)
    assert short == loop.generate(PROMPTS[2], ends, first)
    assert long == loop.generate(PROMPTS[2], waits, first) and len(long) >= 6
    assert len(held) == 8 and EOS_ID not in held
    (after,), _ = run(engine, [structs.replace(eos, min_tokens=3)], prompts[:1])
    assert len(after) == 4 and after[-1] == EOS_ID


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SamplingParams(allowed_token_ids=(EOS_ID,), min_tokens=1), "allowed_token_ids"),
        (SamplingParams(allowed_token_ids=(5, 6), bad_words_token_ids=((5,), (9, 6))), "allowed_token_ids"),
        (SamplingParams(bad_words_token_ids=tuple((i,) for i in range(VOCAB_SIZE))), "bad_words"),
    ],
)
def test_settings_that_leave_no_token_are_refused(path: Path, sampling: SamplingParams, param: str) -> None:
    engine = make_engine(path)
    failed = engine.submit(Request(request_id="a", prompt_token_ids=[5], sampling=sampling))
    assert isinstance(failed, Failed) and failed.status == 400
    assert param in failed.message and "no token to choose" in failed.message
    assert run(engine, [GREEDY], [[5]]), "others go on"

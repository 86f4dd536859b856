"""Outputs conform to their grammars, however the work is cut up, and nobody else notices."""

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from msgspec import structs

from engines import Oracle, have_drafted, kv_block_bytes, make_engine, random_prompts, shake, tight
from flyball_runtime.core.grammar import ANY_OBJECT, Grammar
from flyball_runtime.core.request import Failed, Finished, Request
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.core.stats import StepOutput
from flyball_runtime.engine.engine import Engine
from flyball_runtime.text.tokenizer import load_tokenizer
from schemas import SCHEMAS

CHECKPOINT = Path(__file__).parents[3] / "examples" / "demo_model" / "checkpoint"
PROMPTS = random_prompts([1, 5, 17, 40, 90, 90], vocab_size=2048)
EOS_IDS = {0, 2}
PLAIN = SamplingParams(max_tokens=40, temperature=1.0, seed=3)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "def"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar("json", json.dumps(PERSON), ""),
    Grammar("regex", r"[a-c]{2,5}(-\d{3}){1,2}"),
    Grammar("choice", json.dumps(["yes", "no", "per haps", "né"])),
    None,
    Grammar("grammar", 'start: "(" start ")" | "x"'),
    ANY_OBJECT,
]
SETTINGS = [structs.replace(PLAIN, grammar=grammar, seed=index) for index, grammar in enumerate(GRAMMARS)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine(CHECKPOINT, kernel_backend="auto")


@pytest.fixture(scope="module")
def decode() -> Any:
    return load_tokenizer(CHECKPOINT).backend_tokenizer.decode


def run(
    engine: Engine, settings: list[SamplingParams], prompts: list[list[int]] = PROMPTS
) -> tuple[list[list[int]], list[Finished | Failed], list[StepOutput]]:
    """Return the outputs, the endings and what the steps said."""
    outputs: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    endings: dict[str, Finished | Failed] = {}
    steps: list[StepOutput] = []
    for request_id, prompt, sampling in zip(outputs, prompts, settings, strict=True):
        assert engine.submit(Request(request_id=request_id, prompt_token_ids=prompt, sampling=sampling)) is None
    while engine.has_work():
        step = engine.step()
        steps.append(step)
        for request_id, token_id in zip(step.request_ids, step.token_ids, strict=True):
            outputs[request_id].append(token_id)
        endings |= {ending.request_id: ending for ending in step.endings}
    return list(outputs.values()), [endings[request_id] for request_id in outputs], steps


def one(engine: Engine, sampling: SamplingParams) -> tuple[list[int], Finished | Failed]:
    (output,), (ending,), _ = run(engine, [sampling], PROMPTS[1:2])
    return output, ending


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[list[int]]:
    return [run(engine, [sampling], [prompt])[0][0] for sampling, prompt in zip(SETTINGS, PROMPTS, strict=True)]


def test_outputs_conform(alone: list[list[int]], decode: Any) -> None:
    texts = [decode(output) for output in alone]
    jsonschema.validate(json.loads(texts[0]), PERSON)
    assert re.fullmatch(GRAMMARS[1].text, texts[1])
    assert texts[2] in json.loads(GRAMMARS[2].text)
    assert re.fullmatch(r"\(*x\)*|\(+", texts[4])
    assert texts[5].startswith("{")
    assert [output[-1] in EOS_IDS for output in alone[:3]] == [True] * 3


@pytest.mark.parametrize(
    "config",
    [
        {},
        pytest.param({"kernel_backend": "torch"}, marks=pytest.mark.slow),
        pytest.param({"max_num_seqs": 3, "max_num_batched_tokens": 7}, marks=pytest.mark.slow),
        pytest.param({"async_scheduling": True}, marks=pytest.mark.slow),
        {"async_scheduling": True, "max_num_seqs": 4, "max_num_batched_tokens": 16},
        pytest.param({"device": "cuda"}, marks=pytest.mark.gpu),
        pytest.param({"device": "cuda", "async_scheduling": True, "max_num_seqs": 4}, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_rows_with_and_without_grammars_get_the_tokens_that_they_get_alone(
    alone: list[list[int]], config: dict[str, Any]
) -> None:
    engine = make_engine(CHECKPOINT, **config)
    assert run(engine, SETTINGS)[0] == alone
    assert run(engine, SETTINGS)[0] == alone, "with prompts that are in the prefix cache"


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_preempted_sequence_goes_on_where_it_was(engine: Engine, decode: Any, ahead: bool) -> None:
    grammar = Grammar("regex", "[a-z ]{150}[0-9]+")
    settings = [structs.replace(PLAIN, grammar=grammar, seed=seed) for seed in range(len(PROMPTS))]
    expected = run(engine, settings)[0]
    small = make_engine(
        CHECKPOINT, async_scheduling=ahead, max_model_len=144, kv_cache_memory_bytes=18 * engine.info.kv_block_bytes
    )
    outputs, _, steps = run(small, settings)
    assert sum(step.stats.num_preemptions for step in steps) > 0
    assert outputs == expected
    assert all(re.fullmatch(r"[a-z ]+[0-9]*", decode(output)) for output in outputs)


@pytest.mark.parametrize("ahead", [False, True])
def test_all_at_once(alone: list[list[int]], ahead: bool) -> None:
    """Chunks, prefix hits, blocks in host memory, preemptions, a hundred resizes, drafts and cancellations."""
    rng = random.Random(ahead)
    engine = make_engine(CHECKPOINT, kernel_backend="auto", **tight(kv_block_bytes(CHECKPOINT), ahead))
    if not ahead:
        have_drafted(engine, Oracle(5, [prompt + output for prompt, output in zip(PROMPTS, alone, strict=True)]))
    waiting = [
        Request(
            request_id=f"{at} of {number}{' cancelled' if rng.random() < 1 / 3 else ''}",
            prompt_token_ids=PROMPTS[at],
            sampling=SETTINGS[at],
        )
        for number in range(8)
        for at in range(len(PROMPTS))
    ]
    rng.shuffle(waiting)
    shake(engine, waiting, alone, rng)


@pytest.mark.slow
@examples(max_examples=60, deadline=None)
@given(schema=SCHEMAS, greedy=st.booleans(), seed=st.integers(0, 2**31))
def test_any_schema(engine: Engine, decode: Any, schema: dict[str, Any], greedy: bool, seed: int) -> None:
    grammar = Grammar("json", json.dumps(schema), "")
    sampling = SamplingParams(max_tokens=240, temperature=0.0 if greedy else 1.0, seed=seed, grammar=grammar)
    output, ending = one(engine, sampling)
    assert isinstance(ending, Finished) and ending.reason == "stop"
    checker = jsonschema.FormatChecker()
    jsonschema.validate(json.loads(decode(output)), schema, format_checker=checker)


def test_max_tokens_cut_an_output_by_length(engine: Engine) -> None:
    never = Grammar("grammar", 'start: ("a" | "b") start')
    output, ending = one(engine, structs.replace(PLAIN, grammar=never, max_tokens=9))
    assert isinstance(ending, Finished) and ending.reason == "length"
    assert len(output) == 9


def test_a_grammar_that_has_ended_ends_an_output_before_min_tokens(engine: Engine, decode: Any) -> None:
    word = structs.replace(PLAIN, grammar=Grammar("choice", '["yes"]'), min_tokens=30)
    output, ending = one(engine, word)
    assert isinstance(ending, Finished) and ending.reason == "stop"
    assert decode(output) == "yes"
    letters = structs.replace(PLAIN, grammar=Grammar("regex", "a*"), min_tokens=30)
    output, _ = one(engine, letters)
    assert len(output) >= 30 and not EOS_IDS & set(output[:29])


def test_other_settings_hold_within_the_grammar(engine: Engine, decode: Any) -> None:
    choice = structs.replace(PLAIN, grammar=Grammar("choice", '["a", "b"]'))
    (a,), (b,) = engine_ids("a"), engine_ids("b")
    assert decode(one(engine, structs.replace(choice, logit_bias={b: 100.0}))[0]) == "b"
    assert decode(one(engine, structs.replace(choice, allowed_token_ids=(a, *EOS_IDS)))[0]) == "a"
    assert one(engine, structs.replace(choice, logit_bias={b: 100.0}, stop_token_ids=(b,)))[0] == [b]


def engine_ids(text: str) -> list[int]:
    return load_tokenizer(CHECKPOINT).backend_tokenizer.encode(text, add_special_tokens=False).ids


def test_a_grammar_whose_tokens_are_banned_fails_alone(engine: Engine) -> None:
    banned = structs.replace(PLAIN, grammar=Grammar("regex", "[0-9]{4}"), allowed_token_ids=tuple(engine_ids("abc")))
    outputs, endings, _ = run(engine, [banned, PLAIN], PROMPTS[:2])
    assert isinstance(endings[0], Failed) and endings[0].status == 400
    assert "banned" in endings[0].message and "0 output tokens" in endings[0].message
    assert isinstance(endings[1], Finished)
    assert outputs[1] == one(engine, PLAIN)[0]


def test_a_grammar_that_becomes_too_complex_fails_alone(engine: Engine) -> None:
    forced = Grammar("grammar", 'start: "a" start')
    _, endings, _ = run(engine, [structs.replace(PLAIN, grammar=forced), PLAIN], PROMPTS[:2])
    assert isinstance(endings[0], Failed) and endings[0].status == 400
    assert "too complex" in endings[0].message
    assert isinstance(endings[1], Finished)


def test_one_that_cannot_be_compiled_fails_and_others_go_on_meanwhile(engine: Engine) -> None:
    impossible = structs.replace(PLAIN, grammar=Grammar("regex", "(a"))
    outputs, endings, _ = run(engine, [impossible, PLAIN], PROMPTS[:2])
    assert isinstance(endings[0], Failed) and "unclosed group" in endings[0].message
    assert isinstance(endings[1], Finished) and outputs[0] == []
    assert not engine.has_work()


def test_a_sequence_that_waits_for_its_grammar_can_be_aborted(engine: Engine) -> None:
    grammar = Grammar("regex", "[abort]{3}")
    request = Request(request_id="gone", prompt_token_ids=[5], sampling=structs.replace(PLAIN, grammar=grammar))
    engine.submit(request)
    assert engine.state().num_waiting == 1
    assert engine.abort("gone") == Finished("gone", "abort", 1, 0)
    assert not engine.has_work()
    assert engine.abort("gone") is None

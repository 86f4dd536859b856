"""A request: its sampling settings, what is refused before it runs, and its sequence."""

import math
from typing import Any

import msgspec
import pytest

from flyball_runtime.core.errors import InvalidRequest, RequestError
from flyball_runtime.core.request import Request, Sequence, validate_request
from flyball_runtime.core.sampling_params import MAX_SEED, SamplingParams

VOCAB_SIZE = 1000


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"max_tokens": 1},
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"top_p": 1e-6},
        {"top_p": 1.0},
        {"top_k": 0},
        {"top_k": 2**63 - 1},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"seed": MAX_SEED},
        {"seed": -MAX_SEED - 1},
        {"stop": ("x" * 256,) * 16},
        {"stop_token_ids": (0, VOCAB_SIZE - 1)},
        {"stop_token_ids": (5,) * 128},
        {"min_tokens": 7, "max_tokens": 7},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 1e-3},
        {"repetition_penalty": 1e3},
        {"logit_bias": {0: -100.0, VOCAB_SIZE - 1: 100.0}},
        {"allowed_token_ids": (0, VOCAB_SIZE - 1, 0)},
        {"bad_words": ("x" * 256,) * 128},
    ],
)
def test_values_at_the_edge_are_taken(params: dict[str, object]):
    SamplingParams(**params).validate(VOCAB_SIZE)


@pytest.mark.parametrize(
    ("params", "param", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be at least 1."),
        ({"max_tokens": -3}, "max_tokens", "max_tokens is -3"),
        ({"temperature": -0.1}, "temperature", "temperature is -0.1; it must be a number in [0, 2]."),
        ({"temperature": 2.1}, "temperature", "temperature is 2.1"),
        ({"temperature": math.nan}, "temperature", "temperature is nan"),
        ({"temperature": math.inf}, "temperature", "temperature is inf"),
        ({"top_p": 0.0}, "top_p", "top_p is 0.0; it must be a number in (0, 1]."),
        ({"top_p": 1.1}, "top_p", "top_p is 1.1"),
        ({"top_p": math.nan}, "top_p", "top_p is nan"),
        ({"top_k": -1}, "top_k", f"top_k is -1; it must be from 0 to {2**63 - 1}."),
        ({"top_k": 2**63}, "top_k", f"top_k is {2**63}; it must be from 0 to {2**63 - 1}."),
        ({"min_p": -0.5}, "min_p", "min_p is -0.5; it must be a number in [0, 1]."),
        ({"min_p": math.nan}, "min_p", "min_p is nan"),
        ({"seed": MAX_SEED + 1}, "seed", f"seed is {MAX_SEED + 1}; it must be from {-MAX_SEED - 1} to {MAX_SEED}."),
        ({"stop": ("",)}, "stop", "stop has an empty string"),
        ({"stop": ("a",) * 17}, "stop", "stop has 17 entries; at most 16 are allowed."),
        ({"stop": ("x" * 257,)}, "stop", "one of stop has 257 characters; at most 256 are allowed."),
        ({"stop_token_ids": (1,) * 129}, "stop_token_ids", "stop_token_ids has 129 entries; at most 128"),
        ({"stop_token_ids": (1, VOCAB_SIZE)}, "stop_token_ids", "stop_token_ids is 1000; it must be from 0 to 999."),
        ({"stop_token_ids": (-1,)}, "stop_token_ids", "stop_token_ids is -1"),
        ({"min_tokens": -1}, "min_tokens", "min_tokens is -1; it must be at least 0."),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "min_tokens is 6; it must be from 0 to 5."),
        ({"presence_penalty": 2.1}, "presence_penalty", "presence_penalty is 2.1; it must be a number in [-2, 2]."),
        (
            {"frequency_penalty": -2.1},
            "frequency_penalty",
            "frequency_penalty is -2.1; it must be a number in [-2, 2].",
        ),
        ({"frequency_penalty": math.nan}, "frequency_penalty", "frequency_penalty is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "repetition_penalty is 0.0; it must be a number in [0.001"),
        ({"repetition_penalty": math.inf}, "repetition_penalty", "repetition_penalty is inf"),
        ({"logit_bias": {5: 100.5}}, "logit_bias", "logit_bias is 100.5; it must be a number in [-100, 100]."),
        ({"logit_bias": {5: math.nan}}, "logit_bias", "logit_bias is nan"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias", "logit_bias is 1000; it must be from 0 to 999."),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias", "logit_bias has 1025 entries; at most 1024"),
        ({"allowed_token_ids": ()}, "allowed_token_ids", "allowed_token_ids is empty"),
        ({"allowed_token_ids": (VOCAB_SIZE,)}, "allowed_token_ids", "allowed_token_ids is 1000; it must be from 0"),
        ({"allowed_token_ids": (1,) * 1001}, "allowed_token_ids", "allowed_token_ids has 1001 entries; at most 1000"),
        ({"bad_words": ("",)}, "bad_words", "bad_words has an empty string"),
        ({"bad_words": ("a",) * 129}, "bad_words", "bad_words has 129 entries; at most 128 are allowed."),
        ({"bad_words": ("x" * 257,)}, "bad_words", "one of bad_words has 257 characters; at most 256 are allowed."),
        ({"bad_words_token_ids": ((1, VOCAB_SIZE),)}, "bad_words", "bad_words is 1000; it must be from 0 to 999."),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_it(params: dict[str, object], param: str, message: str):
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**params).validate(VOCAB_SIZE)
    assert error.value.message.startswith(message)
    assert (error.value.param, error.value.status) == (param, 400)


def test_params_cross_processes_unchanged():
    params = SamplingParams(
        max_tokens=5,
        temperature=0.5,
        seed=-7,
        stop=("\n", "é"),
        stop_token_ids=(3, 4),
        logit_bias={7: 0.5},
        allowed_token_ids=(7, 8),
        bad_words=("é",),
        bad_words_token_ids=((5, 6), (7,)),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def check(prompt: list[int], **sampling: Any) -> None:
    request = Request(request_id="a", prompt_token_ids=prompt, sampling=SamplingParams(**sampling))
    validate_request(request, max_model_len=256, vocab_size=384)


@pytest.mark.parametrize(
    ("prompt", "sampling", "code", "says"),
    [
        ([], {}, "empty_prompt", "0 tokens"),
        ([5] * 256, {}, "context_length_exceeded", "256 tokens; this model takes 256"),
        ([5] * 200, {"max_tokens": 57}, "context_length_exceeded", "257 together"),
        ([5, 384], {}, "token_out_of_vocabulary", "token id 384"),
        ([-1], {}, "token_out_of_vocabulary", "token id -1"),
        ([5], {"temperature": float("nan")}, "invalid_request", "temperature is nan"),
        ([5], {"temperature": -0.1}, "invalid_request", "temperature is -0.1"),
        ([5], {"top_p": 0.0}, "invalid_request", "top_p is 0.0"),
        ([5], {"min_p": 1.5}, "invalid_request", "min_p is 1.5"),
        ([5], {"top_k": -1}, "invalid_request", "top_k is -1"),
        ([5], {"max_tokens": 0}, "invalid_request", "max_tokens is 0"),
        ([5], {"stop": ("",)}, "invalid_request", "empty string"),
        ([5], {"stop": ("x",) * 17}, "invalid_request", "17 entries"),
        ([5], {"stop_token_ids": (384,)}, "invalid_request", "stop_token_ids is 384"),
    ],
)
def test_what_can_never_run_is_refused_by_name(
    prompt: list[int], sampling: dict[str, Any], code: str, says: str
) -> None:
    with pytest.raises(RequestError, match=says) as refusal:
        check(prompt, **sampling)
    assert (refusal.value.status, refusal.value.code) == (400, code)


def test_what_just_fits_is_not() -> None:
    check([0, 383] + [5] * 198, max_tokens=56, stop_token_ids=(383,))


EOS = frozenset({2, 3})


def sequence(num_prompt_tokens: int = 4, **sampling: object) -> Sequence:
    prompt = list(range(10, 10 + num_prompt_tokens))
    request = Request(request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(**sampling))
    return Sequence(request, max_model_len=16, eos_token_ids=EOS)


@pytest.mark.parametrize(("max_tokens", "max_total_tokens"), [(None, 16), (1, 5), (12, 16), (13, 16)])
def test_output_ends_at_max_tokens_or_the_model_length(max_tokens: int | None, max_total_tokens: int):
    assert sequence(max_tokens=max_tokens).max_total_tokens == max_total_tokens


def test_own_stop_ids_add_to_the_models():
    assert sequence(stop_token_ids=(7,)).stop_token_ids == {2, 3, 7}


def test_ignore_eos_leaves_own_stop_ids():
    assert sequence(stop_token_ids=(7,), ignore_eos=True).stop_token_ids == {7}


def test_a_sequence_does_not_share_its_requests_list():
    request = Request(request_id="r", prompt_token_ids=[1, 2], sampling=SamplingParams())
    Sequence(request, max_model_len=16, eos_token_ids=EOS).token_ids.append(9)
    assert request.prompt_token_ids == [1, 2]

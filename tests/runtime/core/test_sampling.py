import math

import msgspec
import pytest

from flyball_runtime.core.errors import InvalidRequest
from flyball_runtime.core.sampling import MAX_SEED, SamplingParams

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
        ({"stop": ("x" * 257,)}, "stop", "a stop string has 257 characters; at most 256 are allowed."),
        ({"stop_token_ids": (1,) * 129}, "stop_token_ids", "stop_token_ids has 129 entries; at most 128"),
        ({"stop_token_ids": (1, VOCAB_SIZE)}, "stop_token_ids", "stop_token_ids is 1000; it must be from 0 to 999."),
        ({"stop_token_ids": (-1,)}, "stop_token_ids", "stop_token_ids is -1"),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_it(params: dict[str, object], param: str, message: str):
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**params).validate(VOCAB_SIZE)
    assert error.value.message.startswith(message)
    assert (error.value.param, error.value.status) == (param, 400)


def test_params_cross_processes_unchanged():
    params = SamplingParams(max_tokens=5, temperature=0.5, seed=-7, stop=("\n", "é"), stop_token_ids=(3, 4))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params

"""Requests that can never run."""

from typing import Any

import pytest

from flyball_runtime.core.errors import RequestError
from flyball_runtime.core.request import Request
from flyball_runtime.core.sampling import SamplingParams
from flyball_runtime.engine.validate import validate_request


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

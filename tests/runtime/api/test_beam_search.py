"""Beam search over HTTP: which fields make one, what it is refused with, and how its outputs are told."""

from typing import Any

import httpx
import pytest

from flyball_runtime.api import MetricsCollector
from flyball_runtime.core.beam_search import BeamSearch
from runtime.api.support import encode, error_of
from runtime.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


async def test_the_best_outputs_are_choices_of_one_search(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Any
) -> None:
    engine.num_cached_tokens = 1
    body = {
        "prompt": [[5, 6], [7]],
        "use_beam_search": True,
        "n": 2,
        "best_of": 3,
        "return_token_ids": True,
        "logprobs": 1,
    }
    answer = (await client.post(COMPLETIONS, json=body)).json()
    assert [request.prompt_token_ids for request in engine.requests] == [[5, 6], [7]]
    ids = encode(tokenizer, "Hello world")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in answer["choices"]] == [ids, ids[:-1]] * 2
    assert [choice["sequence_score"] for choice in answer["choices"]] == [-0.5, -1.5] * 2
    assert answer["choices"][1]["text"] == tokenizer.backend_tokenizer.decode(ids[:-1])
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 4
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * len(ids)
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert answer["usage"]["completion_tokens"] == 2 * (2 * len(ids) - 1)


async def test_a_chat(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"messages": MESSAGES, "use_beam_search": True, "n": 2, "temperature": 0, "seed": 3}
    answer = (await client.post(CHAT, json=body)).json()
    assert answer["choices"][0]["message"]["content"] == "Hello world"
    assert [choice["sequence_score"] for choice in answer["choices"]] == [-0.5, -1.5]
    (request,) = engine.requests
    assert request.sampling.beam_search == BeamSearch(width=2)
    assert request.fork_group is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, BeamSearch(width=1)),
        ({"n": 3}, BeamSearch(width=3)),
        (
            {"best_of": 4, "length_penalty": 0.5, "early_stopping": True},
            BeamSearch(width=4, length_penalty=0.5, early_stopping=True),
        ),
        ({"n": 2, "early_stopping": "never"}, BeamSearch(width=2, early_stopping="never")),
        ({"length_penalty": None, "early_stopping": None, "best_of": None}, BeamSearch(width=1)),
    ],
)
async def test_settings(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], expected: BeamSearch
) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": [5], "use_beam_search": True} | fields)
    assert response.status_code == 200, response.text
    assert engine.requests[0].sampling.beam_search == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 10**6}, "best_of"),
        ({"best_of": "two"}, "best_of"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"length_penalty": "long"}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"stream": True}, "stream"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"stop": "x"}, "stop"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"echo": True, "logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_what_does_not_go_with_it_is_refused(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str
) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": [5], "use_beam_search": True} | fields)
    error = error_of(response)
    assert response.status_code == 400 and error["param"] == param, error
    assert not engine.requests


@pytest.mark.parametrize("fields", [{"length_penalty": 0.5}, {"early_stopping": True}])
async def test_without_it_its_settings_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": [5]} | fields)
    (name,) = fields
    assert response.status_code == 400 and error_of(response)["param"] == name
    assert "use_beam_search" in error_of(response)["message"]
    assert not engine.requests


async def test_settings_that_ask_for_nothing_pass_without_it(client: httpx.AsyncClient) -> None:
    noops = {"use_beam_search": False, "best_of": 2, "n": 2, "length_penalty": 1, "early_stopping": False}
    assert (await client.post(COMPLETIONS, json={"prompt": [5]} | noops)).status_code == 200


@pytest.mark.parametrize("fields", [{"best_of": 129}, {"n": 129}])
async def test_a_width_above_the_bound_of_choices_is_refused(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, int]
) -> None:
    """Each output that is followed counts, as each sample of ``best_of`` does."""
    response = await client.post(COMPLETIONS, json={"prompt": [[5], [6]], "use_beam_search": True} | fields)
    (name,) = fields
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, name)
    assert f"{name} is 129" in error["message"] and "at most 256 (--max-choices)" in error["message"]
    assert not engine.requests


async def test_a_search_that_fails_fails_the_request(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reply = None
    engine.refuse = None
    submit = engine.submit

    def submit_and_fail(request: Any) -> Any:
        events = submit(request)
        engine.fail(500, "invalid_logits", "NaN", request.request_id)
        return events

    engine.submit = submit_and_fail  # type: ignore[method-assign]
    response = await client.post(COMPLETIONS, json={"prompt": [5], "use_beam_search": True, "n": 3})
    assert (response.status_code, error_of(response)["code"]) == (500, "invalid_logits")
    assert engine.num_unfinished == 0


async def test_latencies_say_nothing_of_outputs_that_come_as_a_whole(
    client: httpx.AsyncClient, metrics: MetricsCollector, tokenizer: Any
) -> None:
    await client.post(COMPLETIONS, json={"prompt": [5], "use_beam_search": True, "n": 2})
    now = metrics.measured.clock.now()
    assert metrics.measured.ttft.window(now).count == metrics.measured.itl.window(now).count == 0
    assert metrics.measured.e2e.window(now).count == 2

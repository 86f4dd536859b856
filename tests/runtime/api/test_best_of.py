"""``best_of``: more outputs are sampled than are told, and the likeliest per token are."""

from typing import Any

import httpx
import pytest

from flyball_runtime.core.request import TokenLogprobs
from runtime.api.support import error_of
from runtime.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(autouse=True)
def reply(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output i of a prompt is tokens of the id 100 + i, whose log probability is -|i - 2|; so the third is the likeliest."""
    engine.reply = lambda request: [100 + (request.sampling.seed or 0)] * (3 + (request.sampling.seed or 0))

    def logprobs(token_ids: list[int], count: int | None) -> list[TokenLogprobs]:
        return [] if count is None else [TokenLogprobs(one, -abs(one - 102.0), [], []) for one in token_ids]

    monkeypatch.setattr(engine, "_logprobs", logprobs)


async def test_the_likeliest_are_told_in_their_order(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"prompt": [[5], [6]], "n": 2, "best_of": 4, "seed": 0, "max_tokens": 99, "return_token_ids": True}
    answer = (await client.post(COMPLETIONS, json=body)).json()
    assert [choice["token_ids"][0] for choice in answer["choices"]] == [102, 101, 102, 101]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[5], [5], [6], [6]]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": 2, "completion_tokens": 2 * (3 + 4 + 5 + 6)}
    assert len(engine.requests) == 8 and len({request.fork_group for request in engine.requests}) == 2
    assert all(request.sampling.logprobs == 0 for request in engine.requests)


async def test_log_probabilities_are_told_if_asked_for(client: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "best_of": 3, "seed": 1, "logprobs": True}
    (choice,) = (await client.post(CHAT, json=body)).json()["choices"]
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == [0.0] * 5


async def test_an_echo_stays_without_log_probabilities(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = (await client.post(COMPLETIONS, json={"prompt": [5, 6], "best_of": 2, "echo": True, "seed": 1})).json()
    assert answer["choices"][0]["logprobs"] is None
    assert engine.requests[0].sampling.prompt_logprobs is None


async def test_as_many_as_are_told_cost_nothing(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post(COMPLETIONS, json={"prompt": [5], "n": 2, "best_of": 2})
    assert [request.sampling.logprobs for request in engine.requests] == [None, None]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 10**6}, "best_of"),
        ({"best_of": 2, "stream": True}, "stream"),
    ],
)
async def test_what_cannot_be_chosen_from_is_refused(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str
) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": [5]} | fields)
    assert (response.status_code, error_of(response)["param"]) == (400, param), response.text
    assert not engine.requests

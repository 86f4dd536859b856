"""Log probabilities in both endpoints, whole and streamed: one for each token, in OpenAI's shapes."""

from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from runtime.api.support import chat, encode, sse_events
from runtime.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "Hello wörld\u2028é"  # most characters beyond ASCII are two or three tokens


@pytest.fixture
def engine(engine: FakeEngine, tokenizer: PreTrainedTokenizerFast) -> FakeEngine:
    engine.reply = lambda request: encode(tokenizer, TEXT)
    return engine


async def whole(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await client.post(path, json=body | {"stream": True})
    assert len(response.text.splitlines()) == response.text.count("\n"), "no other line ends"
    choices = [event["choices"][0] for event in sse_events(response.text) if event != "[DONE]"]
    return [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]


async def test_chat(client: httpx.AsyncClient, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast) -> None:
    body = chat(logprobs=True, top_logprobs=2)
    choice = await whole(client, CHAT, body)
    assert choice["message"]["content"] == TEXT
    content = choice["logprobs"]["content"]
    assert len(content) == len(encode(tokenizer, TEXT))
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == TEXT
    first = content[0]
    assert first["logprob"] == -0.5 and bytes(first["bytes"]).decode() == first["token"]
    assert [one["logprob"] for one in first["top_logprobs"]] == [-0.5, -1.5]
    assert first["top_logprobs"][0] == {name: first[name] for name in ("token", "logprob", "bytes")}
    assert [entry for part in await streamed(client, CHAT, body) for entry in part["content"]] == content


@pytest.mark.parametrize("count", [0, 3])
async def test_completion(client: httpx.AsyncClient, engine: FakeEngine, count: int) -> None:
    body = {"prompt": "a", "logprobs": count, "max_tokens": 50}
    choice = await whole(client, COMPLETIONS, body)
    logprobs = choice["logprobs"]
    num_tokens = len(logprobs["tokens"])
    assert logprobs["token_logprobs"] == [-0.5] * num_tokens
    assert all(top[token] == -0.5 for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))
    assert all(1 <= len(top) <= max(1, count) for top in logprobs["top_logprobs"])
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:at])) for at in range(num_tokens)]
    parts = await streamed(client, COMPLETIONS, body)
    assert {name: [one for part in parts for one in part[name]] for name in logprobs} == logprobs


async def test_tokens_behind_a_stop_string_have_none(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    choice = await whole(client, CHAT, chat(logprobs=True, stop=" w"))
    content = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "Hello"
    assert "".join(entry["token"] for entry in content).startswith("Hello w") and len(content) < 12
    assert all(entry["top_logprobs"] == [] for entry in content)


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, chat()), (CHAT, chat(logprobs=False, top_logprobs=0)), (COMPLETIONS, {"prompt": "a", "logprobs": False})],
)
async def test_who_does_not_ask_gets_none(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    assert (await whole(client, path, body))["logprobs"] is None
    assert await streamed(client, path, body) == []
    assert engine.requests[0].sampling.logprobs is None

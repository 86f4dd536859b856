"""/v1/embeddings and /v1/score: vectors, forms, pairs, and what is refused."""

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from fastapi import FastAPI
from transformers import PreTrainedTokenizerFast

from flyball_runtime.api import ApiSettings, MetricsCollector, answers, create_app
from flyball_runtime.core.embedder import Embedder
from runtime.api.support import MODEL, asgi_client, encode, error_of, is_a, until
from runtime.fake_engine import FakeEngine, pooled_states

pytestmark = pytest.mark.anyio

MATRYOSHKA = Embedder(pooling="mean", size=4, dimensions=(2,))


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings(served_model_names=(MODEL, "alias"), embedder=Embedder(size=4), max_prompts=3)


def unit(prompt: list[int], size: int = 4) -> np.ndarray:
    vector = np.frombuffer(pooled_states(prompt), np.float32)[:size].astype(np.float64)
    return vector / np.linalg.norm(vector)


def vectors_of(response: httpx.Response) -> np.ndarray:
    assert response.status_code == 200, response.text
    answer = response.json()
    is_a(answers.EmbeddingList, answer)
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return np.array([one["embedding"] for one in answer["data"]])


async def test_every_form_of_input(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    one, two = encode(tokenizer, "Hello"), encode(tokenizer, "the fox")
    for given, prompts in [
        ("Hello", [one]),
        (["Hello", "the fox"], [one, two]),
        (one, [one]),
        ([one, two, [5]], [one, two, [5]]),
    ]:
        response = await client.post("/v1/embeddings", json={"model": MODEL, "input": given})
        vectors = vectors_of(response)
        assert vectors == pytest.approx(np.array([unit(prompt) for prompt in prompts]), abs=1e-6)
        assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0)
        num_tokens = sum(map(len, prompts))
        usage = response.json()["usage"]
        assert (usage["prompt_tokens"], usage["total_tokens"]) == (num_tokens, num_tokens)
    assert {request.pooling for request in engine.requests} == {"last"}


async def test_the_openai_client_in_both_encodings(app: FastAPI) -> None:
    async with asgi_client(app) as http:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http)
        plain = await client.embeddings.create(model=MODEL, input=["Hello", "the fox"], encoding_format="float")
        packed = await client.embeddings.create(model=MODEL, input=["Hello", "the fox"])
    for one, other in zip(plain.data, packed.data, strict=True):
        assert len(one.embedding) == 4
        assert one.embedding == pytest.approx(other.embedding, abs=1e-7)
    assert plain.usage == packed.usage


async def test_base64_is_of_little_endian_floats(client: httpx.AsyncClient) -> None:
    body = {"input": [[5, 6]], "encoding_format": "base64"}
    (one,) = (await client.post("/v1/embeddings", json=body)).json()["data"]
    assert np.frombuffer(base64.b64decode(one["embedding"]), "<f4") == pytest.approx(unit([5, 6]), abs=1e-6)


@pytest.fixture
async def cut(
    engine: FakeEngine, tokenizer: PreTrainedTokenizerFast, metrics: MetricsCollector
) -> AsyncIterator[httpx.AsyncClient]:
    """Of a model that may be cut to 2 entries."""
    app = create_app(engine, tokenizer, ApiSettings(served_model_names=(MODEL,), embedder=MATRYOSHKA), metrics)
    async with asgi_client(app) as client:
        yield client


async def test_dimensions_that_the_model_was_trained_for(cut: httpx.AsyncClient, engine: FakeEngine) -> None:
    for size in (2, 4):
        vectors = vectors_of(await cut.post("/v1/embeddings", json={"input": [[5, 6]], "dimensions": size}))
        assert vectors[0] == pytest.approx(unit([5, 6], size), abs=1e-6), "cut, then of length 1"
    assert engine.requests[-1].pooling == "mean"
    refused = error_of(await cut.post("/v1/embeddings", json={"input": [[5, 6]], "dimensions": 3}))
    assert refused["param"] == "dimensions" and "trained for 2" in refused["message"]


@pytest.mark.parametrize(
    ("fields", "pairs"),
    [
        ({"text_1": "a", "text_2": "b"}, [("a", "b")]),
        ({"text_1": "a", "text_2": ["b", "c"]}, [("a", "b"), ("a", "c")]),
        ({"queries": ["a"], "documents": ["b", "c"]}, [("a", "b"), ("a", "c")]),
        ({"data_1": ["a", "b"], "data_2": ["b", "a"]}, [("a", "b"), ("b", "a")]),
    ],
)
async def test_scores_are_the_cosines_of_pairs(
    fields: dict[str, Any],
    pairs: list[tuple[str, str]],
    engine: FakeEngine,
    tokenizer: PreTrainedTokenizerFast,
    metrics: MetricsCollector,
) -> None:
    app = create_app(engine, tokenizer, ApiSettings(served_model_names=(MODEL,)), metrics)
    async with asgi_client(app) as client:
        response = await client.post("/v1/score", json=fields | {"model": MODEL})
    assert response.status_code == 200, response.text
    is_a(answers.ScoreList, response.json())
    expected = [float(unit(encode(tokenizer, one)) @ unit(encode(tokenizer, other))) for one, other in pairs]
    assert [one["score"] for one in response.json()["data"]] == pytest.approx(expected, abs=1e-6)


EMBED, SCORE = "/v1/embeddings", "/v1/score"


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (EMBED, {}, "input", "missing required field"),
        (EMBED, {"input": ""}, "input", "0 tokens"),
        (EMBED, {"input": []}, "input", "input is empty"),
        (EMBED, {"input": ["a", ""]}, "input", "0 tokens"),
        (EMBED, {"input": ["a", 5]}, "input", "mixes"),
        (EMBED, {"input": 5}, "input", "Expected `str | array`"),
        (EMBED, {"input": {"text": "a"}}, "input", "Expected `str | array`"),
        (EMBED, {"input": [[5], []]}, "input", "0 tokens"),
        (EMBED, {"input": [5, 99999]}, "input", "token id 99999"),
        (EMBED, {"input": "a " * 2000}, "input", "this model takes 1024"),
        (EMBED, {"input": [5] * 1025}, "input", "1025 tokens; this model takes 1024"),
        (EMBED, {"input": ["a"] * 4}, "input", "input has 4 entries; 1 to 3 are allowed"),
        (EMBED, {"input": "a", "encoding_format": "hex"}, "encoding_format", "hex"),
        (EMBED, {"input": "a", "dimensions": 2}, "dimensions", "not trained to be cut from 4"),
        (EMBED, {"input": "a", "dimensions": 0}, "dimensions", "dimensions is 0"),
        (EMBED, {"input": "a", "dimensions": "2"}, "dimensions", "Expected `int"),
        (EMBED, {"input": "a", "messages": []}, "messages", "not supported"),
        (EMBED, {"input": "a", "normalize": False}, "normalize", "not supported"),
        (EMBED, {"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
        (EMBED, {"input": "a", "max_tokens": 5}, "max_tokens", "unknown field"),
        (EMBED, {"input": "a", "cache_salt": ""}, "cache_salt", "0 characters"),
        (SCORE, {}, "text_1", "missing required field"),
        (SCORE, {"text_1": "a"}, "text_2", "missing required field"),
        (SCORE, {"text_1": "a", "documents": "b"}, "documents", "unknown field"),
        (SCORE, {"text_1": ["a", "b"], "text_2": "c"}, "text_1", "2 texts and text_2 has 1"),
        (SCORE, {"text_1": [], "text_2": []}, "text_1", "text_1 is an empty list"),
        (SCORE, {"text_1": "a", "text_2": []}, "text_2", "text_2 is an empty list"),
        (SCORE, {"text_1": "a", "text_2": ["b"] * 3}, "text_2", "text_2 has 4 entries"),
        (SCORE, {"text_1": "a", "text_2": ["b"] * 4}, "text_2", "text_2 has 4 entries"),
        (SCORE, {"text_1": "a", "text_2": ""}, "text_2", "0 tokens"),
        (SCORE, {"text_1": "", "text_2": "a"}, "text_1", "0 tokens"),
        (SCORE, {"text_1": "a " * 2000, "text_2": "b"}, "text_1", "takes 1024. Shorten the prompt or raise"),
        (SCORE, {"text_1": "a", "text_2": [5]}, "text_2[0]", "Expected `str`"),
    ],
)
async def test_bad_input(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["param"] or "").startswith(param) or f"`{param}`" in error["message"], error
    assert message in error["message"]
    assert not engine.requests


async def test_another_model_is_not_served(client: httpx.AsyncClient) -> None:
    assert (await client.post(EMBED, json={"input": "a", "model": "other"})).status_code == 404


async def test_priority_deadline_and_salt_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"input": [[5], [6]], "priority": 3, "e2e_deadline_ms": 40.0, "cache_salt": "secret"}
    await client.post(EMBED, json=body, headers={"X-Priority": "2"})
    seen = {(one.priority, one.e2e_deadline_ms, one.cache_salt) for one in engine.requests}
    assert seen == {(2, 40.0, "secret")}


async def test_a_failure_of_one_prompt_is_the_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reply = None
    pending = asyncio.create_task(client.post(EMBED, json={"input": [[5], [6]]}))
    await until(lambda: len(engine.requests) == 2)
    engine.fail(500, "invalid_hidden_states", "NaN", engine.requests[1].request_id)
    response = await pending
    assert (response.status_code, error_of(response)["code"]) == (500, "invalid_hidden_states")
    assert engine.aborted == [engine.requests[0].request_id]


async def test_metrics_count_them_as_finished(client: httpx.AsyncClient) -> None:
    await client.post(EMBED, json={"input": [[5, 6], [7]]})
    text = (await client.get("/metrics")).text
    assert 'flyball_requests_total{outcome="stop"} 2.0' in text
    assert "flyball_generation_tokens_total 0.0" in text

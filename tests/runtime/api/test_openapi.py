"""/openapi.json tells the truth: about paths, fields, bounds and answers."""

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from flyball_protocol import endpoints
from flyball_runtime.api import ApiSettings, MetricsCollector, answers, create_app, openapi, responses, schemas
from flyball_runtime.api.anthropic_messages import MessagesRequest
from flyball_runtime.api.keys import ApiKeys
from flyball_runtime.core.clock import FakeClock
from runtime.api.support import MODEL, asgi_client, chat, error_of, is_a, sse_events
from runtime.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

SETTINGS = ApiSettings(served_model_names=(MODEL,))
DOCUMENT = openapi.document(SETTINGS, needs_key=False)
COMPLETION = {"prompt": [5], "max_tokens": 4}


def test_every_path_is_documented_and_every_documented_path_exists(app: FastAPI) -> None:
    served = {
        (route.path.replace(":path", ""), method.lower())
        for route in app.routes
        if isinstance(route, APIRoute) and route.path not in (endpoints.OPENAPI_PATH, endpoints.DOCS_PATH)
        for method in route.methods - {"HEAD"}
    }
    documented = {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert documented == served, "OPERATIONS in api/openapi.py describes the routes"


@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True, "n": 2}])
@pytest.mark.parametrize("logprobs", [False, True])
async def test_answers_are_of_the_documented_kinds(
    client: httpx.AsyncClient, fields: dict[str, Any], logprobs: bool
) -> None:
    likeliest = {"logprobs": True, "top_logprobs": 2} if logprobs else {}
    asked = chat() | fields | likeliest
    stream = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    is_a(answers.ChatAnswer, (await client.post("/v1/chat/completions", json=asked)).json())
    *events, _ = sse_events((await client.post("/v1/chat/completions", json=asked | stream)).text)
    for event in events:
        is_a(answers.ChatChunk, event)
    asked = COMPLETION | fields | ({"logprobs": 2} if logprobs else {})
    is_a(answers.CompletionAnswer, (await client.post("/v1/completions", json=asked)).json())
    *events, _ = sse_events((await client.post("/v1/completions", json=asked | stream)).text)
    for event in events:
        is_a(answers.CompletionAnswer, event)


async def test_smaller_answers_are_of_the_documented_kinds(client: httpx.AsyncClient) -> None:
    is_a(answers.ModelList, (await client.get("/v1/models")).json())
    is_a(answers.ModelCard, (await client.get(f"/v1/models/{MODEL}")).json())
    is_a(answers.Status, (await client.get("/livez")).json())
    is_a(answers.Tokens, (await client.post("/tokenize", json={"prompt": "a", "return_token_strs": True})).json())
    is_a(answers.DetokenizedText, (await client.post("/detokenize", json={"tokens": [5]})).json())
    is_a(answers.EmbeddingList, (await client.post("/v1/embeddings", json={"input": "a"})).json())
    is_a(answers.ScoreList, (await client.post("/v1/score", json={"text_1": "a", "text_2": "b"})).json())
    is_a(answers.Error, (await client.get("/v1/models/other")).json())


async def test_embeddings_and_scores_keep_to_their_bounds(client: httpx.AsyncClient) -> None:
    fields = DOCUMENT["components"]["schemas"]["EmbeddingRequest"]["properties"]
    assert fields["dimensions"]["enum"] == [None, SETTINGS.embedder.size], "this one cannot be cut"
    for path, kind, body in (
        ("/v1/embeddings", "EmbeddingRequest", {"input": [5]}),
        ("/v1/score", "ScoreRequest", {"text_1": "a", "text_2": "b"}),
    ):
        fields = DOCUMENT["components"]["schemas"][kind]["properties"]
        for name in set(fields) - {"dimensions", "model"}:
            for value in beyond(fields[name]):
                response = await client.post(path, json=body | {name: value})
                assert (response.status_code, error_of(response)["param"]) == (400, name), value
            for value in [*within(fields[name]), *fields[name].get("enum", ())]:
                response = await client.post(path, json=body | {name: value})
                assert response.status_code == 200, (name, value, response.text)


async def test_metrics_come_in_the_documented_formats(client: httpx.AsyncClient) -> None:
    documented = DOCUMENT["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    came = [(await client.get("/metrics", headers={"Accept": media})).headers["content-type"] for media in documented]
    assert [one.partition(";")[0] for one in came] == list(documented)


def beyond(field: dict[str, Any]) -> list[Any]:
    """Values that a field's bounds exclude."""
    found = [field[bound] + step for bound, step in (("minimum", -1), ("maximum", 1)) if bound in field]
    if "exclusiveMinimum" in field:
        found.append(field["exclusiveMinimum"])
    if "maxLength" in field:
        found += ["", "a" * (field["maxLength"] + 1)]
    return found


def within(field: dict[str, Any]) -> list[Any]:
    """Values at the edges of a field's bounds."""
    found = [field[bound] for bound in ("minimum", "maximum") if bound in field]
    return [*found, "a" * field["maxLength"]] if "maxLength" in field else found


@pytest.mark.parametrize(
    "kind", [schemas.ChatRequest, schemas.CompletionRequest, responses.ResponseRequest, MessagesRequest]
)
async def test_bounds_are_those_that_are_checked(client: httpx.AsyncClient, kind: type) -> None:
    fields = DOCUMENT["components"]["schemas"][kind.__name__]["properties"]
    path, body = {
        schemas.ChatRequest: ("/v1/chat/completions", chat(logprobs=True)),
        schemas.CompletionRequest: ("/v1/completions", dict(COMPLETION)),
        responses.ResponseRequest: ("/v1/responses", {"input": "Hi"}),
        MessagesRequest: ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}),
    }[kind]
    num_checked = 0
    for name, field in fields.items():
        for value in beyond(field):
            response = await client.post(path, json=body | {name: value})
            assert response.status_code == 400, (name, value)
            error = response.json()["error"] if kind is MessagesRequest else error_of(response)
            assert error["param"] in (name, "max_tokens"), "which max_completion_tokens is"
            num_checked += 1
        for value in within(field):
            if name not in ("max_tokens", "max_completion_tokens", "max_output_tokens"):  # each alone
                response = await client.post(path, json=body | {name: value})
                assert response.status_code == 200, (name, value, response.text)
        for value in field.get("enum", ()):
            assert (await client.post(path, json=body | {name: value})).status_code == 200, (name, value)
    assert num_checked > (10 if kind is MessagesRequest else 20)


def test_each_field_says_what_it_is_for() -> None:
    obvious = {"model", "n", "stream", "stream_options", "max_completion_tokens", "messages", "top_logprobs"}
    kinds = ("EmbeddingRequest", "ScoreRequest", "ScoreDocumentsRequest", "ScoreDataRequest", "TokenCountRequest")
    for kind in ("ChatRequest", "CompletionRequest", "ResponseRequest", "MessagesRequest", *kinds):
        fields = DOCUMENT["components"]["schemas"][kind]["properties"]
        assert {name for name, field in fields.items() if "description" not in field} <= obvious


def test_fields_say_what_they_are_for_in_the_words_of_the_docstrings() -> None:
    fields = DOCUMENT["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["tools"]["description"] == "what the model may call."
    assert fields["cache_salt"]["description"].startswith("keeps the prefix cache"), "of a parent"
    assert fields["temperature"]["description"].startswith("at most 2;"), "of SamplingParams"
    assert "parameters" in str(DOCUMENT["components"]["schemas"]["Function"]), "of another module"


async def test_docs_load_nothing_from_elsewhere(client: httpx.AsyncClient) -> None:
    assert (await client.get(endpoints.OPENAPI_PATH)).json()["paths"] == DOCUMENT["paths"]
    response = await client.get(endpoints.DOCS_PATH)
    assert response.headers["content-type"].startswith("text/html")
    assert "//" not in response.text and "<script" not in response.text and "src=" not in response.text
    for path in DOCUMENT["paths"]:
        assert f" {path}</code>" in response.text
    for name in DOCUMENT["components"]["schemas"]:
        assert f'id="{name}"' in response.text


async def test_a_server_with_keys_documents_them_and_shows_its_docs_to_all(
    engine: FakeEngine, tokenizer: Any, metrics: MetricsCollector
) -> None:
    async with asgi_client(app_with_key(engine, tokenizer, metrics)) as client:
        document = (await client.get(endpoints.OPENAPI_PATH)).json()
        assert (await client.get(endpoints.DOCS_PATH)).status_code == 200
    chats, probe = document["paths"]["/v1/chat/completions"]["post"], document["paths"]["/livez"]["get"]
    assert "401" in chats["responses"]
    assert "security" not in probe and "401" not in probe["responses"]
    assert "securitySchemes" not in json.dumps(DOCUMENT)


async def test_a_key_is_taken_in_each_way_that_is_documented(
    engine: FakeEngine, tokenizer: Any, metrics: MetricsCollector
) -> None:
    async with asgi_client(app_with_key(engine, tokenizer, metrics)) as client:
        document = (await client.get(endpoints.OPENAPI_PATH)).json()
        schemes = document["components"]["securitySchemes"]
        assert len(schemes) == 2
        headers = {name: headers_of(scheme) for name, scheme in schemes.items()}
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                ways = [name for one in operation.get("security", []) for name in one]
                needs_none = (await client.request(method, path, json={})).status_code != 401
                assert needs_none == (not ways), path
                for name in ways:
                    assert (await client.request(method, path, json={}, headers=headers[name])).status_code != 401


def app_with_key(engine: FakeEngine, tokenizer: Any, metrics: MetricsCollector) -> FastAPI:
    return create_app(engine, tokenizer, SETTINGS, metrics, ApiKeys(None, "key-of-a-test", FakeClock()))


def headers_of(scheme: dict[str, str]) -> dict[str, str]:
    """What a client sends that has read of this scheme."""
    if scheme["type"] == "apiKey":
        assert scheme["in"] == "header"
        return {scheme["name"]: "key-of-a-test"}
    assert scheme == {"type": "http", "scheme": "bearer"}
    return {"Authorization": "Bearer key-of-a-test"}


async def test_both_pages_can_be_left_out(engine: FakeEngine, tokenizer: Any, metrics: MetricsCollector) -> None:
    app = create_app(engine, tokenizer, ApiSettings(served_model_names=(MODEL,), disable_docs=True), metrics)
    async with asgi_client(app) as client:
        for path in (endpoints.OPENAPI_PATH, endpoints.DOCS_PATH):
            assert (await client.get(path)).status_code == 404

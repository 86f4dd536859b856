"""Fields that ask for a form of the output: what they become, and what is refused."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from flyball_runtime.api import ApiSettings, MetricsCollector, create_app
from flyball_runtime.core.grammar import ANY_OBJECT, MAX_GRAMMAR_CHARS, Grammar
from flyball_runtime.grammar.checker import GrammarChecker
from flyball_runtime.grammar.compiler import lowered
from runtime.api.support import asgi_client, chat, error_of
from runtime.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

CHECKPOINT = Path(__file__).parents[3] / "examples" / "demo_model" / "checkpoint"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}, "required": ["b"]}
NAMED = {"name": "x", "description": "y", "strict": True, "schema": SCHEMA}


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarChecker]:
    grammars = GrammarChecker(CHECKPOINT, timeout_s=5.0)
    yield grammars
    grammars.close()


@pytest.fixture
async def structured(
    engine: FakeEngine,
    tokenizer: PreTrainedTokenizerFast,
    metrics: MetricsCollector,
    grammars: GrammarChecker,
) -> AsyncIterator[httpx.AsyncClient]:
    settings = ApiSettings(served_model_names=("test-model",))
    async with asgi_client(create_app(engine, tokenizer, settings, metrics, grammars=grammars)) as client:
        yield client


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, Grammar("json", json.dumps(SCHEMA))),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json", json.dumps(SCHEMA))),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Grammar("json", json.dumps(SCHEMA))),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            Grammar("json", json.dumps(SCHEMA), ""),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
            Grammar("json", json.dumps(SCHEMA), " ?"),
        ),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"structured_outputs": {"regex": "a+", "json_object": False}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["é", "b c"]}}, Grammar("choice", '["é", "b c"]')),
        ({"structured_outputs": {"grammar": 'start: "a"', "json": None}}, Grammar("grammar", 'start: "a"')),
        ({"structured_outputs": None, "response_format": None, "guided_json": None}, None),
    ],
    ids=str,
)
async def test_what_the_fields_mean(
    structured: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    for path, body in ((CHAT, chat(**fields)), (COMPLETIONS, {"prompt": "a", **fields})):
        response = await structured.post(path, json=body)
        assert response.status_code == 200, response.text
        sent = engine.requests[-1].sampling.grammar
        if grammar is not None and grammar.kind == "json":
            grammar = Grammar("json", json.dumps(json.loads(grammar.text), separators=(",", ":")), grammar.whitespace)
        assert sent == (None if grammar is None else lowered(grammar))


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "no json_schema.schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "structural_tag"),
        ({"response_format": "json"}, "response_format", "object"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "both",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "asks for nothing"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "'regex', 'choice'"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "empty"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "empty"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "an empty choice"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice", "array"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json", "a JSON list"),
        ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json", "not JSON"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs", "not for regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "null"),
        ({"structured_outputs": {"json": {}, "disable_additional_properties": True}}, None, "disable_additional"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "jsn"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"json": {"type": "strng"}}}, "structured_outputs", "strng"),
        (
            {"structured_outputs": {"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}},
            "structured_outputs",
            str(MAX_GRAMMAR_CHARS),
        ),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "has an end"),
        ({"guided_json": {}}, "guided_json", "structured_outputs.json"),
        ({"guided_choice": ["a"]}, "guided_choice", "structured_outputs.choice"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_what_is_refused(
    structured: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str | None, says: str
) -> None:
    response = await structured.post(COMPLETIONS, json={"prompt": "a", **fields})
    error = error_of(response)
    assert response.status_code == 400
    assert param is None or error["param"] == param
    assert says in error["message"] and len(error["message"]) < 600
    assert not engine.requests


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (
            CHAT,
            chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "strng"}}}),
            "response_format",
        ),
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strng"}}}},
            "text.format",
        ),
    ],
)
async def test_the_field_that_the_schema_came_in_is_named(
    structured: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    error = error_of(await structured.post(path, json=fields))
    assert error["param"] == param and "Invalid type: strng" in error["message"]


async def test_a_stream_is_refused_before_it_begins(structured: httpx.AsyncClient, metrics: MetricsCollector) -> None:
    fields = {"stream": True, "structured_outputs": {"regex": "(b"}}
    response = await structured.post(CHAT, json=chat(**fields))
    assert response.status_code == 400 and "unclosed group" in error_of(response)["message"]


async def test_without_a_checkpoint_nothing_is_structured(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json=chat(response_format={"type": "json_object"}))
    assert response.status_code == 400 and "not served here" in error_of(response)["message"]


async def test_an_output_with_a_form_is_content_without_reasoning(
    engine: FakeEngine, tokenizer: PreTrainedTokenizerFast, metrics: MetricsCollector, grammars: GrammarChecker
) -> None:
    """The format's outputs may begin inside the reasoning, without a mark."""
    settings = ApiSettings(served_model_names=("test-model",), reasoning_parser="deepseek_r1")
    async with asgi_client(create_app(engine, tokenizer, settings, metrics, grammars=grammars)) as client:
        response = await client.post(CHAT, json=chat(response_format={"type": "json_object"}))
    assert response.json()["choices"][0]["message"]["content"] == "Hello world"

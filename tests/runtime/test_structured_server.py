"""Structured output from a real server: streamed, with several choices, through OpenAI's client, beside other requests."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from replicas import Replica, replica
from runtime.api.support import sse_events

pytestmark = pytest.mark.slow

CHECKPOINT = Path(__file__).parents[2] / "examples" / "demo_model" / "checkpoint"
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 9},
        "b": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=[(), ("--async-scheduling",)], ids=["plain", "async"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with replica(CHECKPOINT, *request.param, log=tmp_path_factory.mktemp("log") / "server.log") as running:
        yield running


def ask(server: Replica, **fields: Any) -> dict[str, Any]:
    body = {"model": "test", "prompt": "Count to 20.", "max_tokens": 120, "temperature": 0.0}
    response = server.client.post("/v1/completions", json=body | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_stream_of_several_choices(server: Replica) -> None:
    body = {
        "messages": [{"role": "user", "content": "Who are you?"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
        "stream": True,
        "n": 3,
        "seed": 4,
        "max_tokens": 400,
    }
    response = server.client.post("/v1/chat/completions", json=body)
    texts, reasons = ["", "", ""], set()
    for event in sse_events(response.text)[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
        reasons.add(choice["finish_reason"])
    assert reasons == {None, "stop"}
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_rows_with_and_without_a_form_get_what_they_get_alone(server: Replica) -> None:
    wanted: list[dict[str, Any]] = [
        {"structured_outputs": {"regex": r"[a-z]{4}\d"}},
        {},
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}, "temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 2},
        {"structured_outputs": {"choice": ["left", "right"]}, "logprobs": 2},
    ]
    alone = [ask(server, **fields)["choices"] for fields in wanted]
    with ThreadPoolExecutor(10) as threads:
        together = list(threads.map(lambda fields: ask(server, **fields)["choices"], wanted * 2))
    assert together == alone * 2
    assert re.fullmatch(r"[a-z]{4}\d", alone[0][0]["text"])
    assert alone[4][0]["text"] in ("left", "right")


class Person(BaseModel):
    name: str = Field(max_length=8)
    is_tall: bool


def test_openais_client_parses_what_it_asks_for(server: Replica) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "Who are you?"}]
    answer = client.chat.completions.parse(
        model="test", messages=messages, response_format=Person, max_tokens=400, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"enum": [1]}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


def test_costly_forms_are_met_beside_requests_without_any(server: Replica) -> None:
    """Ten thousand values, depth, and expressions on which a matcher that backtracks takes exponential time."""
    values = [f"value {one}" for one in range(10_000)]
    plain = ask(server)["choices"]
    wanted: list[dict[str, Any]] = [
        {"json": {"enum": values}},
        {"json": nested(10), "disable_any_whitespace": True},
        {"regex": "(x+x+)+y"},
        {"regex": "([ab]*)*c"},
    ]
    with ThreadPoolExecutor(8) as threads:
        forms = threads.map(lambda form: ask(server, structured_outputs=form)["choices"][0], wanted)
        others = list(threads.map(lambda _: ask(server)["choices"], range(4)))
        listed, deep, *matched = forms
    assert others == [plain] * 4
    assert json.loads(listed["text"]) in values
    jsonschema.validate(json.loads(deep["text"]), nested(10))
    for choice, expression in zip(matched, ("x+y?", "[ab]*c?"), strict=True):
        assert re.fullmatch(expression, choice["text"]), choice
        assert choice["finish_reason"] == ("stop" if choice["text"][-1] in "yc" else "length")


def test_depth_beyond_the_bound_is_refused_before_it_is_decoded(server: Replica) -> None:
    body = {"prompt": "a", "structured_outputs": {"json": nested(40)}}
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == 400 and "64" in response.json()["error"]["message"], response.text


def test_a_hostile_schema_is_refused_and_the_server_lives(server: Replica) -> None:
    chain: dict[str, Any] = {
        f"r{one}": {"properties": {"a": {"$ref": f"#/$defs/r{one + 1}"}}, "required": ["a"]} for one in range(2000)
    }
    body = {"prompt": "a", "structured_outputs": {"json": {"$defs": chain, "$ref": "#/$defs/r0"}}}
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == 400, response.text
    assert ask(server, structured_outputs={"choice": ["ok"]})["choices"][0]["text"] == "ok"

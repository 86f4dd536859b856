"""tool_choice required and named: the schema that the output must have, and the calls that are made of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from flyball_runtime.api import MetricsCollector
from flyball_runtime.api.forced_calls import calls_or_answer, forced_schema
from flyball_runtime.api.messages import Function, FunctionName, NamedTool, Tool
from flyball_runtime.core.grammar import ANY_OBJECT
from flyball_runtime.grammar.checker import GrammarChecker
from flyball_runtime.grammar.compiler import GrammarCompiler, lowered
from runtime.api.chats import ARGUMENTS, CALLS, TIME, WEATHER, Chats, openai_client
from runtime.api.support import MODEL, error_of

pytestmark = pytest.mark.anyio

CHECKPOINT = Path(__file__).parents[3] / "examples" / "demo_model" / "checkpoint"
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarChecker]:
    grammars = GrammarChecker(CHECKPOINT, timeout_s=60.0)
    yield grammars
    grammars.close()


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    compiler = GrammarCompiler.of_checkpoint(CHECKPOINT)
    assert compiler is not None
    return compiler


def tool(name: str, parameters: dict[str, Any] | None = None) -> Tool:
    return Tool(type="function", function=Function(name=name, parameters=parameters))


TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "$defs": {
        "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "value": {"type": "integer"}}}
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("output", "is_valid"),
    [
        ([{"name": "tree", "parameters": {"root": {"next": {"value": 1}}}}], True),
        ([{"name": "tree", "parameters": {"root": {"next": {"value": "a"}}}}], False),
        ([{"name": "tree", "parameters": {}}, {"name": "time", "parameters": {}}], True),
        ([{"name": "time", "parameters": {"a": 1}}], False),
        ([{"name": "other", "parameters": {}}], False),
        ([{"name": "time"}], False),
        ([], False),
    ],
)
def test_a_list_of_calls(output: Any, is_valid: bool) -> None:
    schema = forced_schema([tool("tree", TREE), tool("time")], None, one_call=False)
    assert jsonschema.Draft202012Validator(schema).is_valid(output) == is_valid
    schema = forced_schema([tool("tree", TREE), tool("time")], None, one_call=True)
    assert jsonschema.Draft202012Validator(schema).is_valid(output) == (is_valid and len(output) == 1)


def test_a_named_call() -> None:
    choice = NamedTool(type="function", function=FunctionName(name="tree"))
    assert forced_schema([tool("time"), tool("tree", TREE)], choice, one_call=False) == TREE


@pytest.fixture
def chats(metrics: MetricsCollector, grammars: GrammarChecker) -> Chats:
    return Chats("qwen", metrics, grammars)


async def test_required(chats: Chats) -> None:
    chats.outputs = [
        json.dumps([{"name": "weather", "parameters": json.loads(ARGUMENTS)}, {"name": "time", "parameters": {}}])
    ]
    choice = await chats.answer(tool_choice="required")
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [call["name"] for call in calls] == ["weather", "time"] and choice["finish_reason"] == "tool_calls"
    assert json.loads(calls[0]["arguments"]) == json.loads(ARGUMENTS)
    grammar = chats.engine.requests[0].sampling.grammar
    assert grammar is not None and grammar.kind == "compiled"
    assert "<tools>" in chats.prompt()


async def test_a_form_of_the_answer_does_not_hold_for_calls(chats: Chats) -> None:
    await chats.answer(tool_choice="required")
    forced = chats.engine.requests[0].sampling.grammar
    await chats.answer(tool_choice="required", response_format={"type": "json_object"})
    assert chats.engine.requests[-1].sampling.grammar == forced


async def test_named(chats: Chats) -> None:
    chats.outputs = [ARGUMENTS]
    choice = await chats.answer(tool_choice=NAMED)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": ARGUMENTS} and choice["finish_reason"] == "stop"


async def test_a_form_of_the_answer_leaves_no_room_for_reasoning_or_markers(chats: Chats) -> None:
    chats.outputs = ['{"a": "<think>"}']
    choice = await chats.answer(response_format={"type": "json_object"})
    assert choice["message"]["content"] == '{"a": "<think>"}'


STRICT = {"type": "function", "function": {"name": "tree", "parameters": TREE, "strict": True}}
A_CALL = '<tool_call>\n{"name": "weather", "arguments": {"anything": 1}}\n</tool_call>'
A_STRICT_CALL = '<tool_call>{"name": "tree", "arguments": {"root": {"value": 1}}}</tool_call>'
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {}}}}}


@pytest.mark.parametrize(
    ("output", "fits"),
    [
        ('{"a": "<tool_call>"}', True),
        (A_CALL, True),
        (A_STRICT_CALL, True),
        (f"{A_CALL}\n{A_STRICT_CALL}", True),
        ("Hello", False),
        ('{"a": 1}' + A_CALL, False),
        (A_CALL.replace("weather", "unknown"), False),
        (A_CALL.replace('"name": ', '"name":  '), False),
        (A_STRICT_CALL.replace("1", '"a"'), False),
    ],
)
async def test_with_a_form_an_output_has_it_or_is_calls(
    chats: Chats, compiler: GrammarCompiler, output: str, fits: bool
) -> None:
    for only_one in (None, False):
        await chats.post(tools=[WEATHER, TIME, STRICT], response_format=FORM, parallel_tool_calls=only_one)
        grammar = chats.engine.requests[-1].sampling.grammar
        assert grammar is not None
        matcher, ids = compiler.compile(grammar).matcher(), compiler.tokenize(output)
        taken = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        assert taken == (fits and (only_one is None or output.count("</tool_call>") <= 1))


def test_markers_may_be_special_tokens(compiler: GrammarCompiler) -> None:
    grammar = calls_or_answer(ANY_OBJECT, [tool("time")], "<[300]>", "<[301]>", one_call=True)
    matcher = compiler.compile(grammar).matcher()
    call = [300, *compiler.tokenize('{"name": "time", "arguments": {}}'), 301]
    assert matcher.try_consume_tokens(call) == len(call) and matcher.is_accepting()


async def test_what_such_an_output_becomes(chats: Chats) -> None:
    chats.outputs = [CALLS["qwen"]]
    choice = await chats.answer(response_format=FORM)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": ARGUMENTS}
    assert choice["finish_reason"] == "tool_calls"
    chats.outputs = [json.dumps({"a": CALLS["qwen"]})]
    choice = await chats.answer(response_format=FORM)
    assert json.loads(choice["message"]["content"]) == {"a": CALLS["qwen"]} and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none", "response_format": {"type": "json_object"}},
        {"tools": ..., "response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ],
)
async def test_where_no_call_may_come_the_form_is_all(chats: Chats, fields: dict[str, Any]) -> None:
    await chats.post(**fields)
    assert chats.engine.requests[-1].sampling.grammar == lowered(ANY_OBJECT)


@pytest.mark.parametrize("style", ["llama", "mistral"])
async def test_other_formats_of_calls_leave_it_at_the_form(
    metrics: MetricsCollector, grammars: GrammarChecker, style: str
) -> None:
    chats = Chats(style, metrics, grammars)
    await chats.post(response_format={"type": "json_object"})
    assert chats.engine.requests[-1].sampling.grammar == lowered(ANY_OBJECT)


async def test_options_of_a_form_that_are_none_are_refused(chats: Chats) -> None:
    schema = {"type": "object", "x-guidance": 5}
    response = await chats.post(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    assert (response.status_code, error_of(response)["param"]) == (400, "response_format")


async def test_the_openai_client(chats: Chats) -> None:
    chats.outputs = [json.dumps([{"name": "time", "parameters": {}}])]
    settings: Any = {"model": MODEL, "tools": [WEATHER, TIME], "tool_choice": "required"}
    async with openai_client(chats) as client:
        messages: Any = [{"role": "user", "content": "Hi"}]
        async with client.chat.completions.stream(messages=messages, **settings) as stream:
            (call,) = (await stream.get_final_completion()).choices[0].message.tool_calls or ()
        assert (call.function.name, call.function.arguments) == ("time", "{}")
        flat: Any = [{"name": "time", "type": "function"}]
        response = await client.responses.create(model=MODEL, input="Hi", tools=flat, tool_choice="required")
        assert response.output[0].type == "function_call" and response.output[0].name == "time"


async def test_the_format_of_a_response(chats: Chats) -> None:
    chats.outputs = ['{"a": "<think>"}']
    format = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    body = {"input": "Hi", "text": {"format": format}}
    response = (await chats.client.post("/v1/responses", json=body)).json()
    assert response["output"][0]["content"][0]["text"] == '{"a": "<think>"}'
    assert response["text"]["format"]["schema"] == format["schema"] and chats.engine.requests[0].sampling.grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"allOf": [{"type": "string"}]}}}]},
            "tools",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/$defs/x"}}}]}, "tools"),
    ],
)
async def test_calls_that_cannot_be_forced(chats: Chats, fields: dict[str, Any], param: str) -> None:
    response = await chats.post(tool_choice="required", **fields)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param), error

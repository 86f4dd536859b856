"""/v1/messages: whole and streamed, with tools and thinking, in Anthropic's form."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

from flyball_runtime.api import ApiSettings
from flyball_runtime.api.answers import MessageAnswer, MessageError, TokenCount
from flyball_runtime.api.anthropic_messages import MessagesRequest, chat_of_messages
from flyball_runtime.api.server import convert
from flyball_runtime.core.errors import Draining, QueueFull
from runtime.api.chats import CALLS, SCHEMA, Chats
from runtime.api.support import MODEL, encode, is_a, served, sse_events, until

pytestmark = pytest.mark.anyio

PATH = "/v1/messages"
WEATHER = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
INPUT = {"city": "Zürich", "days": [1, 2]}
REASONED = f"<think>Hm.</think>See:{CALLS['qwen']}"
USER = {"role": "user", "content": "Hi"}


async def post(chats: Chats, path: str = PATH, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [USER], "max_tokens": 500} | fields
    return await chats.client.post(path, json={name: value for name, value in body.items() if value is not ...})


async def answer(chats: Chats, **fields: Any) -> dict[str, Any]:
    """The message, which is the same streamed."""
    response = await post(chats, **fields)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()
    is_a(MessageAnswer, message)
    streamed = joined((await post(chats, **fields, stream=True)).text)
    assert without_ids(streamed) == without_ids(message)
    return message


def joined(text: str) -> dict[str, Any]:
    """The message that the events of a stream add up to, as Anthropic's client adds them."""
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    events = sse_events(text)
    assert names == [event["type"] for event in events]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    message: dict[str, Any] = events[0]["message"]
    for event in events[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"] | {"json": ""})
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                name = "json" if delta["type"] == "input_json_delta" else delta["type"].removesuffix("_delta")
                block[name] += delta.get("partial_json", delta.get(name))
            case "content_block_stop":
                text = message["content"][event["index"]].pop("json")
                if text:
                    message["content"][-1]["input"] = json.loads(text)
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [block | ({"id": len(block["id"])} if "id" in block else {}) for block in message["content"]]
    return message | {"id": len(message["id"]), "content": content}


async def test_a_text(qwen: Chats) -> None:
    qwen.outputs, qwen.engine.num_cached_tokens = ["Hello."], 5
    message = await answer(qwen, system="Be brief.", temperature=0.5, top_k=3, metadata={"user_id": "x"})
    assert message["content"] == [{"type": "text", "text": "Hello."}]
    assert (message["role"], message["model"], message["stop_reason"]) == ("assistant", MODEL, "end_turn")
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert qwen.prompt() == prompt
    sampling = qwen.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.5, 3, 500)
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(encode(qwen.tokenizer, prompt))
    assert usage["cache_read_input_tokens"] == 5 and usage["output_tokens"] > 0
    count = (await post(qwen, f"{PATH}/count_tokens", system="Be brief.", max_tokens=...)).json()
    is_a(TokenCount, count)
    assert count["input_tokens"] == len(encode(qwen.tokenizer, prompt))


async def test_why_a_message_ended(qwen: Chats) -> None:
    qwen.outputs = ["One, two, three"]
    cut = await answer(qwen, max_tokens=3)
    assert (cut["stop_reason"], cut["stop_sequence"], cut["content"][0]["text"]) == ("max_tokens", None, "One")
    stopped = await answer(qwen, stop_sequences=["thr", ", t"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", ", t")
    assert stopped["content"][0]["text"] == "One"


async def test_thinking_text_and_a_call_can_be_sent_back(qwen: Chats) -> None:
    qwen.outputs = [REASONED]
    first = await answer(qwen, tools=[WEATHER])
    thinking, text, call = first["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "See:"}
    assert (call["type"], call["name"], call["input"], first["stop_reason"]) == (
        "tool_use",
        "weather",
        INPUT,
        "tool_use",
    )
    hint = {"cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "Sunny."} | hint]}
    messages = [
        USER,
        {"role": "assistant", "content": first["content"]},
        {
            "role": "user",
            "content": [result | hint, {"type": "text", "text": "And"}, {"type": "text", "text": "then?"}],
        },
    ]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."} | hint]
    assert (await post(qwen, messages=messages, system=system, cache_control={"type": "ephemeral"})).status_code == 200
    turns = qwen.prompt().removesuffix("<|im_start|>assistant\n").split("<|im_end|>\n")
    assert turns == [
        "<|im_start|>system\nBe\nbrief.",
        "<|im_start|>user\nHi",
        f"<|im_start|>assistant\n{REASONED}",
        "<|im_start|>user\n<tool_response>Sunny.</tool_response>",
        "<|im_start|>user\nAnd\nthen?",
        "",
    ]


async def test_each_of_several_calls_has_its_arguments(qwen: Chats) -> None:
    qwen.outputs = [CALLS["qwen"] + '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>' + CALLS["qwen"]]
    tools = [WEATHER, {"name": "time", "input_schema": {"type": "object"}}]
    calls = (await answer(qwen, tools=tools))["content"]
    assert [(call["name"], call["input"]) for call in calls] == [("weather", INPUT), ("time", {}), ("weather", INPUT)]
    (first,) = (await answer(qwen, tools=tools, tool_choice={"type": "auto", "disable_parallel_tool_use": True}))[
        "content"
    ]
    assert first["input"] == INPUT


async def test_the_last_message_of_the_assistant_is_continued(qwen: Chats) -> None:
    qwen.outputs = [" two."]
    message = await answer(qwen, messages=[USER, {"role": "assistant", "content": "One,"}])
    assert qwen.prompt().endswith("<|im_start|>assistant\nOne,")
    assert message["content"] == [{"type": "text", "text": " two."}]


async def test_a_call_whose_arguments_are_no_json_is_shown_as_text(qwen: Chats) -> None:
    """A stream has sent them by then."""
    qwen.outputs = ['<tool_call>\n{"name": "weather", "arguments": {"city": "Zü']
    message = (await post(qwen, tools=[WEATHER])).json()
    is_a(MessageAnswer, message)
    assert message["content"] == [{"type": "text", "text": 'weather({"city": "Zü)'}]
    assert message["stop_reason"] == "end_turn"


async def test_thinking_is_switched_by_a_variable_of_the_template(qwen: Chats) -> None:
    qwen.outputs = ["Hello."]
    await post(qwen, thinking={"type": "disabled"})
    assert qwen.prompt().endswith("<think>\n\n</think>\n\n")
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        assert (await post(qwen, thinking=thinking)).status_code == 200
        assert qwen.prompt().endswith("<|im_start|>assistant\n")


async def test_what_becomes_fields_of_the_chat() -> None:
    body = {
        "max_tokens": 5,
        "messages": [USER],
        "tools": [WEATHER | {"strict": True}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        "stop_sequences": ["x"],
        "priority": 3,
    }
    function = {"name": "weather", "description": "The weather.", "parameters": SCHEMA, "strict": True}
    assert chat_of_messages(convert(body, MessagesRequest)) == {
        "max_tokens": 5,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA}},
        "stop": ["x"],
        "priority": 3,
    }
    named = convert(body | {"tool_choice": {"type": "tool", "name": "weather"}}, MessagesRequest)
    assert chat_of_messages(named)["tool_choice"] == {"type": "function", "function": {"name": "weather"}}


async def test_a_failure_before_and_in_a_stream(qwen: Chats) -> None:
    qwen.engine.reply = None
    async with served(qwen.app) as (host, port), httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:
        for num_before, text in enumerate(("", "Hel")):
            body = {"messages": [USER], "max_tokens": 5, "stream": True}
            asked = asyncio.create_task(client.send(client.build_request("POST", PATH, json=body), stream=True))
            await until(lambda seen=num_before: len(qwen.engine.requests) > seen)
            if text:
                qwen.engine.tokens(encode(qwen.tokenizer, text))
                await asked  # its first event has been sent
            qwen.engine.fail(500, "invalid_logits", "NaN")
            response = await asked
            await response.aread()
            error = sse_events(response.text)[-1] if text else response.json()
            is_a(MessageError, error)
            assert (error["error"]["type"], error["error"]["code"]) == ("api_error", "invalid_logits")
            assert response.status_code == (200 if text else 500)


def blocks(role: str, *content: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}]}


CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "b"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": ...}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": ...}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [USER] * 3000}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        (blocks("user", {"type": "image", "source": {}}), "messages[0].content[0].type"),
        (blocks("user", {"type": "text"}), "messages[0].content[0]"),
        (blocks("user", {"type": "text", "text": "a"}, CALL), "messages[0].content[1]"),
        (blocks("assistant", RESULT), "messages[0].content[0]"),
        (blocks("assistant", CALL | {"input": "{}"}), "messages[0].content[0].input"),
        (blocks("system", CALL), "messages[0].content[0]"),
        (blocks("user", RESULT | {"content": [{"type": "image"}]}), "messages[0].content[0].content[0].type"),
        ({"messages": [USER, blocks("assistant", CALL)["messages"][0]]}, "messages[1]"),
        ({"system": 5}, "system"),
        ({"system": [{"text": "a"}]}, "system[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER | {"input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 1000}, "stop_sequences"),
        ({"stop_sequences": ["a" * 1000]}, "stop_sequences"),
        ({"stop": ["a"]}, "stop"),
        ({"temperature": 3}, "temperature"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "a"}, "container"),
        ({"nonsense": 1}, "nonsense"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ],
)
async def test_what_cannot_be_served_is_named(qwen: Chats, fields: dict[str, Any], param: str) -> None:
    response = await post(qwen, **fields)
    assert response.status_code == 400, response.text
    is_a(MessageError, response.json())
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    for of_chats in ("function", "stop", "reasoning_effort", "response_format", "structured_outputs"):
        assert of_chats in fields or not re.search(rf"\b{of_chats}\b", error["message"])
    assert not qwen.engine.requests


async def test_other_errors_have_anthropics_types(qwen: Chats) -> None:
    for path in (PATH, f"{PATH}/count_tokens"):
        response = await post(qwen, path, model="other", max_tokens=500 if path == PATH else ...)
        is_a(MessageError, response.json())
        assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
        response = await qwen.client.get(path)
        is_a(MessageError, response.json())
        assert response.status_code == 405


async def test_limits_and_load_have_anthropics_types(qwen: Chats) -> None:
    response = await post(qwen, system="x" * (ApiSettings.max_body_bytes + 1))
    assert (response.status_code, response.json()["error"]["type"]) == (413, "request_too_large")
    for full, status, type in ((QueueFull(4, 7), 429, "rate_limit_error"), (Draining(7), 503, "overloaded_error")):
        qwen.engine.full = full
        for stream in (False, True):
            response = await post(qwen, stream=stream)
            is_a(MessageError, response.json())
            assert (response.status_code, response.json()["error"]["type"]) == (status, type)
            assert response.headers["Retry-After"] == "7"

"""Tools and reasoning in chats: prompts, answers whole and streamed, bad input, and the openai client unchanged."""

import asyncio
import json
import logging
from typing import Any

import pytest

from flyball_runtime.api import MetricsCollector
from runtime.api.chats import ARGUMENTS, CALLS, TEMPLATES, TIME, WEATHER, Chats, openai_client
from runtime.api.support import MODEL, encode, error_of, sse_events, until

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("style", TEMPLATES)
async def test_a_round_of_calls(style: str, metrics: MetricsCollector) -> None:
    """The prompts are those that transformers renders, and an answer can be sent back as it came."""
    chats = Chats(style, metrics)
    choice = await chats.answer()
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] is None
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": ARGUMENTS} and call["type"] == "function"
    messages = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": ""}]
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "Sunny."}]
    rendered = [messages[0], messages[1] | {"tool_calls": [json.loads(json.dumps(call))]}, messages[2]]
    rendered[1]["tool_calls"][0]["function"]["arguments"] = json.loads(ARGUMENTS)
    expected = chats.tokenizer.apply_chat_template(
        rendered, [WEATHER, TIME], tokenize=False, add_generation_prompt=True
    )
    chats.outputs = ["It is sunny."]
    answer = await chats.answer(messages=[messages[0], message, messages[2]])
    assert (answer["message"]["content"], answer["finish_reason"]) == ("It is sunny.", "stop")
    assert chats.prompt() == expected


async def test_content_several_calls_and_what_is_none(qwen: Chats) -> None:
    qwen.outputs = [
        f"Both: {CALLS['qwen']}\n" + '<tool_call>{"name": "time", "arguments": {}}</tool_call> <tool_call>?'
    ]
    choice = await qwen.answer()
    names = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
    assert names == ["weather", "time"] and choice["message"]["content"] == "Both:  <tool_call>?"
    choice = await qwen.answer(parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == len(choice["message"]["tool_calls"])


async def test_arguments_arrive_as_they_are_generated(qwen: Chats) -> None:
    qwen.engine.reply = None
    asked = asyncio.create_task(qwen.post(stream=True, logprobs=True))
    await until(lambda: bool(qwen.engine.requests))
    ids = encode(qwen.tokenizer, CALLS["qwen"])
    for token_id in ids:
        qwen.engine.tokens([token_id])
        for _ in range(4):  # the choice takes it, the stream writes it
            await asyncio.sleep(0)
    qwen.engine.finish()
    events = [event["choices"][0] for event in sse_events((await asked).text)[:-1]]
    pieces = [event["delta"]["tool_calls"][0] for event in events if "tool_calls" in event["delta"]]
    assert pieces[0]["function"] == {"name": "weather", "arguments": ""}
    assert all(set(piece) == {"index", "function"} for piece in pieces[1:])
    assert len(pieces) > len(ARGUMENTS) / 2
    assert "".join(piece["function"]["arguments"] for piece in pieces) == ARGUMENTS
    logprobs = [one for event in events if event["logprobs"] for one in event["logprobs"]["content"]]
    assert len(logprobs) == len(ids)


async def test_an_output_cut_off_says_length(qwen: Chats) -> None:
    choice = await qwen.answer(max_tokens=len(encode(qwen.tokenizer, CALLS["qwen"])) - 20)
    assert choice["finish_reason"] == "length"
    assert ARGUMENTS.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize("style", TEMPLATES)
@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1]", "null", '{"a": "\\ud800"}', " "])
async def test_a_call_with_invalid_arguments_can_be_sent_back(
    style: str, arguments: str, metrics: MetricsCollector
) -> None:
    """Agents repeat the whole conversation, so one output that was cut off must not spoil it for good."""
    chats = Chats(style, metrics)
    chats.outputs = ["I try again."]
    assert (await chats.answer(**called(arguments)))["message"]["content"] == "I try again."
    assert json.dumps(arguments)[1:-1] in chats.prompt()


async def test_each_choice_has_its_own_calls(qwen: Chats) -> None:
    qwen.outputs = [CALLS["qwen"], "No need.", CALLS["qwen"]]
    choices = (await qwen.post(n=3)).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop", "tool_calls"]
    ids = [call["id"] for choice in choices for call in choice["message"].get("tool_calls", [])]
    assert len(set(ids)) == 2


async def test_choice_none_keeps_tools_from_the_model(qwen: Chats) -> None:
    choice = await qwen.answer(tool_choice="none")
    assert choice["message"]["content"] == CALLS["qwen"] and "<tools>" not in qwen.prompt()


async def test_without_tools_special_tokens_have_no_text(metrics: MetricsCollector) -> None:
    chats = Chats("mistral", metrics)
    assert (await chats.answer(tools=...))["message"]["content"] == CALLS["mistral"].removeprefix("[TOOL_CALLS]")
    chats.outputs = ["[INST]Hello[/INST]"]
    assert (await chats.answer())["message"]["content"] == "Hello"


async def test_reasoning(qwen: Chats) -> None:
    qwen.outputs = [f"<think>\nHm, <tool_call>.\n</think>\n\nWell.{CALLS['qwen']}"]
    choice = await qwen.answer()
    message = choice["message"]
    assert message["reasoning_content"] == message["reasoning"] == "Hm, <tool_call>." and message["content"] == "Well."
    assert choice["finish_reason"] == "tool_calls"
    sent_back = {"role": "user", "content": "Hi"}, message, {"role": "user", "content": "More"}
    assert (await qwen.post(messages=list(sent_back))).status_code == 200
    assert "<think>Hm, <tool_call>.</think>Well." in qwen.prompt()
    message = (await qwen.answer(tools=..., max_tokens=12))["message"]
    assert (message["reasoning"], message["content"]) == ("Hm, ", None)


@pytest.mark.parametrize("fields", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}])
async def test_reasoning_switched_off_in_the_prompt(qwen: Chats, fields: dict[str, Any]) -> None:
    qwen.outputs = ["A <think> in content."]
    assert (await qwen.answer(tools=..., **fields))["message"]["content"] == "A <think> in content."
    assert qwen.prompt().endswith("<think>\n\n</think>\n\n")


async def test_a_continued_message_is_in_its_reasoning_or_behind_it(qwen: Chats) -> None:
    qwen.outputs = ["so.</think>Yes."]
    for begun, reasoning in (("<think>Hm, ", "so."), ("<think>Hm.</think>", None)):
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": begun}]
        message = (await qwen.answer(messages=messages, tools=..., continue_final_message=True))["message"]
        assert message.get("reasoning") == reasoning


async def test_effort_is_a_variable_of_the_template(qwen: Chats) -> None:
    qwen.tokenizer.chat_template = "{{ reasoning_effort }}{{ enable_thinking is defined }}"
    await qwen.post(reasoning_effort="high", tools=...)
    assert qwen.prompt() == "highFalse"
    await qwen.post(reasoning_effort="none", chat_template_kwargs={"enable_thinking": 1}, tools=...)
    assert qwen.prompt() == "noneTrue"


async def test_tokenize_counts_tools(qwen: Chats) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    counts = [
        (await qwen.client.post("/tokenize", json=body | more)).json()["count"] for more in ({}, {"tools": [WEATHER]})
    ]
    assert counts[1] > counts[0] + len(json.dumps(WEATHER)) / 2


def tools(**function: Any) -> dict[str, Any]:
    return {"tools": [WEATHER, {"type": "function", "function": {"name": "f"} | function}]}


def called(arguments: str) -> dict[str, Any]:
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER, {"type": "function", "function": {}}]}, "tools[1].function.name"),
        ({"tools": [WEATHER, {"type": "function", "function": {"name": 3}}]}, "tools[1].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "search"}]}, "tools[0].type"),
        ({"tools": {}}, "tools"),
        (tools(name=""), "tools[1].function.name"),
        (tools(name="a b"), "tools[1].function.name"),
        (tools(name="a" * 129), "tools[1].function.name"),
        (tools(name="weather"), "tools[1].function.name"),
        (tools(parameters=[]), "tools[1].function.parameters"),
        (tools(parameters={"type": "array"}), "tools[1].function.parameters.type"),
        (tools(parameters={"properties": ["a"]}), "tools[1].function.parameters.properties"),
        (tools(parameters={"properties": {"a": 1}}), "tools[1].function.parameters.properties.a"),
        (tools(parameters={"properties": {"a": {"type": "str"}}}), "tools[1].function.parameters.properties.a.type"),
        (tools(parameters={"required": "a"}), "tools[1].function.parameters.required"),
        ({"tools": [{}] * 10_000}, "tools"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "tool_call_id": "a"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "reasoning": "b"}]}, "messages[0].reasoning"),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "b"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages[0].tool_calls",
        ),
    ],
)
async def test_bad_tools_are_refused_by_the_name_of_the_field(qwen: Chats, fields: dict[str, Any], param: str) -> None:
    response = await qwen.post(**fields)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param), error
    assert len(error["message"]) < 600 and not qwen.engine.requests


async def test_ten_thousand_tools_are_refused(qwen: Chats) -> None:
    many = [{"type": "function", "function": {"name": f"tool_{number}"}} for number in range(10_000)]
    for count in (1025, len(many)):
        response = await qwen.post(tools=many[:count])
        assert response.status_code == 400 and not qwen.engine.requests
    assert (await qwen.post(tools=many[:1024])).status_code == 200


@pytest.mark.parametrize("arguments", ["[" * 100_000, "[],[]," * 30_000, '{"a":' * 100_000])
async def test_arguments_are_bounded_like_the_body(qwen: Chats, arguments: str) -> None:
    assert (await qwen.post(**called(arguments))).status_code == 400


async def test_auto_needs_a_known_format(metrics: MetricsCollector, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flyball_runtime.api.message_formats")
    for settings, reason in (
        ({"tool_call_parser": "none"}, "--tool-call-parser"),
        ({"enable_auto_tool_choice": False}, "--no-enable-auto-tool-choice"),
    ):
        chats = Chats("qwen", metrics, **settings)
        error = error_of(await chats.post())
        assert error["param"] == "tools" and reason in error["message"]
        assert (await chats.answer(tool_choice="none"))["message"]["content"] == CALLS["qwen"]
    assert "tool calls: hermes (by the chat template); reasoning: qwen3 (by the chat template)" in caplog.text


async def test_a_parser_set_by_flag(metrics: MetricsCollector) -> None:
    chats = Chats("qwen", metrics, tool_call_parser="llama3_json", reasoning_parser="none")
    chats.outputs = ['{"name": "time", "parameters": {}}']
    assert (await chats.answer())["message"]["tool_calls"][0]["function"]["name"] == "time"
    chats.outputs = ["<think>Hm.</think>"]
    assert (await chats.answer())["message"]["content"] == "<think>Hm.</think>"


@pytest.mark.parametrize("style", TEMPLATES)
async def test_the_openai_client_calls_tools(style: str, metrics: MetricsCollector) -> None:
    chats = Chats(style, metrics)
    settings: Any = {"model": MODEL, "tools": [WEATHER], "messages": [{"role": "user", "content": "Hi"}]}
    async with openai_client(chats) as client:
        message = (await client.chat.completions.create(**settings)).choices[0].message
        assert message.tool_calls is not None and message.tool_calls[0].function.arguments == ARGUMENTS
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny."}
        chats.outputs = ["It is sunny."]
        again = await client.chat.completions.create(
            **settings | {"messages": [*settings["messages"], message, result]}
        )
        assert again.choices[0].message.content == "It is sunny."


async def test_the_streaming_helper_of_the_openai_client(qwen: Chats) -> None:
    qwen.outputs = [f"<think>Hm.</think>See:{CALLS['qwen']}"]
    async with openai_client(qwen) as client:
        settings: Any = {"model": MODEL, "tools": [WEATHER], "messages": [{"role": "user", "content": "Hi"}]}
        async with client.chat.completions.stream(**settings) as stream:
            kinds = {event.type async for event in stream}
            completion = await stream.get_final_completion()
        assert kinds >= {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"}
        (choice,) = completion.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content == "See:"
        (call,) = choice.message.tool_calls or ()
        assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
        assert getattr(choice.message, "reasoning_content") == "Hm."  # noqa: B009  a field that the client does not know
        sent_back: Any = [*settings["messages"], choice.message]
        assert (await client.chat.completions.create(**settings | {"messages": sent_back})).choices

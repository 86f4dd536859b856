"""Tools and reasoning in chats: prompts, answers whole and streamed, bad input, and the openai client unchanged."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flyball_runtime.api import ApiSettings, MetricsCollector, create_app
from flyball_runtime.api.answers import ChatAnswer, ChatChunk
from runtime.api.support import MODEL, asgi_client, encode, error_of, is_a, served, sse_events, until
from runtime.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"

QWEN = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\n"
    "Answer with <tool_call></tool_call>.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}\n"
    "{% if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>"
    "{% else %}{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA = (
    "{% if tools %}Answer with {'name': function, 'parameters': arguments}.{% for tool in tools %}{{ tool | tojson(indent=4) }}"
    "{% endfor %}{% endif %}{% for message in messages %}<|start_header_id|>"
    "{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>"
    "{% if message.tool_calls %}{% set call = message.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% else %}{{ message.content }}{% endif %}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>"
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for message in messages %}{% if message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids must have nine letters and digits') }}{% endif %}"
    "{{ call.function | tojson }}{% endfor %}]</s>{% elif message.role == 'tool' %}"
    "[TOOL_RESULTS]{{ message.tool_call_id }}{{ message.content }}[/TOOL_RESULTS]"
    "{% else %}[INST]{{ message.content }}[/INST]{% endif %}{% endfor %}"
)
SPECIAL = {
    "qwen": ["<|im_end|>", "<|im_start|>"],
    "llama": ["<|eot_id|>", "<|python_tag|>", "<|start_header_id|>", "<|end_header_id|>"],
    "mistral": ["</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"],
}
TEMPLATES = {"qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL}

ARGUMENTS = '{"city": "Zürich", "days": [1, 2]}'
CALLS = {
    "qwen": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama": f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]',
}

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time"}}


def styled(style: str) -> PreTrainedTokenizerFast:
    """One token per byte, and the special tokens of the style."""
    backend = Tokenizer(models.BPE({char: at for at, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = SPECIAL[style]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[0])
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    tokenizer.chat_template = TEMPLATES[style]
    return tokenizer


class Chats:
    """A server of a model in one style, whose next outputs are ``outputs`` (the last again and again)."""

    def __init__(self, style: str, metrics: MetricsCollector, **settings: Any) -> None:
        self.tokenizer = styled(style)
        self.outputs = [CALLS[style]]
        self.engine = FakeEngine(len(self.tokenizer), self._reply)
        self.engine.engine_info = type(self.engine.engine_info)(
            **{name: getattr(self.engine.engine_info, name) for name in self.engine.engine_info.__struct_fields__}
            | {"max_model_len": 1 << 20}
        )
        self.app = create_app(
            self.engine, self.tokenizer, ApiSettings(served_model_names=(MODEL,), **settings), metrics
        )
        self.client = asgi_client(self.app)

    def _reply(self, request: object) -> list[int]:
        output = self.outputs.pop(0) if len(self.outputs) > 1 else self.outputs[0]
        return [*encode(self.tokenizer, output), self.tokenizer.eos_token_id]

    async def post(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER, TIME]} | fields
        return await self.client.post(CHAT, json={name: value for name, value in body.items() if value is not ...})

    async def answer(self, **fields: Any) -> dict[str, Any]:
        """The first choice, with the message also as a stream has it."""
        response = await self.post(**fields)
        assert response.status_code == 200, response.text
        is_a(ChatAnswer, response.json())
        choice: dict[str, Any] = response.json()["choices"][0]
        *events, _ = sse_events((await self.post(**fields, stream=True)).text)
        for event in events:
            is_a(ChatChunk, event)
        streamed, reason = joined(events)
        assert without_ids(streamed) == without_ids(choice["message"])
        assert reason == choice["finish_reason"]
        return choice

    def prompt(self) -> str:
        ids = self.engine.requests[-1].prompt_token_ids
        return str(self.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False))


def joined(events: list[Any]) -> tuple[dict[str, Any], str | None]:
    """The message that the deltas of a stream add up to, and the reason for its end."""
    message: dict[str, Any] = {"content": "", "refusal": None}
    reason = None
    for event in events:
        for choice in [] if event == "[DONE]" else event["choices"]:
            reason = choice["finish_reason"] or reason
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    add_call(message.setdefault("tool_calls", []), *value)
                elif name == "role":
                    message["role"] = value
                else:
                    message[name] = message.get(name, "") + value
    if "tool_calls" in message or "reasoning" in message:
        message["content"] = message["content"] or None
    return message, reason


def add_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    index = delta.pop("index")
    if index == len(calls):
        assert delta["id"] and delta["type"] == "function" and delta["function"]["name"]
        calls.append(delta)
    else:
        assert index == len(calls) - 1 and list(delta) == ["function"]
        calls[index]["function"]["arguments"] += delta["function"]["arguments"]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call | {"id": len(call["id"])} for call in message.get("tool_calls", [])]
    return message | {"tool_calls": calls}


@pytest.fixture
async def qwen(metrics: MetricsCollector) -> AsyncIterator[Chats]:
    chats = Chats("qwen", metrics)
    async with chats.client:
        yield chats


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
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
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
        (called("{"), "messages[1].tool_calls[0].function.arguments"),
        (called("[1]"), "messages[1].tool_calls[0].function.arguments"),
        (called('{"a": "\\ud800"}'), "messages[1].tool_calls[0].function.arguments"),
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


@asynccontextmanager
async def openai_client(chats: Chats) -> AsyncIterator[openai.AsyncOpenAI]:
    async with served(chats.app) as (host, port):
        client = openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0, timeout=60)
        async with client:
            yield client


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

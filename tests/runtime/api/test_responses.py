"""/v1/responses: whole and streamed, with tools and reasoning, and the openai client unchanged."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from flyball_runtime.api import MetricsCollector
from flyball_runtime.api.answers import ResponseAnswer
from runtime.api.chats import ARGUMENTS, CALLS, Chats, openai_client
from runtime.api.support import MODEL, encode, error_of, is_a, until

pytestmark = pytest.mark.anyio

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
REASONED = f"<think>Hm.</think>See:{CALLS['qwen']}"


async def post(chats: Chats, **fields: Any) -> httpx.Response:
    return await chats.client.post("/v1/responses", json={"model": MODEL, "input": "Hi"} | fields)


async def test_a_text(qwen: Chats) -> None:
    qwen.outputs = ["Hello."]
    response = (await post(qwen, instructions="Be brief.", metadata={"team": "x"}, seed=7, top_k=3)).json()
    assert response["status"] == "completed" and response["metadata"] == {"team": "x"} and response["store"] is False
    is_a(ResponseAnswer, response)
    (item,) = response["output"]
    assert item["content"] == [{"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}]
    assert (
        qwen.prompt()
        == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    sampling = qwen.engine.requests[0].sampling
    assert (sampling.seed, sampling.top_k) == (7, 3)
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0
    cut = (await post(qwen, max_output_tokens=3)).json()
    is_a(ResponseAnswer, cut)
    assert cut["status"] == cut["output"][0]["status"] == "incomplete"
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_the_conversation_becomes_a_chat(qwen: Chats) -> None:
    """What one answer has can be sent back; thoughts, text and calls of one turn are one message."""
    qwen.outputs = [REASONED]
    first = (await post(qwen, tools=[WEATHER])).json()
    assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
    call = first["output"][-1]
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": "Hi"},
        *first["output"],
        {"type": "function_call_output", "call_id": call["call_id"], "output": "Sunny."},
        {"role": "assistant", "content": "It is sunny."},
        {"role": "user", "content": [{"type": "input_text", "text": "And"}, {"type": "input_text", "text": "then?"}]},
    ]
    assert (await post(qwen, input=items)).status_code == 200
    turns = qwen.prompt().removesuffix("<|im_start|>assistant\n").split("<|im_end|>\n")
    assert turns == [
        "<|im_start|>system\nBe brief.",
        "<|im_start|>user\nHi",
        f"<|im_start|>assistant\n{REASONED}",
        "<|im_start|>user\n<tool_response>Sunny.</tool_response>",
        "<|im_start|>assistant\nIt is sunny.",
        "<|im_start|>user\nAnd\nthen?",
        "",
    ]


async def test_the_openai_client(qwen: Chats) -> None:
    qwen.outputs = [REASONED]
    async with openai_client(qwen) as client:
        response = await client.responses.create(model=MODEL, input="Hi", tools=[WEATHER], store=False)  # type: ignore[list-item]
        call = response.output[-1]
        assert response.output_text == "See:" and call.type == "function_call" and call.arguments == ARGUMENTS
        with pytest.raises(openai.BadRequestError, match="stores no responses"):
            await client.responses.create(model=MODEL, input="Hi", previous_response_id=response.id)


async def test_the_streaming_helper_of_the_openai_client(qwen: Chats) -> None:
    qwen.outputs = [REASONED]
    async with openai_client(qwen) as client:
        settings: Any = {"model": MODEL, "input": "Hi", "tools": [WEATHER]}
        events = [event async for event in await client.responses.create(**settings, stream=True)]
        async with client.responses.stream(**settings) as stream:
            texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert kinds.count("output_item.added") == kinds.count("output_item.done") == 3
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "Hm."
    assert "".join(texts) == "See:" == final.output_text
    assert events[-1].type == "response.completed" and final.usage is not None
    last = final.output[-1]
    assert last.type == "function_call" and last.arguments == ARGUMENTS


async def test_a_stream_that_fails(qwen: Chats) -> None:
    qwen.engine.reply = None
    async with openai_client(qwen) as client:
        stream = await _begun(client, qwen)
        qwen.engine.die("out of memory")
        events = [event async for event in stream]
    assert events[-1].type == "response.failed" and events[-1].response.error is not None
    assert events[-1].response.status == "failed"


async def _begun(client: openai.AsyncOpenAI, chats: Chats) -> Any:
    asked = asyncio.create_task(client.responses.create(model=MODEL, input="Hi", stream=True))
    await until(lambda: bool(chats.engine.requests))
    chats.engine.tokens(encode(chats.tokenizer, "Hel"))
    return await asked


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"store": 0}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"nonsense": 1}, "nonsense"),
        ({"input": 3}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a"]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.function.name"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"seed": "a"}, "seed"),
    ],
)
async def test_what_cannot_be_served_is_named(qwen: Chats, fields: dict[str, Any], param: str) -> None:
    response = await post(qwen, **fields)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param), error
    assert not qwen.engine.requests


async def test_special_tokens_are_hidden_without_tools(metrics: MetricsCollector) -> None:
    chats = Chats("mistral", metrics)
    (item,) = (await post(chats)).json()["output"]
    assert item["content"][0]["text"] == CALLS["mistral"].removeprefix("[TOOL_CALLS]")

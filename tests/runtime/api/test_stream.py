"""Streaming: chunk shapes, failures, disconnects and slow readers, at the ASGI interface where writes can be held up."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from transformers import PreTrainedTokenizerFast

from flyball_runtime.api import ApiSettings, MetricsCollector, create_app
from runtime.api.support import MODEL, asgi_client, bounded, chat, encode, error_of, sse_events, until
from runtime.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Connection:
    """One HTTP request whose reader the test plays: it may stall, and it may leave."""

    def __init__(self, body: Any) -> None:
        self._body = json.dumps(body).encode()
        self._left = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self.messages: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        if self._body:
            body, self._body = self._body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        await self.reading.wait()
        self.messages.append(message)

    def leave(self) -> None:
        self._left.set()

    @property
    def status(self) -> int | None:
        return self.messages[0]["status"] if self.messages else None

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages[1:]]

    @property
    def events(self) -> list[Any]:
        return sse_events(b"".join(self.bodies).decode())

    @property
    def complete(self) -> bool:
        return bool(self.messages) and not self.messages[-1].get("more_body", True)


@asynccontextmanager
async def connect(app: FastAPI, path: str, body: Any) -> AsyncIterator[tuple[Connection, "asyncio.Task[None]"]]:
    """The request running in a task. The block may leave it unfinished; then the client leaves."""
    connection = Connection(body)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"x-request-id", b"test-request")],
    }
    task = asyncio.create_task(bounded(app)(scope, connection.receive, connection.send))  # type: ignore[arg-type]
    try:
        yield connection, task
    finally:
        connection.leave()
        connection.reading.set()
        await task


def texts(events: list[Any]) -> str:
    """The text of all choices' chunks, in order."""
    choices = [choice for event in events if event != "[DONE]" for choice in event.get("choices", [])]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


async def test_chat_stream(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.num_cached_tokens = 2
    body = chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
    response = await client.post(CHAT, json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    first, *middle, finish, usage, done = sse_events(response.text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert texts(middle) == "Hello world"
    assert finish["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    num_prompt, num_output = len(engine.requests[0].prompt_token_ids), len(engine.reply(engine.requests[0]))
    assert usage["choices"] == [] and usage["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert done == "[DONE]"
    chunks = [first, *middle, finish, usage]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"} and {c["model"] for c in chunks} == {
        MODEL
    }
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


async def test_completion_stream_without_usage(client: httpx.AsyncClient) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": "a", "stream": True, "max_tokens": 2})
    *chunks, done = sse_events(response.text)
    assert done == "[DONE]" and not any("usage" in chunk for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


async def test_running_usage_in_every_chunk(app: FastAPI, engine: FakeEngine) -> None:
    engine.reply = None
    body = {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    async with connect(app, COMPLETIONS, body) as (connection, _):
        await until(lambda: bool(engine.requests))
        for count in (1, 2, 3):
            engine.tokens([40])
            await until(lambda count=count: len(connection.bodies) == count)
        assert [event["usage"]["completion_tokens"] for event in connection.events] == [1, 2, 3]


async def test_several_prompts_and_choices_interleave_by_index(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    engine.reply = lambda request: encode(tokenizer, f"{request.prompt_token_ids[0]}:{request.sampling.seed}")
    body = {"prompt": [[5], [6]], "n": 2, "seed": 1, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, _ = sse_events((await client.post(COMPLETIONS, json=body)).text)
    by_index: dict[int, str] = {}
    for choice in (chunk["choices"][0] for chunk in chunks):
        by_index[choice["index"]] = by_index.get(choice["index"], "") + choice["text"]
    assert by_index == {0: "5:1", 1: "5:2", 2: "6:1", 3: "6:2"}
    assert usage["usage"]["prompt_tokens"] == 2 and usage["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("text", ['a€😀é日本\n\t"quoted" \\ \x85\u2028\u2029 </script>', "naïve – 👩‍👩‍👧 done"])
async def test_characters_over_several_tokens(
    app: FastAPI, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    engine.reply = None
    async with connect(app, CHAT, chat(stream=True)) as (connection, task):
        await until(lambda: bool(engine.requests))
        for token_id in encode(tokenizer, text):
            engine.tokens([token_id])
            await asyncio.sleep(0)
        engine.finish()
        await task
        assert texts(connection.events) == text
        assert "\ufffd" not in b"".join(connection.bodies).decode()


async def test_stop_string_over_tokens_is_never_shown(
    app: FastAPI, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    engine.reply = None
    ids = encode(tokenizer, "one two three")
    async with connect(app, CHAT, chat(stream=True, stop="two thr")) as (connection, task):
        await until(lambda: bool(engine.requests))
        for token_id in ids:
            engine.tokens([token_id])
            await asyncio.sleep(0)
        await task
        assert texts(connection.events) == "one "
        assert connection.events[-2]["choices"][0]["finish_reason"] == "stop" and connection.events[-1] == "[DONE]"
        assert engine.aborted == [engine.requests[0].request_id]


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_aborts_every_choice(
    app: FastAPI, engine: FakeEngine, metrics: MetricsCollector, stream: bool
) -> None:
    engine.reply = None
    async with connect(app, COMPLETIONS, {"prompt": ["a", "b"], "stream": stream}) as (connection, task):
        await until(lambda: len(engine.requests) == 2)
        engine.tokens([40, 41])
        await until(lambda: len(connection.messages) == 2 or not stream)
        connection.leave()
        await task
        assert engine.aborted == [request.request_id for request in engine.requests] and engine.num_unfinished == 0
    assert 'flyball_requests_total{outcome="abort"} 2.0' in metrics.exposition("")[0].decode()


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_does_not_wait_for_a_hung_engine(
    app: FastAPI, engine: FakeEngine, stream: bool, path: str
) -> None:
    engine.reply, asked = None, []
    engine.abort = asked.append  # type: ignore[method-assign]
    async with connect(app, path, chat(stream=stream, max_tokens=5)) as (connection, task):
        await until(lambda: bool(engine.requests))
        connection.leave()
        await task
    assert set(asked) == {engine.requests[0].request_id}


async def test_cancelled_server_task_aborts(app: FastAPI, engine: FakeEngine) -> None:
    engine.reply = None
    connection = Connection(chat(stream=True))
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b""}
    task = asyncio.create_task(app(scope, connection.receive, connection.send))  # type: ignore[arg-type]
    await until(lambda: bool(engine.requests))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.num_unfinished == 0 and engine.aborted


async def test_failure_before_output_has_its_status(app: FastAPI, engine: FakeEngine) -> None:
    engine.reply = None
    async with connect(app, CHAT, chat(stream=True)) as (connection, task):
        await until(lambda: bool(engine.requests))
        engine.die("killed by signal 9")
        await task
        assert connection.status == 500
        assert json.loads(connection.bodies[0])["error"]["code"] == "engine_dead"


async def test_failure_after_output_is_an_error_event_and_no_done(app: FastAPI, engine: FakeEngine) -> None:
    engine.reply = None
    async with connect(app, COMPLETIONS, {"prompt": ["a", "b"], "stream": True}) as (connection, task):
        await until(lambda: len(engine.requests) == 2)
        engine.tokens([40])
        await until(lambda: bool(connection.bodies))
        engine.fail(500, "engine_dead", "the engine stopped")
        await task
        assert connection.status == 200 and connection.complete
        assert connection.bodies[-2].startswith(b"event: error\n")
        assert connection.events[-1]["error"] == {
            "message": "the engine stopped", "type": "server_error", "param": None, "code": "engine_dead",
        }  # fmt: skip
        assert engine.aborted == [engine.requests[0].request_id], "the other choice must not run on"


async def test_bug_after_output_is_an_error_event(
    app: FastAPI, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.reply = None
    async with connect(app, CHAT, chat(stream=True)) as (connection, task):
        await until(lambda: bool(engine.requests))
        engine.tokens([40])
        await until(lambda: bool(connection.bodies))
        engine.tokens(["no token id"])  # type: ignore[list-item]
        await task
        assert connection.events[-1]["error"]["code"] == "internal_error"
        assert engine.num_unfinished == 0
    assert "test-request" in caplog.text and "Traceback" in caplog.text


async def test_tokens_of_a_slow_reader_coalesce(
    app: FastAPI, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    engine.reply = None
    ids = encode(tokenizer, "the quick brown fox " * 100)
    async with connect(app, CHAT, chat(stream=True)) as (connection, task):
        await until(lambda: bool(engine.requests))
        engine.tokens(ids[:1])
        await until(lambda: len(connection.bodies) == 1)
        connection.reading.clear()
        for token_id in ids[1:]:
            engine.tokens([token_id])
            await asyncio.sleep(0)
        engine.finish()
        await until(lambda: engine.num_unfinished == 0)
        assert len(connection.bodies) == 1
        connection.reading.set()
        await task
        assert texts(connection.events) == "the quick brown fox " * 100
        assert len(connection.bodies) <= 4, "one write was held up, the rest came in one"


@pytest.mark.parametrize(("num_tokens", "told"), [(11, [1, 5, 9, 11, 11]), (9, [1, 5, 9, 9]), (1, [1, 1])])
async def test_events_are_an_interval_apart(
    engine: FakeEngine,
    tokenizer: PreTrainedTokenizerFast,
    settings: ApiSettings,
    metrics: MetricsCollector,
    num_tokens: int,
    told: list[int],
) -> None:
    """The first token is told at once, and the last ones before the ending, which has an event of its own."""
    app = create_app(engine, tokenizer, replace(settings, stream_interval=4), metrics)
    engine.reply = None
    body = {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    async with connect(app, COMPLETIONS, body) as (connection, task):
        await until(lambda: bool(engine.requests))
        for count in range(1, num_tokens + 1):
            engine.tokens([40])
            await until(lambda count=count: len(connection.bodies) == 1 + (count - 1) // 4)
        engine.finish()
        await task
        *events, done = connection.events
    assert done == "[DONE]"
    assert [event["usage"]["completion_tokens"] for event in events] == told


async def test_drain_refuses_new_streams_and_finishes_the_running(app: FastAPI, engine: FakeEngine) -> None:
    engine.reply = None
    async with connect(app, CHAT, chat(stream=True)) as (connection, task):
        await until(lambda: bool(engine.requests))
        engine.start_drain()
        async with asgi_client(app) as client:
            refused = await client.post(CHAT, json=chat(stream=True))
        assert (refused.status_code, error_of(refused)["code"]) == (503, "draining") and refused.headers["retry-after"]
        engine.tokens([40])
        engine.finish()
        await task
        assert connection.events[-1] == "[DONE]"


async def test_five_hundred_streams(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    responses = await asyncio.gather(*(client.post(CHAT, json=chat(str(i), stream=True)) for i in range(500)))
    assert {texts(sse_events(response.text)) for response in responses} == {"Hello world"}
    assert engine.num_unfinished == 0

"""Behind a real uvicorn: the openai client, and clients that misbehave at the socket."""

import asyncio
import contextlib
import itertools
import json
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from transformers import PreTrainedTokenizerFast

from flyball_runtime.api import ApiSettings, MetricsCollector, create_app
from runtime.api.support import MODEL, chat, encode, served, until
from runtime.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio


def openai_client(address: tuple[str, int]) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://{address[0]}:{address[1]}/v1", api_key="unused", max_retries=0, timeout=10
    )


def post_bytes(body: bytes, content_length: int | None = None) -> bytes:
    length = len(body) if content_length is None else content_length
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {length}\r\n\r\n"
    return head.encode() + body


async def test_openai_client_chat(app: FastAPI, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    async with served(app) as address, openai_client(address) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=messages, n=2, extra_body={"top_k": 5})
        assert [choice.message.content for choice in answer.choices] == ["Hello world"] * 2
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert engine.requests[0].sampling.top_k == 5
        again = [*messages, answer.choices[0].message, {"role": "user", "content": "More"}]
        assert (await client.chat.completions.create(model=MODEL, messages=again)).choices[0].finish_reason == "stop"


async def test_openai_client_streams(app: FastAPI) -> None:
    async with served(app) as address, openai_client(address) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello world"
        assert chunks[-1].usage.completion_tokens > 0 and chunks[0].choices[0].delta.role == "assistant"
        stream = await client.completions.create(model=MODEL, prompt=["a", "b"], stream=True)
        assert {chunk.choices[0].index async for chunk in stream} == {0, 1}


async def test_openai_client_models_and_completions(app: FastAPI, engine: FakeEngine) -> None:
    async with served(app) as address, openai_client(address) as client:
        assert [model.id async for model in client.models.list()] == [MODEL, "alias"]
        assert (await client.models.retrieve("alias")).id == "alias"
        answer = await client.completions.create(model=MODEL, prompt=[[5, 6], [7]], max_tokens=2, seed=1)
        assert [choice.index for choice in answer.choices] == [0, 1] and answer.choices[0].finish_reason == "length"


async def test_openai_client_reads_logprobs(app: FastAPI) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    settings: Any = {"model": MODEL, "messages": messages, "logprobs": True, "top_logprobs": 2}
    async with served(app) as address, openai_client(address) as client:
        choice = (await client.chat.completions.create(**settings)).choices[0]
        assert choice.logprobs is not None and choice.logprobs.content
        assert "".join(one.token for one in choice.logprobs.content) == choice.message.content
        assert [len(one.top_logprobs) for one in choice.logprobs.content] == [2] * len(choice.logprobs.content)
        streamed = [
            one
            async for chunk in await client.chat.completions.create(**settings, stream=True)
            if chunk.choices[0].logprobs is not None
            for one in chunk.choices[0].logprobs.content or []
        ]
        assert [one.to_dict() for one in streamed] == [one.to_dict() for one in choice.logprobs.content]
        completion = await client.completions.create(model=MODEL, prompt="Hi", logprobs=1)
        logprobs = completion.choices[0].logprobs
        assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs
        assert logprobs.top_logprobs == [{token: -0.5} for token in logprobs.tokens]


async def test_openai_client_errors(app: FastAPI, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    async with served(app) as address, openai_client(address) as client:
        with pytest.raises(openai.NotFoundError, match="gpt-9") as missing:
            await client.chat.completions.create(model="gpt-9", messages=messages)
        assert missing.value.code == "model_not_found" and missing.value.request_id
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=MODEL, messages=messages, top_logprobs=3)
        assert refused.value.param == "top_logprobs"
        engine.start_drain()
        with pytest.raises(openai.InternalServerError) as draining:
            await client.chat.completions.create(model=MODEL, messages=messages)
        assert draining.value.status_code == 503 and draining.value.response.headers["retry-after"]


async def test_openai_client_sees_a_failure_in_the_stream(app: FastAPI, engine: FakeEngine) -> None:
    engine.reply = None
    async with served(app) as address, openai_client(address) as client:
        opening = asyncio.create_task(client.completions.create(model=MODEL, prompt="a", stream=True))
        await until(lambda: bool(engine.requests))
        engine.tokens([40])
        stream = await opening
        await anext(stream)
        engine.die("killed by signal 9")
        with pytest.raises(openai.APIError, match="killed by signal 9"):
            await anext(stream)


async def test_client_that_hangs_up_aborts(app: FastAPI, engine: FakeEngine) -> None:
    engine.reply = None
    async with served(app) as address:
        async with httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}") as client:
            opening = client.stream("POST", "/v1/chat/completions", json=chat(stream=True))
            reading = asyncio.create_task(opening.__aenter__())
            await until(lambda: bool(engine.requests))
            engine.tokens([40])
            response = await reading
            await response.aclose()
        await until(lambda: engine.num_unfinished == 0)
        assert engine.aborted == [engine.requests[0].request_id]


async def test_half_sent_requests_hurt_nobody_and_time_out(
    engine: FakeEngine, tokenizer: PreTrainedTokenizerFast, metrics: MetricsCollector
) -> None:
    settings = ApiSettings(served_model_names=(MODEL,), body_timeout_s=0.5)
    app = create_app(engine, tokenizer, settings, metrics)
    async with served(app, **settings.uvicorn_options()) as address:
        _, half_head_writer = await asyncio.open_connection(*address)
        half_head_writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: te")
        half_body, half_body_writer = await asyncio.open_connection(*address)
        half_body_writer.write(post_bytes(b'{"messages": [', content_length=500))
        async with httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}") as client:
            assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200
        answer = await half_body.read()
        assert answer.startswith(b"HTTP/1.1 408") and b'"code":"body_timeout"' in answer
        for writer in (half_head_writer, half_body_writer):
            writer.close()
            await writer.wait_closed()
        assert len(engine.requests) == 1


CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n"
NOT_HTTP = {
    "in the body of a request that is being handled": CHUNKED + b"\r\nnot a length\r\n",
    "in the body of a request that is refused": CHUNKED + b"X-Request-Id: a b\r\n\r\nnot a length\r\n",
}


@pytest.mark.parametrize("request_bytes", NOT_HTTP.values(), ids=NOT_HTTP)
async def test_a_body_that_is_not_http_is_answered_once(
    app: FastAPI, engine: FakeEngine, caplog: pytest.LogCaptureFixture, request_bytes: bytes
) -> None:
    async with served(app, **ApiSettings(served_model_names=(MODEL,)).uvicorn_options()) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request_bytes)
        answered = await reader.read()
        writer.close()
    assert answered.startswith(b"HTTP/1.1 400 ") and answered.count(b"HTTP/1.1") == 1
    assert not engine.requests and "Traceback" not in caplog.text


async def test_a_body_that_becomes_no_http_after_the_answer_ends_the_connection(
    app: FastAPI, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(app, **ApiSettings(served_model_names=(MODEL,)).uvicorn_options()) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(CHUNKED + b"X-Request-Id: a b\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        writer.write(b"not a length\r\n")
        await reader.read()
        writer.close()
    assert "Traceback" not in caplog.text


async def test_a_request_with_two_lengths_is_the_last_of_its_connection(app: FastAPI) -> None:
    """A proxy in front may take the other length, and the rest for a part of this request."""
    both = b"GET /livez HTTP/1.1\r\nHost: test\r\nContent-Length: 60\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    async with served(app, **ApiSettings(served_model_names=(MODEL,)).uvicorn_options()) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(both + b"GET /v1/models HTTP/1.1\r\nHost: test\r\n\r\n")
        answered = await reader.read()
        writer.close()
    assert answered.count(b"HTTP/1.1 200") == 1 and MODEL.encode() not in answered


async def test_body_that_breaks_off(app: FastAPI, engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    async with served(app) as address:
        _, writer = await asyncio.open_connection(*address)
        writer.write(post_bytes(b'{"messages": [', content_length=500))
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        async with httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}") as client:
            assert (await client.get("/livez")).status_code == 200
    assert not engine.requests and "Traceback" not in caplog.text


async def test_who_sends_too_much_can_send_on_and_read_the_answer(app: FastAPI, settings: ApiSettings) -> None:
    """Closing at once would reset the connection, and a client that is still sending would lose the answer."""
    part = b" " * 16384
    num_parts = 3 * settings.max_body_bytes // len(part)
    async with served(app) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(post_bytes(b"", content_length=num_parts * len(part)))
        for _ in range(num_parts):
            await asyncio.sleep(0.01)  # time for a reset to arrive
            writer.write(part)
            await writer.drain()
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 413")
        assert json.loads(body)["error"]["code"] == "body_too_large"
        writer.close()
        await writer.wait_closed()


async def test_headers_over_the_limit(app: FastAPI, settings: ApiSettings) -> None:
    async with served(app, **settings.uvicorn_options()) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /livez HTTP/1.1\r\nX-Long: " + b"x" * (2 * settings.max_header_bytes))
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
        await writer.wait_closed()


GET_LIVEZ = b"GET /livez HTTP/1.1\r\nHost: test\r\n\r\n"


async def read_until_closed(reader: asyncio.StreamReader) -> bytes:
    """Return what came before the end; a byte that meets a closed socket makes the end a reset."""
    read = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := await reader.read(4096):
            read += chunk
    return read


async def closed_while_dripping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    """Send byte by byte, on and on, until the server closes; what it answered."""
    drip = itertools.chain(data, itertools.repeat(ord("x")))
    reading = asyncio.create_task(read_until_closed(reader))
    async with asyncio.timeout(10):
        while not reading.done():
            writer.write(bytes([next(drip)]))
            await asyncio.sleep(0.01)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return await reading


@pytest.mark.parametrize("before", [b"", GET_LIVEZ], ids=["first request", "after another one"])
async def test_headers_that_never_end_close_the_connection(app: FastAPI, before: bytes) -> None:
    settings = ApiSettings(served_model_names=(MODEL,), header_timeout_s=0.2)
    async with served(app, **settings.uvicorn_options()) as address:
        reader, writer = await asyncio.open_connection(*address)
        if before:
            writer.write(before)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        answer = await closed_while_dripping(reader, writer, b"POST /v1/completions HTTP/1.1\r\nX-Slow: ")
        assert b"HTTP" not in answer


async def test_a_connection_that_sends_nothing_is_closed(app: FastAPI) -> None:
    settings = ApiSettings(served_model_names=(MODEL,), keep_alive_s=1)
    async with served(app, **settings.uvicorn_options()) as address, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(*address)
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


async def test_slow_answers_and_headers_in_pieces_are_fine(app: FastAPI, engine: FakeEngine) -> None:
    engine.reply = None
    settings = ApiSettings(served_model_names=(MODEL,), header_timeout_s=0.3, keep_alive_s=1)
    body = json.dumps(chat()).encode()
    async with served(app, **settings.uvicorn_options()) as address:
        reader, writer = await asyncio.open_connection(*address)
        for number in range(1, 3):
            writer.write(post_bytes(body)[:20])
            await asyncio.sleep(0.01)
            writer.write(post_bytes(body)[20:])
            await until(lambda number=number: len(engine.requests) == number)
            await asyncio.sleep(1.2)  # longer than either timeout
            engine.tokens([40])
            engine.finish()
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(length.split(b":")[1]))
        writer.close()
        await writer.wait_closed()


async def test_keep_alive_serves_several_requests_on_one_connection(app: FastAPI) -> None:
    body = json.dumps(chat()).encode()
    async with served(app) as address:
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(3):
            writer.write(post_bytes(body))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            assert b"Hello world" in await reader.readexactly(int(length.split(b":")[1]))
        writer.close()
        await writer.wait_closed()


async def test_memory_of_a_reader_that_stalls_is_bounded(
    app: FastAPI, engine: FakeEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    """The socket and the transport fill up, then the text gathers in one string; it all arrives in the end."""
    engine.reply = None
    ids = encode(tokenizer, "the quick brown fox " * 50)
    async with served(app) as address:
        reader, writer = await asyncio.open_connection(*address, limit=2**10)
        writer.write(post_bytes(json.dumps(chat(stream=True)).encode()))
        await until(lambda: bool(engine.requests))
        for _ in range(400):
            engine.tokens(ids)
            await asyncio.sleep(0)
        engine.finish()
        await until(lambda: engine.num_unfinished == 0)
        received = await read_to_done(reader)
        assert received.count(b"quick") == 400 * 50
        writer.close()
        await writer.wait_closed()


async def read_to_done(reader: asyncio.StreamReader) -> bytes:
    received = bytearray()
    while b"data: [DONE]" not in received[-200:]:
        part = await reader.read(2**16)
        assert part, "the stream broke off"
        received += part
    return bytes(received)

"""Behind a real socket: answers that nobody reads, bodies in very small chunks, and what is no HTTP."""

import asyncio
import json
import socket

import pytest
from fastapi import FastAPI
from transformers import PreTrainedTokenizerFast

from flyball_runtime.api import ApiSettings
from flyball_runtime.api.http_protocol import MAX_CHUNKS, READ_BYTES, BoundedH11Protocol
from runtime.api.support import MODEL, encode, served, until
from runtime.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

SETTINGS = ApiSettings(served_model_names=(MODEL,), write_timeout_s=0.2)
CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[BoundedH11Protocol]:
    """Every connection that the server has accepted."""
    made: list[BoundedH11Protocol] = []
    original = BoundedH11Protocol.connection_made

    def connection_made(self: BoundedH11Protocol, transport: asyncio.Transport) -> None:
        made.append(self)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)
        original(self, transport)

    monkeypatch.setattr(BoundedH11Protocol, "connection_made", connection_made)
    return made


async def ask_for_much(
    address: tuple[str, int], engine: FakeEngine, tokenizer: PreTrainedTokenizerFast, *, stream: bool = False
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request whose answer is far longer than what the sockets hold. A stream goes on after that."""
    body = json.dumps({"prompt": "a", "max_tokens": None, "stream": stream}).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, address)
    reader, writer = await asyncio.open_connection(sock=client, limit=2**10)
    engine.reply = None
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    await until(lambda: bool(engine.requests))
    engine.tokens(encode(tokenizer, "the quick brown fox " * 30_000))
    if not stream:
        engine.finish()
    return reader, writer


async def test_a_whole_answer_that_nobody_reads_is_dropped(
    app: FastAPI,
    engine: FakeEngine,
    tokenizer: PreTrainedTokenizerFast,
    connections: list[BoundedH11Protocol],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served(app, **SETTINGS.uvicorn_options()) as address:
        _, writer = await ask_for_much(address, engine, tokenizer)
        (connection,) = connections
        await until(lambda: connection.transport.get_write_buffer_size() > 300_000)
        await until(lambda: connection not in connection.connections)
        assert connection.transport.get_write_buffer_size() == 0
        writer.close()
    assert "has read nothing of its answer" in caplog.text


async def test_a_stream_that_nobody_reads_is_dropped_and_aborted(
    app: FastAPI,
    engine: FakeEngine,
    tokenizer: PreTrainedTokenizerFast,
    connections: list[BoundedH11Protocol],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served(app, **SETTINGS.uvicorn_options()) as address:
        _, writer = await ask_for_much(address, engine, tokenizer, stream=True)
        (connection,) = connections
        await until(lambda: connection.transport.get_write_buffer_size() > 300_000)
        engine.tokens([40])  # the next write waits for the reader
        await until(lambda: engine.num_unfinished == 0)
        assert connection not in connection.connections and connection.transport.get_write_buffer_size() == 0
        writer.close()
    assert "has read nothing of its answer" in caplog.text
    assert "ASGI callable" not in caplog.text and "Traceback" not in caplog.text


async def test_a_slow_reader_gets_all_of_a_whole_answer(
    app: FastAPI,
    engine: FakeEngine,
    tokenizer: PreTrainedTokenizerFast,
    connections: list[BoundedH11Protocol],
) -> None:
    async with served(app, **ApiSettings(served_model_names=(MODEL,)).uvicorn_options()) as address:
        reader, writer = await ask_for_much(address, engine, tokenizer)
        (connection,) = connections
        await until(lambda: connection.transport.get_write_buffer_size() > 300_000)
        num_waiting = connection.transport.get_write_buffer_size()
        head = await reader.readuntil(b"\r\n\r\n")
        left = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while connection.transport.get_write_buffer_size() == num_waiting:
            left -= len(await reader.read(left))
        connection._check_reader(num_waiting)  # as when the write timeout has passed
        await reader.readexactly(left)
        writer.close()
        await writer.wait_closed()


async def test_a_body_of_very_small_chunks_is_read_in_small_parts_and_refused(
    app: FastAPI, connections: list[BoundedH11Protocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    original = BoundedH11Protocol.data_received
    monkeypatch.setattr(
        BoundedH11Protocol, "data_received", lambda self, data: (sizes.append(len(data)), original(self, data))[1]
    )
    async with served(app, **SETTINGS.uvicorn_options()) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(CHUNKED + b"1\r\n \r\n" * (MAX_CHUNKS + 20))  # a few escape the count
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400") and b"application/json" in answer
        assert max(sizes) <= READ_BYTES
        writer.close()


async def test_as_many_chunks_as_are_allowed_pass_again_and_again(app: FastAPI) -> None:
    body = b'{"prompt": "a"' + b" " * (MAX_CHUNKS - 15) + b"}"
    async with served(app, **SETTINGS.uvicorn_options()) as address:
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(2):
            writer.write(CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        writer.close()
        await writer.wait_closed()


LIVEZ = b"GET /livez HTTP/1.1\r\nHost: test\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        (b"GET /livez HTTP/1.0\r\n\r\n", [b"200"]),
        (b"GET /nope HTTP/1.0\r\n\r\n", [b"404"]),
        (b'POST /tokenize HTTP/1.0\r\nContent-Length: 15\r\n\r\n{"prompt": "a"}', [b"200"]),
        (b"GET /nope HTTP/1.1\r\nHost: [\r\n\r\n", [b"404"]),
        (b"GET /livez HTTP/1.1\r\n\r\n", [b"400"]),
        (b"\x16\x03\x01\x00\xff\r\n\r\n", [b"400"]),
        (LIVEZ + b"\x00\x1b[31m\r\n\r\n", [b"200", b"400"]),
        (CHUNKED + b"zz\r\n", [b"400"]),
        (b"POST /nope HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n", [b"404"]),
    ],
)
async def test_odd_requests_get_an_answer_and_no_traceback(
    app: FastAPI, caplog: pytest.LogCaptureFixture, sent: bytes, answers: list[bytes]
) -> None:
    async with served(app, **SETTINGS.uvicorn_options()) as address, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        for status in answers:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == status
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        if answers == [b"404"] and b"chunked" in sent:
            writer.write(b"zz\r\n")  # what follows an answer that was given early is not HTTP
            assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
    assert "Traceback" not in caplog.text

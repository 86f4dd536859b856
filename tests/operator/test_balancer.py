"""The balancer between raw connections and a replica of this process: what a client may do to others, and to its own bytes."""

import asyncio
import contextlib
import gzip
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from flyball_operator.local import balancer as balancer_module
from flyball_operator.local import connections as connections_module
from flyball_operator.local.balancer import Balancer
from flyball_operator.local.body import num_choices
from flyball_operator.local.connections import Connections
from flyball_operator.local.replica import Replica, State
from flyball_operator.local.runner import listen

DEADLINE_S = 60.0
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
GET = b"GET /v1/models HTTP/1.1\r\nHost: chat\r\nConnection: close\r\n\r\n"

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class World:
    """A balancer over one replica, whose requests are kept as they came: head and body."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.replicas: list[Replica] = []
        self.requests: list[tuple[bytes, bytes]] = []

    async def open(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer

    async def ask(self, request: bytes = GET) -> bytes:
        """Return everything that comes until the connection is closed."""
        reader, writer = await self.open(request)
        try:
            return await reader.read()
        finally:
            writer.close()


@asynccontextmanager
async def balanced(handle: Handle | None = None, **options: Any) -> AsyncIterator[World]:
    serving: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(cast(asyncio.Task[Any], asyncio.current_task()))
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            world.requests.append(await read_request(reader))
            await (handle or answer)(reader, writer)

    upstream = await asyncio.start_server(serve, "127.0.0.1", 0)
    world = World(0)
    world.replicas.append(replica_at(1, upstream))
    balancer = Balancer(lambda: world.replicas, lambda: False, **options)
    listener = listen("127.0.0.1", 0)
    world.port = listener.getsockname()[1]
    await balancer.start(listener)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield world
    finally:
        await balancer.close()
        upstream.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


def replica_at(number: int, server: asyncio.Server) -> Replica:
    replica = Replica(
        number,
        cast(Any, None),
        {},
        Path("/dev/null"),
        cast(Any, None),
        on_change=lambda: None,
        report=lambda _: None,
        backoff=cast(Any, None),
    )
    replica.state, replica.port = State.READY, server.sockets[0].getsockname()[1]
    return replica


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    if b"transfer-encoding: chunked" in lines:
        body = b""
        while (size := int((await reader.readuntil(b"\r\n")).strip(), 16)) > 0:
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        return head, body
    return head, await reader.readexactly(sum(int(line[15:]) for line in lines if line.startswith(b"content-length:")))


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(OK)


def error_of(answered: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answered.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def post(body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: chat", b"Connection: close", *headers]
    return b"\r\n".join([*lines, b"", b""]) + body


def test_a_compressed_body_goes_through_as_it_came() -> None:
    async def check() -> None:
        compressed = gzip.compress(b'{"prompt": "' + b"hello " * 1000 + b'"}')
        async with balanced() as world:
            length = b"Content-Length: %d" % len(compressed)
            assert b" 200 " in await world.ask(post(compressed, length, b"Content-Encoding: gzip"))
            chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(compressed), compressed)
            assert b" 200 " in await world.ask(post(chunked, b"Transfer-Encoding: chunked", b"Content-Encoding: gzip"))
            for head, body in world.requests:
                assert b"content-encoding: gzip" in head.lower()
                assert body == compressed

    asyncio.run(check())


@pytest.mark.parametrize("headers", [(), (b"X-Forwarded-For: 198.51.100.1", b"X-Forwarded-For: 198.51.100.2")])
def test_a_replica_learns_the_clients_address_last_whatever_the_client_says(headers: tuple[bytes, ...]) -> None:
    async def check() -> None:
        async with balanced() as world:
            await world.ask(post(b"", b"Content-Length: 0", *headers))
            ((head, _),) = world.requests
        lines = head.lower().split(b"\r\n")
        (addresses,) = [line.partition(b": ")[2] for line in lines if line.startswith(b"x-forwarded-for:")]
        said = [header.partition(b": ")[2] for header in headers]
        assert addresses.split(b", ") == [*said, b"127.0.0.1"]

    asyncio.run(check())


def test_a_request_counts_as_its_choices_while_it_runs() -> None:
    async def check() -> None:
        seen: list[int] = []

        async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(world.replicas[0].outstanding)
            writer.write(OK)

        async with balanced(count) as world:
            for body in (b'{"prompt": ["a", "b"], "n": 3}', b'{"messages": []}'):
                await world.ask(post(body, b"Content-Length: %d" % len(body)))
            assert (seen, world.replicas[0].outstanding, world.replicas[0].served) == ([6, 1], 0, 7)

    asyncio.run(check())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", 1),
        (b"not JSON", 1),
        (b"[1, 2]", 1),
        (b"{}", 1),
        (b'{"n": null, "prompt": null}', 1),
        (b'{"n": 4, "messages": [{}, {}]}', 4),
        (b'{"n": 2, "prompt": "a text"}', 2),
        (b'{"n": 2, "prompt": [5, 6, 7]}', 2),
        (b'{"n": 2, "prompt": [ "a", "b", "c"]}', 6),
        (b'{"prompt": [[5], [6]]}', 2),
        (b'{"n": 0, "prompt": []}', 1),
        (b'{"n": -3}', 1),
        (b'{"n": "many"}', 1),
        (b'{"n": 2.5}', 1),
        (b'{"n": 1' + b"0" * 5000 + b"}", 1),
        (b'{"n": 1000000, "prompt": ["a", "b"]}', 256),
        (b'{"n": ' + b"[" * 5000 + b"}", 1),
        (b'{"n": 3, "prompt": "\xff"}', 3),
        (b'{"n": 3, "prompt": [' + b'"",' * 300_000 + b'""]}', 3),
    ],
)
def test_choices_of_a_body(body: bytes, expected: int) -> None:
    assert num_choices(body) == expected


def test_a_compressed_answer_goes_through_as_it_came() -> None:
    compressed = gzip.compress(b"{}" * 1000)

    async def compress(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(compressed)
        writer.write(head + compressed)

    async def check() -> None:
        async with balanced(compress) as world:
            head, _, body = (await world.ask()).partition(b"\r\n\r\n")
            assert b"content-encoding: gzip" in head.lower()
            assert body == compressed

    asyncio.run(check())


def test_the_answer_to_head_keeps_its_length() -> None:
    async def check() -> None:
        async def no_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n")

        async with balanced(no_body) as world:
            answered = await world.ask(GET.replace(b"GET", b"HEAD"))
            assert b"content-length: 1234" in answered.lower()
            assert answered.endswith(b"\r\n\r\n")

    asyncio.run(check())


@pytest.mark.parametrize("path", [b"/v1/models", b"/readyz"])
def test_an_expectation_that_is_not_known_is_refused_in_the_apis_shape(path: bytes) -> None:
    async def check() -> None:
        async with balanced() as world:
            answered = await world.ask(b"GET " + path + b" HTTP/1.1\r\nHost: chat\r\nExpect: miracles\r\n\r\n")
            assert answered.startswith(b"HTTP/1.1 417 ")
            assert json.loads(answered.partition(b"\r\n\r\n")[2])["error"]["code"] == "expectation_failed"
            assert not world.requests

    asyncio.run(check())


def test_expect_chunks_and_trailers_end_here() -> None:
    async def check() -> None:
        async with balanced() as world:
            body = b"5;x=1\r\nhello\r\n0\r\nX-Trailer: 1\r\n\r\n"
            headers = (b"Transfer-Encoding: chunked", b"Expect: 100-continue", b"Trailer: X-Trailer", b"TE: trailers")
            answered = await world.ask(post(body, *headers))
            assert answered.startswith(b"HTTP/1.1 100 ")
            assert b" 200 " in answered
            ((head, passed),) = world.requests
            assert passed == b"hello"
            assert not [name for name in (b"expect", b"trailer", b"\r\nte:") if name in head.lower()]

    asyncio.run(check())


MALFORMED = {
    "garbage": b"\x16\x03\x01\x02\x00 what?\r\n\r\n",
    "escape codes": b"GET /\x1b[31m\x07 HTTP/1.1\r\nHost: x\r\n\r\n",
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "not ascii": b"GET /caf\xc3\xa9 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "unknown method": b"STEAL / HTTP/1.1\r\nHost: x\r\n\r\n",
    "no target": b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "connect": b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "length is no number": post(b"", b"Content-Length: x"),
    "length below zero": post(b"", b"Content-Length: -1"),
    "two lengths": post(b"a", b"Content-Length: 1", b"Content-Length: 2"),
    "length and chunks": post(b"0\r\n\r\n", b"Content-Length: 5", b"Transfer-Encoding: chunked"),
    "chunked twice": post(b"0\r\n\r\n", b"Transfer-Encoding: chunked, chunked"),
    "chunk size": post(b"zz\r\nhello\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"),
    "chunk end": post(b"5\r\nhelloX\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"),
    "header name": b"GET / HTTP/1.1\r\nHo st: x\r\n\r\n",
    "header value": b"GET / HTTP/1.1\r\nHost: x\r\nX: a\0b\r\n\r\n",
    "long header": b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: 1\r\n" * 2000 + b"\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_http_is_refused_in_a_short_answer_and_without_a_line_in_the_terminal(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with balanced() as world:
            with caplog.at_level(logging.INFO):
                status, error = error_of(await world.ask(MALFORMED[name]))
            assert (status, error["code"], error["type"]) == (400, "bad_request", "invalid_request_error")
            assert error["message"].isprintable()
            assert len(error["message"]) < 700
            assert not caplog.records
            assert not world.requests
            assert b" 200 " in await world.ask()

    asyncio.run(check())


@pytest.mark.parametrize(
    "request_",
    [
        b"GET http://elsewhere/v1/models HTTP/1.1\r\nHost: elsewhere\r\nConnection: close\r\n\r\n",
        b"GET /v1/models HTTP/1.0\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n",
        b"GET //a/../b?x=%00#y HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX: \xff\r\n\r\n",
    ],
)
def test_what_is_odd_but_http_reaches_the_replica(request_: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with balanced() as world:
            with caplog.at_level(logging.INFO):
                assert b" 200 " in await world.ask(request_)
            assert b"upgrade" not in world.requests[0][0].lower()
            assert not caplog.records

    asyncio.run(check())


def test_heads_that_do_not_end_are_closed_while_others_are_served() -> None:
    async def check() -> None:
        async with balanced(header_timeout_s=0.3) as world:
            slow = [await world.open(b"GET / HTTP/1.1\r\nHost: x\r\nX: ") for _ in range(20)]
            assert b" 200 " in await world.ask()
            for reader, writer in slow:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
                writer.close()

    asyncio.run(check())


def test_a_kept_connection_has_the_same_time_for_each_head() -> None:
    async def check() -> None:
        async with balanced(header_timeout_s=0.3) as world:
            reader, writer = await world.open(GET.replace(b"Connection: close\r\n", b""))
            assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200 ")
            await asyncio.sleep(0.5)  # idle between two requests, which is no half of one
            writer.write(GET[:20])
            assert await reader.read() == b""
            writer.close()

    asyncio.run(check())


def test_connections_that_wait_for_their_client_give_way_to_new_ones() -> None:
    async def check() -> None:
        async with balanced(connections=Connections(most=5)) as world:
            idle = [await world.open(b"GET / HTTP/1.1\r\n" if i % 2 else b"") for i in range(20)]
            for _ in range(3):
                assert b" 200 " in await world.ask()
            for _, writer in idle:
                writer.close()

    asyncio.run(check())


def test_connections_that_are_served_stay_and_a_new_one_is_told_to_come_again() -> None:
    async def check() -> None:
        go_on = asyncio.Event()

        async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await go_on.wait()
            writer.write(OK)

        async with balanced(wait, connections=Connections(most=2)) as world:
            served = [asyncio.create_task(world.ask()) for _ in range(2)]
            while len(world.requests) < 2:
                await asyncio.sleep(0.01)
            answered = await world.ask(b"")
            assert error_of(answered)[0] == 503
            assert error_of(answered)[1]["code"] == "too_many_connections"
            assert b"Retry-After: 1" in answered
            go_on.set()
            assert all(b" 200 " in answered for answered in await asyncio.gather(*served))
            assert b" 200 " in await world.ask()

    asyncio.run(check())


def test_the_slowest_body_gives_way_when_bodies_take_too_much_memory() -> None:
    async def check() -> None:
        async with balanced(connections=Connections(most=10, max_held_bytes=1000)) as world:
            reader, writer = await world.open(post(b"x" * 999, b"Content-Length: 1000"))
            await asyncio.sleep(0.1)
            assert b" 200 " in await world.ask(post(b"y" * 900, b"Content-Length: 900"))
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
            assert error_of(await world.ask(post(b"x" * 1001, b"Content-Length: 1001")))[0] == 503
            assert b" 200 " in await world.ask(post(b"z" * 1000, b"Content-Length: 1000"))

    asyncio.run(check())


def test_a_long_answer_is_passed_on_as_it_comes_and_a_cut_one_stays_cut() -> None:
    size = 3 << 20

    async def check() -> None:
        cut_by = 0

        async def long(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
            writer.write(b"x" * (size - cut_by))
            await writer.drain()

        async with balanced(long) as world:
            assert len((await world.ask()).partition(b"\r\n\r\n")[2]) == size
            cut_by = 1
            reader, writer = await world.open(GET)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(size)
            writer.close()

    asyncio.run(check())


def test_a_client_that_reads_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balancer_module, "WRITE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(connections_module, "WRITE_TIMEOUT_S", 0.3)
    dropped = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while not reader.at_eof():
                writer.write(b"x" * 65536)
                await writer.drain()
        finally:
            dropped.set()

    async def check() -> None:
        async with balanced(endless) as world:
            _, writer = await asyncio.open_connection("127.0.0.1", world.port, limit=1)
            writer.write(GET)
            await dropped.wait()
            writer.close()

    asyncio.run(check())


@pytest.mark.parametrize(("leaving", "status"), [(True, 200), (False, 502)])
def test_a_request_that_a_draining_replica_had_not_taken_goes_to_another(leaving: bool, status: int) -> None:
    async def check() -> None:
        async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if leaving:
                world.replicas[0].stop()

        async with balanced(end) as world:
            other = await asyncio.start_server(serve_other, "127.0.0.1", 0)
            world.replicas.append(replica_at(2, other))
            head = (await world.ask(post(b"{}", b"Content-Length: 2"))).partition(b"\r\n")[0]
            assert int(head.split()[1]) == status
            other.close()

    async def serve_other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await read_request(reader))[1] == b"{}"
        writer.write(OK)
        await writer.drain()
        writer.close()

    asyncio.run(check())

"""What is answered while the runtime is gone: over real sockets, against services that take, refuse, break off and loop."""

import asyncio
import contextlib
import errno
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import flyball_runtime.listener.relay
from flyball_runtime.listener.relay import RELAYED_HEADER, Relay, ServiceAddress, unavailable

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"
BODY = b'{"prompt": "hello"}'
POST = (
    b"POST /v1/completions?x=1 HTTP/1.1\r\nHost: chat\r\nConnection: keep-alive\r\nX-Id: 7\r\nContent-Length: 19\r\n\r\n"
    + BODY
)

Handle = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class FakeService:
    """A server that notes each request and leaves the rest to ``handle``; by default it answers."""

    def __init__(self, handle: Handle | None = None) -> None:
        self.requests: list[bytes] = []
        self._handle = handle or answer
        self._server: asyncio.Server | None = None
        self.address = ServiceAddress("127.0.0.1", 0)

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.address = ServiceAddress("127.0.0.1", self._server.sockets[0].getsockname()[1])

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = sum(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
        request = head + await reader.readexactly(length)
        self.requests.append(request)
        await self._handle(request, reader, writer)
        writer.close()


async def answer(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(ANSWER)


@asynccontextmanager
async def relaying(service: FakeService, **options: Any) -> AsyncIterator[tuple[Relay, int]]:
    """A started service, and a relay to it behind a port."""
    await service.start()
    relay = Relay(service.address, **{"patience_s": 1.0, "retry_s": 0.02} | options)
    with listening() as listener:
        serving = asyncio.create_task(relay.serve(listener))
        try:
            yield relay, listener.getsockname()[1]
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            service.stop()


def listening() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    return listener


async def ask(port: int, request: bytes = POST) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answered = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answered


def problem_of(answered: bytes) -> str:
    """The message of a well-formed 503 that says when to come again."""
    head, _, body = answered.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 2" in head
    assert f"Content-Length: {len(body)}".encode() in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"], error["param"]) == ("server_error", "runtime_gone", None)
    return str(error["message"])


def test_a_request_reaches_another_replica_whole_and_so_does_the_answer() -> None:
    async def check() -> None:
        service = FakeService()
        async with relaying(service) as (_, port):
            assert await ask(port) == ANSWER
        (request,) = service.requests
        head, _, body = request.partition(b"\r\n\r\n")
        first, *headers = head.lower().split(b"\r\n")
        assert (first, body) == (b"post /v1/completions?x=1 http/1.1", BODY)
        assert {b"host: chat", b"x-id: 7", b"connection: close", RELAYED_HEADER + b": 1"} <= set(headers)
        assert b"connection: keep-alive" not in headers

    asyncio.run(check())


def test_the_last_address_it_was_forwarded_for_is_its_clients_whatever_that_one_says() -> None:
    async def check() -> None:
        service = FakeService()
        async with relaying(service) as (_, port):
            await ask(port, POST.replace(b"X-Id: 7", b"X-Forwarded-For: 198.51.100.1"))
        lines = service.requests[0].partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
        addresses = [line.partition(b": ")[2] for line in lines if line.startswith(b"x-forwarded-for:")]
        assert addresses == [b"198.51.100.1", b"127.0.0.1"]

    asyncio.run(check())


def test_a_request_without_a_body_is_passed_on_too() -> None:
    async def check() -> None:
        service = FakeService()
        async with relaying(service) as (_, port):
            assert await ask(port, b"GET /v1/models HTTP/1.1\r\nHost: chat\r\n\r\n") == ANSWER
        assert service.requests[0].startswith(b"GET /v1/models HTTP/1.1\r\n")

    asyncio.run(check())


def test_a_request_of_http_1_0_is_passed_on_as_that() -> None:
    """It has no Host, and its client could not read the chunks of an answer to HTTP/1.1."""

    async def check() -> None:
        service = FakeService()
        async with relaying(service) as (_, port):
            assert await ask(port, b"POST /v1/completions HTTP/1.0\r\nContent-Length: 19\r\n\r\n" + BODY) == ANSWER
        head, _, body = service.requests[0].partition(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/completions HTTP/1.0\r\n") and b"host" not in head.lower()
        assert body == BODY

    asyncio.run(check())


def test_a_replica_that_cannot_take_it_is_asked_again() -> None:
    async def twice_unready(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ANSWER if len(service.requests) == 3 else unavailable("loading", "/v1/completions"))

    service = FakeService(twice_unready)

    async def check() -> None:
        async with relaying(service) as (_, port):
            assert await ask(port) == ANSWER
        assert len(service.requests) == 3

    asyncio.run(check())


def test_a_service_without_replicas_is_waited_for() -> None:
    async def check() -> None:
        service = FakeService()
        async with relaying(service, patience_s=10) as (_, port):
            service.stop()
            asking = asyncio.create_task(ask(port))
            await asyncio.sleep(0.1)
            assert not asking.done()
            await service.start(service.address.port)
            assert await asking == ANSWER

    asyncio.run(check())


@pytest.mark.parametrize(
    ("stopped", "says"), [(True, "no replica answers at 127.0.0.1:"), (False, "every replica says")]
)
def test_patience_ends_with_a_clear_error(stopped: bool, says: str) -> None:
    async def unready(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(unavailable("loading", "/v1/completions"))

    async def check() -> None:
        service = FakeService(unready)
        async with relaying(service, patience_s=0.1) as (_, port):
            if stopped:
                service.stop()
            message = problem_of(await ask(port))
            assert says in message
            assert "for 0.1 s" in message

    asyncio.run(check())


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (b"GET /readyz HTTP/1.1\r\nHost: chat\r\n\r\n", "asks about this replica"),
        (b"HEAD /metrics?x HTTP/1.1\r\nHost: chat\r\n\r\n", "asks about this replica"),
        (b"POST / HTTP/1.1\r\nHost: chat\r\nFlyball-Relayed: 1\r\nContent-Length: 0\r\n\r\n", "passed on before"),
        (b"POST / HTTP/1.1\r\nHost: chat\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "does not say its length"),
        (b"POST / HTTP/1.1\r\nHost: chat\r\nContent-Length: 1001\r\n\r\n", "longer than the 1000 bytes"),
        (b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n", "cannot be read"),
        (b"\x16\x03\x01 what?\r\n\r\n", "cannot be read"),
        (b"POST / HTTP/1.1\r\nHost: " + b"x" * 20000, "cannot be read"),
    ],
)
def test_what_is_not_passed_on_gets_a_503_at_once(request_: bytes, says: str) -> None:
    async def check() -> None:
        service = FakeService()
        async with relaying(service, max_held_bytes=1000) as (_, port):
            assert says in problem_of(await ask(port, request_))
        assert not service.requests

    asyncio.run(check())


def test_clients_of_anthropics_api_get_a_503_in_its_shape() -> None:
    async def check() -> None:
        service = FakeService()
        async with relaying(service, patience_s=0) as (_, port):
            service.stop()
            _, _, body = (await ask(port, POST.replace(b"/v1/completions", b"/v1/messages"))).partition(b"\r\n\r\n")
        answered = json.loads(body)
        assert answered["type"] == "error"
        assert (answered["error"]["type"], answered["error"]["code"]) == ("overloaded_error", "runtime_gone")

    asyncio.run(check())


class Full(socket.socket):
    """A listening socket for which the process has no descriptor left, twice."""

    num_refused = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if self.num_refused < 2:
            self.num_refused += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_a_connection_waits_while_there_is_no_descriptor_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        with Full(fileno=listening().detach()) as listener:
            serving = asyncio.create_task(Relay(ServiceAddress("127.0.0.1", 1), patience_s=0).serve(listener))
            assert "no replica answers" in problem_of(await ask(listener.getsockname()[1]))
            serving.cancel()
            await asyncio.wait([serving])

    monkeypatch.setattr(flyball_runtime.listener.relay, "ACCEPT_RETRY_S", 0.01)
    asyncio.run(check())
    assert caplog.messages[:2] == ["cannot accept a connection: Too many open files"] * 2


def test_a_service_that_leads_back_here_is_no_loop() -> None:
    async def check() -> None:
        with listening() as listener:
            address = ServiceAddress(*listener.getsockname())
            serving = asyncio.create_task(Relay(address, patience_s=0.2, retry_s=0.05).serve(listener))
            assert "every replica says" in problem_of(await ask(address.port))
            serving.cancel()
            await asyncio.wait([serving])

    asyncio.run(check())


def test_a_request_that_ends_its_replica_is_not_taken_to_the_next() -> None:
    async def end(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async def check() -> None:
        service = FakeService(end)
        async with relaying(service) as (_, port):
            assert "ended before it answered" in problem_of(await ask(port))
        assert len(service.requests) == 1

    asyncio.run(check())


@pytest.mark.parametrize("reset", [False, True])
def test_an_answer_that_is_cut_is_cut_for_the_client_too(reset: bool) -> None:
    async def cut(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ANSWER[:-1])
        await asyncio.sleep(0.05)
        linger = struct.pack("ii", reset, 0)  # on, for no time: closing sends a reset
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    async def check() -> None:
        async with relaying(FakeService(cut)) as (_, port):
            assert await ask(port) == ANSWER[:-1]

    asyncio.run(check())


def test_a_client_that_leaves_ends_its_request() -> None:
    left = asyncio.Event()

    async def stream(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not reader.at_eof():
            writer.write(b"1\r\nx\r\n")
            await asyncio.sleep(0.01)
        left.set()

    async def check() -> None:
        service = FakeService(stream)
        async with relaying(service) as (relay, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(POST)
            await reader.readuntil(b"x")
            writer.transport.abort()
            async with asyncio.timeout(10):
                read_end = asyncio.create_task(left.wait())
                await read_end
                await relay.finish()

    asyncio.run(check())


def test_a_client_may_ask_before_it_sends_the_body() -> None:
    async def check() -> None:
        async with relaying(FakeService()) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head, _, body = POST.partition(b"\r\n\r\n")
            writer.write(head + b"\r\nExpect: 100-continue\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            writer.write(body)
            assert await reader.read() == ANSWER
            writer.close()

    asyncio.run(check())


def test_half_a_request_is_closed_and_gives_its_room_back() -> None:
    async def check() -> None:
        async with relaying(FakeService(), read_timeout_s=0.1, max_held_bytes=len(BODY)) as (_, port):
            assert await ask(port, POST[:-1]) == b""
            assert await ask(port, POST[:20]) == b""
            assert await ask(port) == ANSWER

    asyncio.run(check())


ANNOUNCED = b"POST / HTTP/1.1\r\nHost: chat\r\nContent-Length: 1000\r\n\r\n"


def test_a_length_that_is_only_announced_takes_no_room_from_others() -> None:
    async def check() -> None:
        async with relaying(FakeService(), max_held_bytes=1000) as (_, port):
            _, idle = await asyncio.open_connection("127.0.0.1", port)
            idle.write(ANNOUNCED)
            await idle.drain()
            assert await ask(port) == ANSWER
            idle.close()

    asyncio.run(check())


def test_the_body_that_has_been_arriving_for_longest_gives_way() -> None:
    async def check() -> None:
        async with relaying(FakeService(), max_held_bytes=1000) as (relay, port):
            slow, slow_writer = await asyncio.open_connection("127.0.0.1", port)
            slow_writer.write(ANNOUNCED + b"x" * 999)
            async with asyncio.timeout(10):
                while not any(share.num_bytes == 999 for share in relay._room.arriving):
                    await asyncio.sleep(0.01)
                assert await ask(port) == ANSWER
                with contextlib.suppress(ConnectionError):
                    assert await slow.read() == b""
            slow_writer.close()
            assert await ask(port) == ANSWER  # and what it had is free again

    asyncio.run(check())


def test_connections_that_bring_nothing_give_way_to_a_request() -> None:
    async def check() -> None:
        async with relaying(FakeService(), max_requests=5) as (_, port):
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            for _ in range(3):
                assert await ask(port) == ANSWER
            for _, writer in idle:
                writer.close()

    asyncio.run(check())


def test_a_request_too_many_is_told_to_come_again() -> None:
    go_on = asyncio.Event()

    async def slow(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        writer.write(ANSWER)

    async def check() -> None:
        service = FakeService(slow)
        async with relaying(service, max_requests=2) as (_, port):
            asking = [asyncio.create_task(ask(port)) for _ in range(2)]
            while len(service.requests) < 2:
                await asyncio.sleep(0.01)
            assert "too many others" in problem_of(await ask(port, b""))
            go_on.set()
            assert await asyncio.gather(*asking) == [ANSWER, ANSWER]

    asyncio.run(check())


def test_a_client_that_reads_nothing_of_its_answer_is_dropped() -> None:
    async def endless(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"x" * 65536)
                await writer.drain()

    async def check() -> None:
        async with relaying(FakeService(endless), write_timeout_s=0.2) as (relay, port):
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            writer.write(POST)
            async with asyncio.timeout(30):
                while not relay._running:
                    await asyncio.sleep(0.01)
                await relay.finish()
            writer.close()

    asyncio.run(check())


def test_an_end_waits_for_the_requests_under_way() -> None:
    go_on = asyncio.Event()

    async def slow(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        writer.write(ANSWER)

    async def check() -> None:
        service = FakeService(slow)
        async with relaying(service) as (relay, port):
            asking = asyncio.create_task(ask(port))
            while not service.requests:
                await asyncio.sleep(0.01)
            finishing = asyncio.create_task(relay.finish())
            await asyncio.sleep(0.05)
            assert not finishing.done()
            go_on.set()
            await finishing
            assert await asking == ANSWER

    asyncio.run(check())

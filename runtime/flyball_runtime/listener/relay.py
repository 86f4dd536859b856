"""Answers in place of a runtime that is gone: a request goes to the Service, where another replica takes it.

Kubernetes needs a second or so to see that a container has died, and sends it requests until then. They can be kept, for none
has reached the dead process. What had reached it is lost, and is not sent anew: it may have been what killed it.
"""

import asyncio
import contextlib
import json
import logging
import socket
from typing import NamedTuple

import h11

from flyball_protocol import endpoints
from flyball_protocol.errors import error_body
from flyball_protocol.quoting import one_line
from flyball_runtime.core.room import GivenUp, Room, RoomFull, RoomShare

logger = logging.getLogger(__name__)

RELAYED_HEADER = b"flyball-relayed"
"""Marks a request that comes from here: the Service may send it back to us, and then another replica must be found."""

CHUNK_BYTES = 65536
CONNECT_TIMEOUT_S = 5.0
ACCEPT_RETRY_S = 1.0
UNAVAILABLE = b"HTTP/1.1 503 "
OWN_PATHS = {
    path.encode()
    for path in (endpoints.LIVEZ_PATH, endpoints.READYZ_PATH, endpoints.HEALTH_PATH, endpoints.METRICS_PATH)
}
"""What asks about this replica, and no other."""

_NOT_PASSED_ON = {b"connection", b"keep-alive", b"expect"}


class ServiceAddress(NamedTuple):
    """Where all replicas answer."""

    host: str
    port: int


class Unanswered(Exception):
    """A request that is not passed on, or that nobody took; the message is the client's."""


class Relay:
    """Answers connections, one request each.

    Args:
        service: where to send requests.
        patience_s: how long to look for a replica that takes one.
        retry_s: between two tries.
        max_held_bytes: most bytes of bodies held at a time. Beyond it the body that has been arriving for longest gives way.
        max_requests: most requests at a time, with the connections that may bring one.
        read_timeout_s: a connection that brings no whole request by then is closed.
        write_timeout_s: a client that takes nothing of its answer for so long is dropped.
    """

    def __init__(
        self,
        service: ServiceAddress,
        *,
        patience_s: float = 30.0,
        retry_s: float = 0.25,
        max_held_bytes: int = 32 * 1024 * 1024,
        max_requests: int = 1024,
        read_timeout_s: float = 30.0,
        write_timeout_s: float = 60.0,
    ) -> None:
        self._service = service
        self._patience_s = patience_s
        self._retry_s = retry_s
        self._room = Room(max_held_bytes, max_requests)
        self._read_timeout_s = read_timeout_s
        self._write_timeout_s = write_timeout_s
        self._running: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Answer all connections of a listening socket until cancelled. Those that are then not accepted stay in its queue.

        ``asyncio.Server`` would neither answer nor close one that it accepts just before it is closed.
        """
        loop, has_some = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(listener, has_some.set)
        try:
            while await has_some.wait():
                has_some.clear()
                if not self._accept(listener):
                    await asyncio.sleep(ACCEPT_RETRY_S)
        finally:
            loop.remove_reader(listener)

    def _accept(self, listener: socket.socket) -> bool:
        """Begin to answer one connection, if there is one; returns False when the system has no room for it."""
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return True
        except OSError as error:
            logger.error("cannot accept a connection: %s", error.strerror)
            return False
        task = asyncio.create_task(self._answer(connection))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return True

    async def finish(self) -> None:
        """Wait for the requests under way."""
        if self._running:
            logger.info("%d relayed requests are still running", len(self._running))
            await asyncio.wait(self._running)

    async def _answer(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        incoming = Incoming(reader, writer)
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, TimeoutError):  # the client is gone
            try:
                await self._read_and_pass_on(incoming, writer)
            except (TimeoutError, GivenUp):
                writer.transport.abort()
            except RoomFull:
                await self._write(unavailable("too many others are waiting for another replica", incoming.path), writer)
            except Unanswered as why:
                await self._write(unavailable(str(why), incoming.path), writer)

    async def _read_and_pass_on(self, incoming: "Incoming", writer: asyncio.StreamWriter) -> None:
        with self._room.share() as share:
            async with share.arriving(self._read_timeout_s):
                head = await incoming.head()
                if body_length(head) > self._room.max_bytes:
                    raise Unanswered(f"its body is longer than the {self._room.max_bytes} bytes that can be held")
                body = await incoming.body(share)
            client, *_ = writer.get_extra_info("peername") or ("unknown",)
            await self._pass_on(described(head), relayed(head, body, client), writer)

    async def _pass_on(self, what: str, request: bytes, writer: asyncio.StreamWriter) -> None:
        """Send the request to the Service until a replica takes it, and copy the answer."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        while True:
            problem = "every replica says that it cannot take requests now"
            try:
                answer, service = await self._connect()
            except OSError as error:
                problem = f"no replica answers at {self._service.host}:{self._service.port} ({error})"
            else:
                with contextlib.closing(service):
                    if first := await _ask(request, answer, service):
                        logger.info("%s was accepted by another replica after %.2f s", what, loop.time() - start_s)
                        return await self._copy(first, answer, writer)
            if loop.time() - start_s > self._patience_s:
                logger.error("no replica accepted %s: %s", what, problem)
                raise Unanswered(f"{problem}, for {self._patience_s:g} s")
            await asyncio.sleep(self._retry_s)

    async def _copy(self, first: bytes, answer: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy an answer to its end. One that is cut ends here too: its length or its last chunk is then missing."""
        chunk = first
        while chunk:
            await self._write(chunk, writer)
            chunk = await answer.read(CHUNK_BYTES)

    async def _write(self, chunk: bytes, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(self._write_timeout_s):
            writer.write(chunk)
            await writer.drain()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await asyncio.open_connection(*self._service)
        except TimeoutError:
            raise ConnectionError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from None


class Incoming:
    """The one request of a connection. Its methods raise Unanswered for bad HTTP, ConnectionError when the client leaves.

    Attributes:
        path: what it is sent to; empty until its head has been read.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.path = ""
        self._reader = reader
        self._writer = writer
        self._wire = h11.Connection(h11.SERVER)

    async def head(self) -> h11.Request:
        event = await self._next()
        if not isinstance(event, h11.Request):
            raise ConnectionResetError("the client left")
        self.path = path_of(event).decode()
        return event

    async def body(self, share: RoomShare) -> bytes:
        parts = []
        while isinstance(event := await self._next(), h11.Data):
            share.grow(len(event.data))
            parts.append(bytes(event.data))
        return b"".join(parts)

    async def _next(self) -> object:
        try:
            while (event := self._wire.next_event()) is h11.NEED_DATA:
                if self._wire.they_are_waiting_for_100_continue:
                    go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                    self._writer.write(self._wire.send(go_on) or b"")
                self._wire.receive_data(await self._reader.read(CHUNK_BYTES))
        except h11.RemoteProtocolError as error:
            raise Unanswered(f"it cannot be read: {one_line(str(error))}") from None
        return event


def body_length(head: h11.Request) -> int:
    """Return the length of the body in bytes. Raises Unanswered for what is not passed on."""
    headers = dict(head.headers)
    if path_of(head) in OWN_PATHS:
        raise Unanswered("it asks about this replica")
    if RELAYED_HEADER in headers:
        raise Unanswered("it was passed on before")
    if b"transfer-encoding" in headers:
        raise Unanswered("it does not say its length")
    return int(headers.get(b"content-length", 0))


def path_of(head: h11.Request) -> bytes:
    """Return the target without what follows a question mark."""
    return head.target.partition(b"?")[0]


def described(head: h11.Request) -> str:
    """Return method and path for the log."""
    return one_line(f"{head.method.decode()} {path_of(head).decode()}")


def relayed(head: h11.Request, body: bytes, client: str) -> bytes:
    """Return the request as it is passed on, for a connection of its own, with the client's address.

    Its version stays: a client of HTTP/1.0 sends no Host and reads no chunks.
    """
    headers = [(name, value) for name, value in head.headers if name not in _NOT_PASSED_ON]
    headers += [(b"x-forwarded-for", client.encode()), (b"connection", b"close"), (RELAYED_HEADER, b"1")]
    lines = [b"%b %b HTTP/%b" % (head.method, head.target, head.http_version)]
    lines += [b"%b: %b" % header for header in headers]
    return b"\r\n".join([*lines, b"", body])


async def _ask(request: bytes, answer: asyncio.StreamReader, service: asyncio.StreamWriter) -> bytes:
    """Send a request and return the answer's first bytes; none when it is a 503. Raises Unanswered when there is no answer."""
    try:
        service.write(request)
        await service.drain()
        first = await answer.readexactly(len(UNAVAILABLE))
    except (OSError, asyncio.IncompleteReadError):
        raise Unanswered("another replica took it and ended before it answered") from None
    return b"" if first == UNAVAILABLE else first


def unavailable(why: str, path: str) -> bytes:
    """Return the answer to a request to ``path`` that nobody answered."""
    message = f"the runtime of this replica is being restarted, and the request was not passed on: {why}. Retry."
    body = json.dumps(error_body(503, "runtime_gone", message, path=path)).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 2\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body

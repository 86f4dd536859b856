"""The clients' connections: how many there may be, what they may hold, how long they may take; and refusals on them."""

import asyncio
import json
import logging
import resource
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import HttpVersion11, hdrs, web

from flyball_protocol.errors import error_body
from flyball_protocol.quoting import one_line, quoted

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
HEADER_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 75.0
WRITE_TIMEOUT_S = 60.0
MAX_HELD_BYTES = 64 << 20
MAX_CONNECTIONS = 4096
RESERVED_FILES = 64
"""File handles that connections leave for everything else: logs, the manifest, probes, new processes."""


def server_error(
    request: web.BaseRequest, status: int, code: str, message: str, *, retry: bool = False
) -> web.Response:
    headers = {hdrs.RETRY_AFTER: str(RETRY_AFTER_S)} if retry else {}
    return web.json_response(error_body(status, code, message, path=request.path), status=status, headers=headers)


def client_error(request: web.BaseRequest, status: int, code: str, message: str) -> web.Response:
    """Refuse a request, and close its connection: what else comes on it may be the rest of that request."""
    response = web.json_response(error_body(status, code, message, path=request.path), status=status)
    response.force_close()
    return response


async def answer_expect(request: web.Request) -> web.Response | None:
    """Tell a client to go on, as the header ``Expect`` asks for; return the refusal of anything else that it asks for."""
    expected = request.headers[hdrs.EXPECT]
    if request.version != HttpVersion11:
        return None
    if expected.lower() != "100-continue":
        what = f"the header Expect is {quoted(expected)}; only 100-continue is understood. Leave it out."
        return client_error(request, 417, "expectation_failed", what)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # nothing of the answer has been sent
    return None


class NoRoom(Exception):
    """The others' bodies leave no room for this one."""


class Connections:
    """All connections, and which of them wait for their client: for a request, or for the rest of one.

    When there are too many, or their bodies take too much memory, the connection is closed that has been waiting for its client
    for longest. So those lose who are slow, or who mean to take the places of others.
    """

    def __init__(self, most: int | None = None, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._most = connections_that_fit() if most is None else most
        self._max_held_bytes = max_held_bytes
        self._held: dict[ClientConnection, int] = {}
        self._waiting: dict[ClientConnection, None] = {}  # oldest first
        self._held_bytes = 0

    def add(self, connection: "ClientConnection") -> None:
        """Raise NoRoom when all others are being served."""
        while len(self._held) >= self._most:
            self._close(next(iter(self._waiting), connection), connection)
        self._held[connection] = 0
        self._waiting[connection] = None

    def remove(self, connection: "ClientConnection") -> None:
        self._waiting.pop(connection, None)
        self._held_bytes -= self._held.pop(connection, 0)

    def hold(self, connection: "ClientConnection", num_bytes: int) -> None:
        """Count bytes of a body. Raises NoRoom when those that are whole leave too little for it."""
        if connection not in self._held:
            raise NoRoom
        self._held_bytes += num_bytes
        self._held[connection] += num_bytes
        while self._held_bytes > self._max_held_bytes:
            self._close(next((one for one in self._waiting if self._held[one]), connection), connection)

    def served(self, connection: "ClientConnection") -> None:
        """Say that the whole request is there."""
        self._waiting.pop(connection, None)

    def waits(self, connection: "ClientConnection") -> None:
        """Say that the request has been answered."""
        if connection in self._held:
            self._held_bytes -= self._held[connection]
            self._held[connection] = 0
            self._waiting[connection] = None

    def _close(self, slowest: "ClientConnection", wanting: "ClientConnection") -> None:
        if slowest is wanting:
            raise NoRoom
        self.remove(slowest)
        slowest.force_close()


def connections_that_fit() -> int:
    """Return how many connections this process has file handles for; each may need a second one, to a replica."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, (files - RESERVED_FILES) // 2))


class ClientConnection(web.RequestHandler):
    """aiohttp's HTTP/1.1 connection, with an end to waiting for a client that is slow to send or to read."""

    def __init__(
        self, server: web.Server, connections: Connections, *, header_timeout_s: float, **options: Any
    ) -> None:
        # The body goes on as it came, so what is compressed stays so: its length and its encoding are the client's.
        options |= {"auto_decompress": False, "access_log": None, "keepalive_timeout": KEEP_ALIVE_S}
        super().__init__(server, **options)
        self._connections = connections
        self._header_timeout_s = header_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None
        self._awaits_head = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        try:
            self._connections.add(self)
        except NoRoom:
            if self.transport is not None:
                self.transport.write(_full())
            self.force_close()

    def data_received(self, data: bytes) -> None:
        if self._awaits_head and self._header_timer is None:
            self._header_timer = self._loop.call_later(self._header_timeout_s, self.force_close)
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_header_timer()
        self._connections.remove(self)
        super().connection_lost(exc)

    def began(self) -> None:
        """Say that a request's head is there."""
        self._awaits_head = False
        self._stop_header_timer()

    def hold(self, num_bytes: int) -> None:
        """Count bytes of the request's body. Raises NoRoom."""
        self._connections.hold(self, num_bytes)

    def served(self) -> None:
        """Say that as much of the request is there as is waited for."""
        self._connections.served(self)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            self.drop()
            return resp, True
        finally:
            self._stop_header_timer()
            self._awaits_head = True
            self._connections.waits(self)

    def drop(self) -> None:
        """End the connection of a client that takes nothing, without waiting for what it has not read."""
        if self.transport is not None:
            self.transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a request that is no HTTP, or that failed here; only the latter is worth a line in the terminal."""
        if status < 500:
            log.debug("a request that is no HTTP: %s", one_line(message or ""))
            return client_error(
                request, status, "bad_request", f"the request cannot be read: {one_line(message or '')}"
            )
        if isinstance(exc, ConnectionError):
            raise exc  # the client left
        log.error("a request failed in the balancer", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun, so an error cannot be sent any more")
        return server_error(
            request, status, "internal_error", "the balancer failed to handle the request; its log says why"
        )

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def connection_of(request: web.BaseRequest) -> ClientConnection:
    """Return the connection that a request came on."""
    if not isinstance(request.protocol, ClientConnection):
        raise TypeError(f"the request came on a {type(request.protocol).__name__}")
    return request.protocol


@web.middleware
async def note_beginning(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Tell the connection that a request's head is there. What aiohttp refuses by itself gets our shape of error."""
    connection_of(request).began()
    try:
        return await handler(request)
    except web.HTTPNotFound:  # all paths go to the balancer
        return client_error(
            request, 400, "bad_request", f"the request's target is {quoted(request.path)}; a path is expected"
        )
    except web.HTTPException as error:
        return client_error(request, error.status, "bad_request", f"the request is refused: {one_line(error.reason)}")


def _full() -> bytes:
    body = json.dumps(
        error_body(503, "too_many_connections", f"all connections are in use. Retry after {RETRY_AFTER_S} s.", path="")
    )
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Retry-After: {RETRY_AFTER_S}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()

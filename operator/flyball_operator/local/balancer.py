"""One port over all replicas: a streaming HTTP proxy; each request goes to the ready replica with the fewest outstanding."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import aiohttp
from aiohttp import hdrs, web
from multidict import CIMultiDict
from yarl import URL

from flyball_operator.local.body import MAX_HELD_BYTES, Body, BrokenBody
from flyball_operator.local.connections import (
    HEADER_TIMEOUT_S,
    RETRY_AFTER_S,
    WRITE_TIMEOUT_S,
    ClientConnection,
    Connections,
    NoRoom,
    answer_expect,
    client_error,
    connection_of,
    note_beginning,
    server_error,
)
from flyball_operator.local.process import in_words
from flyball_operator.local.replica import Replica
from flyball_protocol.endpoints import HEALTH_PATH, READYZ_PATH
from flyball_protocol.errors import error_body
from flyball_protocol.quoting import one_line

log = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"
REPLICA_HEADER = "X-Flyball-Replica"
"""Says in each answer which replica gave it."""
BODY_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0
ACCEPTED_AT_ONCE = 16
BACKLOG = 1024
RECEIVE_BUFFER_BYTES = 32 * 1024
"""Of a connection to a replica. Streams that came faster than their clients read wait there and at the replica: 256 KiB of
small events, what asyncio takes from a connection at once, would hold all other streams up while they are parsed.
"""

_HOP_BY_HOP = frozenset(
    name.lower()
    for name in (
        hdrs.CONNECTION,
        hdrs.KEEP_ALIVE,
        hdrs.PROXY_AUTHENTICATE,
        hdrs.PROXY_AUTHORIZATION,
        hdrs.TE,
        hdrs.TRAILER,
        hdrs.TRANSFER_ENCODING,
        hdrs.UPGRADE,
    )
)


class TryAnother(Exception):
    """A replica did not take the request; nothing of an answer was sent to the client."""


class Balancer:
    """Serves until ``close()``. ``replicas`` is asked for every request; ``stopping`` says that new ones are refused."""

    def __init__(
        self,
        replicas: Callable[[], Sequence[Replica]],
        stopping: Callable[[], bool],
        connections: Connections | None = None,
        *,
        header_timeout_s: float = HEADER_TIMEOUT_S,
    ) -> None:
        self._replicas = replicas
        self._stopping = stopping
        self._connections = connections or Connections()
        self._header_timeout_s = header_timeout_s
        self._server: asyncio.Server | None = None
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def start(self, listener: socket.socket) -> None:
        # A connection per request: on loopback it costs little, and no request meets one that a replica has just closed.
        connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_socket_to_replica)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),  # one client's cookies are no business of another's
        )
        app = web.Application(middlewares=[note_beginning])
        app.router.add_get(READYZ_PATH, self._readyz, expect_handler=answer_expect)
        app.router.add_get(HEALTH_PATH, self._readyz, expect_handler=answer_expect)
        app.router.add_route("*", "/{path:.*}", self._proxy, expect_handler=answer_expect)
        # handler_cancellation: a client that goes away cancels its handler, which closes the connection to the replica.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        # To asyncio the backlog is also how many it accepts before any of them can be closed again.
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connect, sock=listener, backlog=ACCEPTED_AT_ONCE)
        listener.listen(BACKLOG)

    def _connect(self) -> ClientConnection:
        if self._runner is None or self._runner.server is None:
            raise RuntimeError("a connection comes before start()")
        return ClientConnection(
            self._runner.server,
            self._connections,
            header_timeout_s=self._header_timeout_s,
            loop=asyncio.get_running_loop(),
        )

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _readyz(self, request: web.Request) -> web.Response:
        num_ready = sum(replica.ready for replica in self._replicas())
        ok = num_ready > 0 and not self._stopping()
        return web.json_response({"ready": ok, "num_ready_replicas": num_ready}, status=200 if ok else 503)

    async def _proxy(self, request: web.Request) -> web.StreamResponse:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await Body.read(request.content, connection_of(request))
        except TimeoutError:
            return client_error(
                request, 408, "request_timeout", f"the request's body did not arrive within {BODY_TIMEOUT_S:.0f} s"
            )
        except BrokenBody as error:
            return _broken(request, error)
        except NoRoom:
            return server_error(
                request, 503, "no_room", "the bodies of other requests leave no room for this one", retry=True
            )
        connection_of(request).served()
        return await self._pass_on(request, body)

    async def _pass_on(self, request: web.Request, body: Body) -> web.StreamResponse:
        tried: dict[int, str] = {}
        while (replica := self._pick(tried)) is not None and body.can_be_sent:
            try:
                return await self._forward(request, body, replica)
            except TryAnother as error:
                log.debug("%s did not take a request: %s", replica.name, error)
                tried[replica.number] = f"{replica.name} {error}"
        return self._unavailable(request, tried)

    def _pick(self, tried: dict[int, str]) -> Replica | None:
        """Return the ready replica with the fewest outstanding requests; of equals, the one that has served least."""
        ready = [] if self._stopping() else [one for one in self._replicas() if one.ready and one.number not in tried]
        return min(ready, key=lambda replica: (replica.outstanding, replica.served, replica.number), default=None)

    async def _forward(self, request: web.Request, body: Body, replica: Replica) -> web.StreamResponse:
        with replica.serving(body.num_choices):
            try:
                async with await self._send(request, body, replica) as upstream:
                    if upstream.status == 503 and not replica.ready:
                        raise TryAnother("is draining")
                    if upstream.content_type == EVENT_STREAM:
                        return await _stream(request, upstream, replica)
                    return await _answer(request, upstream, replica)
            except aiohttp.ClientError as error:
                if body.broken is not None:
                    return _broken(request, body.broken)
                return server_error(request, 502, *_lost(replica, error))

    async def _send(self, request: web.Request, body: Body, replica: Replica) -> aiohttp.ClientResponse:
        if self._session is None:
            raise RuntimeError("the balancer is asked before start()")
        try:
            return await self._session.request(
                request.method,
                URL(replica.url + request.rel_url.raw_path_qs, encoded=True),
                headers=_forwarded(request),
                data=body.data(),
                allow_redirects=False,
                skip_auto_headers=(hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE),
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise TryAnother(f"could not be reached ({in_words(error)})") from error
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if replica.leaving:  # it answers all that it has taken before it ends, so this it had not
                raise TryAnother("ended before it took the request") from error
            raise

    def _unavailable(self, request: web.Request, tried: dict[int, str]) -> web.Response:
        if self._stopping():
            message = "the deployment is stopping and takes no new requests"
            return server_error(request, 503, "draining", message, retry=True)
        states = [f"{replica.name} is {replica.state} ({replica.message})" for replica in self._replicas()]
        listed = "; ".join([*tried.values(), *states]) or "there are no replicas; raise spec.replicas"
        return server_error(
            request,
            503,
            "no_ready_replica",
            f"no replica is ready: {listed}. Retry after {RETRY_AFTER_S} s.",
            retry=True,
        )


def _socket_to_replica(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    return made


async def _answer(request: web.Request, upstream: aiohttp.ClientResponse, replica: Replica) -> web.StreamResponse:
    """Pass an answer on: whole, so that a replica that is lost is a 502, or when it is long as it comes.

    Raises aiohttp.ClientError when the replica is lost before anything was passed on.
    """
    held = bytearray()
    chunks = upstream.content.iter_any()
    async for chunk in chunks:
        held += chunk
        if len(held) > MAX_HELD_BYTES:
            break
    else:
        headers = _end_to_end(upstream.headers, but=() if request.method == hdrs.METH_HEAD else (hdrs.CONTENT_LENGTH,))
        headers[REPLICA_HEADER] = str(replica.number)
        return web.Response(status=upstream.status, headers=headers, body=bytes(held))
    response = _beginning(upstream, replica)
    try:
        await response.prepare(request)
        await _write(response, bytes(held), request)
        async for chunk in chunks:
            await _write(response, chunk, request)
        await response.write_eof()
    except aiohttp.ClientPayloadError as error:
        _lost(replica, error)
        connection_of(request).drop()  # its length or its last chunk is missing, which tells the client
    except ConnectionResetError:
        log.debug("a client went away while it was answered by %s", replica.name)
    return response


async def _stream(request: web.Request, upstream: aiohttp.ClientResponse, replica: Replica) -> web.StreamResponse:
    """Pass events on as they come. A replica that is lost on the way ends the stream with an error event."""
    response = _beginning(upstream, replica)
    try:
        await response.prepare(request)
        async for chunk in _chunks(upstream, replica, request.path):
            await _write(response, chunk, request)
        await response.write_eof()
    except ConnectionResetError:
        log.debug("a client went away while %s was streaming to it", replica.name)
    return response


def _beginning(upstream: aiohttp.ClientResponse, replica: Replica) -> web.StreamResponse:
    response = web.StreamResponse(status=upstream.status, headers=_end_to_end(upstream.headers))
    response.headers[REPLICA_HEADER] = str(replica.number)
    return response


async def _write(response: web.StreamResponse, chunk: bytes, request: web.Request) -> None:
    """Raise ConnectionResetError when the client is gone, or has taken nothing for too long."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await response.write(chunk)
    except TimeoutError:
        connection_of(request).drop()
        raise ConnectionResetError(f"the client took nothing for {WRITE_TIMEOUT_S:g} s") from None


async def _chunks(upstream: aiohttp.ClientResponse, replica: Replica, path: str) -> AsyncIterator[bytes]:
    last = b"\n\n"
    try:
        async for chunk in upstream.content.iter_any():
            last = (last + chunk)[-2:]
            yield chunk
    except aiohttp.ClientError as error:
        # An event that was cut off is ended first, so that the error is an event of its own.
        end = b"" if last == b"\n\n" else b"\n\n"
        body = json.dumps(error_body(502, *_lost(replica, error), path=path))
        yield end + f"event: error\ndata: {body}\n\n".encode()


def _broken(request: web.Request, error: BrokenBody) -> web.Response:
    return client_error(request, 400, "bad_request", f"the request's body cannot be read: {one_line(str(error))}")


def _lost(replica: Replica, error: Exception) -> tuple[str, str]:
    """Return code and message for a request whose replica was lost after it had taken the request."""
    said = in_words(error)
    log.debug("%s was lost while it answered a request (%s)", replica.name, said)
    return "replica_lost", f"{replica.name} was lost before the answer was complete ({said}). Send the request again."


def _forwarded(request: web.Request) -> CIMultiDict[str]:
    """Return the headers for the replica, which tells clients apart by the last address in X-Forwarded-For."""
    headers = _end_to_end(request.headers, but=(hdrs.HOST, hdrs.EXPECT))
    addresses = [*headers.popall(hdrs.X_FORWARDED_FOR, []), request.remote or "unknown"]
    headers[hdrs.X_FORWARDED_FOR] = ", ".join(addresses)
    return headers


def _end_to_end(headers: Mapping[str, str], but: Sequence[str] = ()) -> CIMultiDict[str]:
    """Return the headers that a proxy passes on (RFC 9110, 7.6.1), without those named in ``but``."""
    named = {name.strip().lower() for name in headers.get(hdrs.CONNECTION, "").split(",")}
    dropped = _HOP_BY_HOP | named | {name.lower() for name in but}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)

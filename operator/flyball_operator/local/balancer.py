"""One port over all replicas: a streaming HTTP proxy; each request goes to the ready replica with the fewest outstanding."""

import asyncio
import io
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp import hdrs, web
from multidict import CIMultiDict
from yarl import URL

from flyball_operator.local.replica import Replica
from flyball_protocol.endpoints import HEALTH_PATH, READYZ_PATH

log = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"
REPLICA_HEADER = "X-Flyball-Replica"
"""Says in each answer which replica gave it."""
RETRY_AFTER_S = 1
MAX_HELD_BYTES = 1 << 20
"""A request body up to this size is read before a replica is chosen: a slow sender occupies no replica, and the request can be
sent again when the replica refuses it. A longer one is passed on as it comes."""
BODY_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0

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


class Body:
    """A request body: held, or the beginning of it and the rest as it comes."""

    def __init__(self, held: bytes, rest: aiohttp.StreamReader | None) -> None:
        self._held = held
        self._rest = rest
        self._spent = False

    @classmethod
    async def read(cls, content: aiohttp.StreamReader) -> "Body":
        held = bytearray()
        while len(held) <= MAX_HELD_BYTES:
            chunk = await content.readany()
            if not chunk:
                return cls(bytes(held), None)
            held += chunk
        return cls(bytes(held), content)

    @property
    def can_be_sent(self) -> bool:
        """False once a part that is not held has gone to a replica."""
        return not self._spent

    def data(self) -> io.BytesIO | AsyncIterator[bytes] | None:
        if self._rest is not None:
            return self._pass_on(self._rest)
        return io.BytesIO(self._held) if self._held else None

    async def _pass_on(self, rest: aiohttp.StreamReader) -> AsyncIterator[bytes]:
        self._spent = True
        yield self._held
        async for chunk in rest.iter_any():
            yield chunk


class Balancer:
    """Serves until ``close()``. ``replicas`` is asked for every request; ``stopping`` says that new ones are refused."""

    def __init__(self, replicas: Callable[[], Sequence[Replica]], stopping: Callable[[], bool]) -> None:
        self._replicas = replicas
        self._stopping = stopping
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def start(self, listener: socket.socket) -> None:
        # A connection per request: on loopback it costs little, and no request meets one that a replica has just closed.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        app = web.Application()
        app.router.add_get(READYZ_PATH, self._readyz)
        app.router.add_get(HEALTH_PATH, self._readyz)
        app.router.add_route("*", "/{path:.*}", self._proxy)
        # handler_cancellation: a client that goes away cancels its handler, which closes the connection to the replica.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()

    async def close(self) -> None:
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
                body = await Body.read(request.content)
        except TimeoutError:
            return _error(408, "request_timeout", f"the request's body did not arrive within {BODY_TIMEOUT_S:.0f} s")
        tried: dict[int, str] = {}
        while (replica := self._pick(tried)) is not None and body.can_be_sent:
            try:
                return await self._forward(request, body, replica)
            except TryAnother as error:
                log.debug("%s did not take a request: %s", replica.name, error)
                tried[replica.number] = f"{replica.name} {error}"
        return self._unavailable(tried)

    def _pick(self, tried: dict[int, str]) -> Replica | None:
        """Return the ready replica with the fewest outstanding requests; of equals, the one that has served least."""
        ready = [] if self._stopping() else [one for one in self._replicas() if one.ready and one.number not in tried]
        return min(ready, key=lambda replica: (replica.outstanding, replica.served, replica.number), default=None)

    async def _forward(self, request: web.Request, body: Body, replica: Replica) -> web.StreamResponse:
        with replica.serving():
            try:
                async with await self._send(request, body, replica) as upstream:
                    if upstream.status == 503 and not replica.ready:
                        raise TryAnother("is draining")
                    if upstream.content_type == EVENT_STREAM:
                        return await _stream(request, upstream, replica)
                    payload = await upstream.read()
            except aiohttp.ClientError as error:
                return _error(502, *_lost(replica, error))
            headers = _end_to_end(upstream.headers, but=(hdrs.CONTENT_LENGTH,))
            headers[REPLICA_HEADER] = str(replica.number)
            return web.Response(status=upstream.status, headers=headers, body=payload)

    async def _send(self, request: web.Request, body: Body, replica: Replica) -> aiohttp.ClientResponse:
        if self._session is None:
            raise RuntimeError("the balancer is asked before start()")
        try:
            return await self._session.request(
                request.method,
                URL(replica.url + request.rel_url.raw_path_qs, encoded=True),
                headers=_end_to_end(request.headers, but=(hdrs.HOST, hdrs.EXPECT)),
                data=body.data(),
                allow_redirects=False,
                skip_auto_headers=(hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE),
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise TryAnother(f"could not be reached: {error}") from error

    def _unavailable(self, tried: dict[int, str]) -> web.Response:
        if self._stopping():
            return _error(503, "draining", "the deployment is stopping and takes no new requests", RETRY_AFTER_S)
        states = [f"{replica.name} is {replica.state} ({replica.message})" for replica in self._replicas()]
        listed = "; ".join([*tried.values(), *states]) or "there are no replicas; raise spec.replicas"
        message = f"no replica is ready: {listed}. Retry after {RETRY_AFTER_S} s."
        return _error(503, "no_ready_replica", message, RETRY_AFTER_S)


async def _stream(request: web.Request, upstream: aiohttp.ClientResponse, replica: Replica) -> web.StreamResponse:
    """Pass events on as they come. A replica that is lost on the way ends the stream with an error event."""
    response = web.StreamResponse(status=upstream.status, headers=_end_to_end(upstream.headers))
    response.headers[REPLICA_HEADER] = str(replica.number)
    try:
        await response.prepare(request)
        async for chunk in _chunks(upstream, replica):
            await response.write(chunk)
        await response.write_eof()
    except ConnectionResetError:
        log.debug("a client went away while %s was streaming to it", replica.name)
    return response


async def _chunks(upstream: aiohttp.ClientResponse, replica: Replica) -> AsyncIterator[bytes]:
    last = b"\n\n"
    try:
        async for chunk in upstream.content.iter_any():
            last = (last + chunk)[-2:]
            yield chunk
    except aiohttp.ClientError as error:
        # An event that was cut off is ended first, so that the error is an event of its own.
        end = b"" if last == b"\n\n" else b"\n\n"
        yield end + b"data: " + json.dumps(_error_body(*_lost(replica, error))).encode() + b"\n\n"


def _lost(replica: Replica, error: Exception) -> tuple[str, str]:
    """Return code and message for a request whose replica was lost after it had taken the request."""
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    log.warning("%s was lost while it answered a request (%s)", replica.name, said)
    return "replica_lost", f"{replica.name} was lost before the answer was complete ({said}). Send the request again."


def _error_body(code: str, message: str) -> dict[str, Any]:
    """Return an error in the OpenAI API's shape."""
    return {"error": {"message": message, "type": "server_error", "param": None, "code": code}}


def _error(status: int, code: str, message: str, retry_after_s: int | None = None) -> web.Response:
    headers = {} if retry_after_s is None else {hdrs.RETRY_AFTER: str(retry_after_s)}
    return web.json_response(_error_body(code, message), status=status, headers=headers)


def _end_to_end(headers: Mapping[str, str], but: Sequence[str] = ()) -> CIMultiDict[str]:
    """Return the headers that a proxy passes on (RFC 9110, 7.6.1), without those named in ``but``."""
    named = {name.strip().lower() for name in headers.get(hdrs.CONNECTION, "").split(",")}
    dropped = _HOP_BY_HOP | named | {name.lower() for name in but}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)

"""The app of port 8001: live limits, evidence and drain, for the operator, which signs its requests, and for a person on this
machine, who has the token.

The operator asks at a pod's address, which may be somebody else's by then. So it signs (flyball_protocol.signing) and sends no
token, and the answer is signed too. A token that is sent is taken from loopback only, where nobody listens in: from curl in the
pod, or over ``kubectl port-forward``.
"""

import asyncio
import hmac
import ipaddress
import logging
import os
import time
from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flyball_protocol import LimitsUpdate, MemoryState, endpoints, signing
from flyball_protocol.limits import LIMITS_HTTP_STATUS
from flyball_runtime.api.app import bare_app
from flyball_runtime.api.errors import Unauthorized, json_response
from flyball_runtime.api.metrics import MetricsCollector
from flyball_runtime.api.server import decode, read_body
from flyball_runtime.core.errors import ConfigError, EngineDead
from flyball_runtime.core.memory import memory_state
from flyball_runtime.core.room import Room
from flyball_runtime.engine.front import EngineFront

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024
BODY_TIMEOUT_S = 10.0

NEEDED = "a valid token is needed. On this machine send the header 'Authorization: Bearer TOKEN'"


class AdminAuth:
    """Lets nothing through that is neither signed nor a bearer token from loopback; compares in constant time."""

    def __init__(self, app: ASGIApp, token: str, wall_clock: Callable[[], float], started_s: float) -> None:
        self._app = app
        self._token = token
        self._wall_clock = wall_clock
        self._verifier = signing.Verifier(token, started_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("authorization", "")
        if given.partition(" ")[0].lower() == signing.SCHEME.lower():
            await self._answer_signed(given, scope, receive, send)
        else:
            self._check_bearer(given, scope)
            await self._app(scope, receive, send)

    def _check_bearer(self, given: str, scope: Scope) -> None:
        scheme, _, token = given.partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorized(NEEDED)
        if not _is_loopback(scope["client"]):
            raise Unauthorized(
                "a bearer token is taken on this machine (loopback) only, since it could be read on its way from elsewhere. "
                "Ask from inside the pod, use kubectl port-forward, or sign the request as the operator does"
            )
        if not hmac.compare_digest(token.strip().encode(), self._token.encode()):
            raise Unauthorized(NEEDED)

    async def _answer_signed(self, given: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a signed request on, whole, and sign the answer. The signature is looked at before the body is read."""
        try:
            signed = self._verifier.check(
                given, method=scope["method"], path=_path_of(scope), target=_target_of(scope), now_s=self._wall_clock()
            )
        except signing.SignatureError as error:
            raise Unauthorized(str(error)) from None
        body = await read_admin_body(Request(scope, receive))
        if not signed.covers(body):
            raise Unauthorized("the request's body is not the one that was signed")
        answer = _SignedAnswer(self._token, signed.nonce, send)
        await self._app(scope, _again(body, receive), answer.send)


class _SignedAnswer:
    """Holds an answer until it is whole, for its signature is a header of it."""

    def __init__(self, token: str, nonce: str, send: Send) -> None:
        self._token = token
        self._nonce = nonce
        self._send = send
        self._start: Message = {}
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        signature = signing.sign_answer(self._token, self._nonce, self._start["status"], self._body)
        MutableHeaders(scope=self._start)[signing.ANSWER_HEADER] = signature
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": self._body})


async def read_admin_body(request: Request) -> bytes:
    """Read the whole body. Raises BodyTooLarge, BodyTimeout, ClientLeft.

    It has a room of its own, since only those who have the token get here.
    """
    return await read_body(request, Room(MAX_BODY_BYTES), MAX_BODY_BYTES, BODY_TIMEOUT_S)


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a receive() that gives a body that was read already, then what comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again


def _path_of(scope: Scope) -> str:
    """Return the path with its query, as it was sent."""
    query = scope["query_string"].decode("latin-1")
    path = scope["raw_path"].decode("latin-1")
    return f"{path}?{query}" if query else path


def _target_of(scope: Scope) -> str:
    """Return the address that this connection came to: the pod's own, whatever the Host header says."""
    return signing.target_of(*scope["server"]) if scope["server"] else ""


def _is_loopback(client: tuple[str, int] | None) -> bool:
    try:
        address = ipaddress.ip_address(client[0]) if client else None
    except ValueError:
        return False
    return address is not None and (getattr(address, "ipv4_mapped", None) or address).is_loopback


def create_admin_app(
    front: EngineFront, metrics: MetricsCollector, token: str, wall_clock: Callable[[], float] = time.time
) -> FastAPI:
    """The admin app. Raises ConfigError when ``token`` is empty: there is no admin port without one."""
    if not token.strip():
        raise ConfigError(f"the admin token is empty; set {endpoints.ADMIN_TOKEN_ENV} or leave the admin port off.")
    auth = Middleware(AdminAuth, token=token.strip(), wall_clock=wall_clock, started_s=wall_clock())
    app = bare_app("Flyball admin", inner=[auth])
    routes = AdminRoutes(front, metrics)
    app.add_api_route(endpoints.ADMIN_LIMITS_PATH, routes.get_limits)
    app.add_api_route(endpoints.ADMIN_LIMITS_PATH, routes.post_limits, methods=["POST"])
    app.add_api_route(endpoints.ADMIN_EVIDENCE_PATH, routes.get_evidence)
    app.add_api_route(endpoints.ADMIN_DRAIN_PATH, routes.post_drain, methods=["POST"])
    return app


def _memory(front: EngineFront) -> MemoryState | None:
    """Return the memory of the replica's two processes; None before the engine reports, or if it has no pool to tell of."""
    stats = front.latest_stats()
    if stats is None or not front.info.kv_block_bytes:
        return None
    block_bytes = front.info.kv_block_bytes
    return memory_state(
        (os.getpid(), front.engine_pid),
        pool_bytes=stats.num_allocated_kv_blocks * block_bytes,
        pool_max_bytes=front.info.num_kv_blocks * block_bytes,
    )


class AdminRoutes:
    def __init__(self, front: EngineFront, metrics: MetricsCollector) -> None:
        self._front = front
        self._metrics = metrics

    async def get_limits(self) -> Response:
        return json_response(self._front.limits())

    async def post_limits(self, request: Request) -> Response:
        """Apply a LimitsUpdate; the status follows the ack: 200 applied, 202 deferred, 409 stale, 422 rejected."""
        update = decode(await read_admin_body(request), LimitsUpdate)
        ack = await self._front.post_limits(update)
        logger.info(
            "request %s: limits revision %d: %s %s", request.state.request_id, update.revision, ack.status, ack.reason
        )
        return json_response(ack, LIMITS_HTTP_STATUS[ack.status])

    async def get_evidence(self) -> Response:
        front, metrics = self._front, self._metrics
        if front.dead_reason is not None:
            raise EngineDead(front.dead_reason)
        memory = await asyncio.to_thread(_memory, front)
        evidence = metrics.measured.evidence(
            metrics.model_name,
            front.limits(),
            key=front.info.key,
            ready=front.ready,
            draining=front.draining,
            memory=memory,
        )
        return json_response(evidence)

    async def post_drain(self, request: Request) -> Response:
        """Refuse new requests from now on; idempotent. 202: those accepted go on to their end."""
        logger.info(
            "request %s: drain started, %d requests unfinished", request.state.request_id, self._front.num_unfinished
        )
        self._front.start_drain()
        return json_response({"draining": True, "num_unfinished": self._front.num_unfinished}, 202)

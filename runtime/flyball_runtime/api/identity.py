"""Who sent a request, and under which id it is answered and logged."""

import ipaddress
import re
import secrets
import uuid
from hashlib import blake2b

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flyball_runtime.api.errors import error_response, internal_error
from flyball_runtime.core.errors import InvalidRequest, RequestError

REQUEST_ID_HEADER = "X-Request-Id"
_VALID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestIdMiddleware:
    """The outermost layer of both apps: gives every request its id, and turns a bug into a 500 in OpenAI's shape.

    The id is the client's X-Request-Id or a new one. It stands in ``scope["state"]`` and is sent back.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(send)
        try:
            exchange.request_id = request_id_of(Headers(scope=scope))
            scope.setdefault("state", {})["request_id"] = exchange.request_id
            await self._app(scope, receive, exchange.send)
        except RequestError as error:
            await error_response(error, scope["path"])(scope, receive, exchange.send)
        except Exception as exc:  # the boundary: nothing above knows how to answer
            if exchange.started:
                raise
            await error_response(internal_error(exc, exchange.request_id), scope["path"])(scope, receive, exchange.send)


class _Exchange:
    """Adds the request id to the response's headers; knows whether a response was begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.request_id = uuid.uuid4().hex
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            MutableHeaders(scope=message)[REQUEST_ID_HEADER] = self.request_id
        await self._send(message)


def request_id_of(headers: Headers) -> str:
    """The client's X-Request-Id, or a new one. Raises InvalidRequest when it could not be logged and echoed safely."""
    given = headers.get(REQUEST_ID_HEADER)
    if given is None:
        return uuid.uuid4().hex
    if _VALID.fullmatch(given) is None:
        raise InvalidRequest(
            f"{REQUEST_ID_HEADER} has {len(given)} characters; it may have 1 to 128 of letters, digits and ._:/+=@-. "
            "Leave it out to get one.",
            param=REQUEST_ID_HEADER,
        )
    return given


def sent_key(headers: Headers) -> str:
    """Return the Authorization header, or one made of X-Api-Key, which clients of Anthropic's API send."""
    authorization = headers.get("authorization", "").strip()
    other = headers.get("x-api-key", "").strip()
    return authorization or (f"Bearer {other}" if other else "")


_KEY = secrets.token_bytes(32)
"""Of this process, so that a client's name is worth nothing outside it."""

IPV6_NETWORK_BITS = 64
"""What one IPv6 client is given whole, usually: its addresses are one client."""


def client_of(request: Request) -> str:
    """Return an opaque name: of the API key, or of the address without one.

    A key that was checked (``keys.py``) counts however it is sent. Without checks, the whole header does.

    Clients share tokenization and the scheduler by it. It gives no rights, and nobody can read it back.
    The address is the connection's, or what a trusted proxy says (``ApiSettings.forwarded_allow_ips``).
    """
    checked: bytes | None = getattr(request.state, "api_key", None)
    if checked is not None:
        return _name(b"checked key", checked)
    api_key = sent_key(request.headers)
    if api_key:
        return _name(b"key", api_key.encode())
    return _name(b"address", b"" if request.client is None else _network(request.client.host).encode())


def _name(kind: bytes, value: bytes) -> str:
    return blake2b(value, digest_size=12, key=_KEY, person=kind).hexdigest()


def _network(host: str) -> str:
    """Return what an address counts as; a host that is no IP address counts as itself."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_NETWORK_BITS), strict=False))

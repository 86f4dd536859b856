"""The outermost layer of both apps: gives every request its id and turns a bug into a 500 in OpenAI's shape."""

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flyball_runtime.api.errors import error_response, internal_error
from flyball_runtime.core.errors import InvalidRequest, RequestError

REQUEST_ID_HEADER = "X-Request-Id"
_VALID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestIdMiddleware:
    """Takes X-Request-Id from the client or makes one, puts it into ``scope["state"]`` and sends it back."""

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
            await error_response(error)(scope, receive, exchange.send)
        except Exception as exc:  # the boundary: nothing above knows how to answer
            if exchange.started:
                raise
            await error_response(internal_error(exc, exchange.request_id))(scope, receive, exchange.send)


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

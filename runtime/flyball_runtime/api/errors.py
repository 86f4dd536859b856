"""Errors on the wire: OpenAI's ``{"error": {message, type, param, code}}`` for every answer that is not a success.

Under /v1/messages they have Anthropic's shape, which is the same with another ``type`` and one more around it.
"""

import logging
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from flyball_protocol.quoting import MAX_QUOTED_CHARS, one_line, quoted
from flyball_runtime.core.errors import RequestError
from flyball_runtime.core.request import Failed

logger = logging.getLogger(__name__)

INTERNAL_MESSAGE = "this server failed to handle the request; its log has the traceback under request id {request_id}."


class HttpRefusal(RequestError):
    """A RequestError whose status and code are known only when it happens."""

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.status = status
        self.code = code


class UnknownModel(RequestError):
    status, code = 404, "model_not_found"

    def __init__(self, model: str, served: tuple[str, ...]) -> None:
        names = ", ".join(served)
        super().__init__(f"the model {quoted(model)} is not served here; this server has {names}.", param="model")


class BodyNotRead(RequestError):
    """The rest of the body is not read, so the connection ends with the answer."""


class BodyTooLarge(BodyNotRead):
    status, code = 413, "body_too_large"

    def __init__(self, max_body_bytes: int) -> None:
        super().__init__(
            f"the request body is longer than {max_body_bytes} bytes, the limit of this server. Send a shorter one."
        )


class BodyTimeout(BodyNotRead):
    status, code = 408, "body_timeout"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"the request body was not complete within {timeout_s:g} s. Send it faster.")


class NoRoomForBody(BodyNotRead):
    status, code = 503, "no_room"

    def __init__(self, max_total_body_bytes: int) -> None:
        super().__init__(
            f"the bodies that are being received have {max_total_body_bytes} bytes, the limit of this replica "
            "(--max-total-body-bytes), and this one has been arriving for longest. Retry after 1 s, or send it faster.",
            retry_after_s=1,
        )


class ClientLeft(RequestError):
    code = "disconnected"

    def __init__(self) -> None:
        super().__init__("the client left before its request was complete, or while it waited to be tokenized.")


class Unauthorized(RequestError):
    status, code = 401, "invalid_token"

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}.")


class InvalidApiKey(RequestError):
    """Begins with OpenAI's words, since LiteLLM knows the error by them."""

    status, code = 401, "invalid_api_key"

    def __init__(self, why: str) -> None:
        super().__init__(
            f"Incorrect API key provided: {why}. Send the header 'Authorization: Bearer KEY' or 'X-Api-Key: KEY' with a key "
            "of this server."
        )


def from_failed(event: Failed) -> HttpRefusal:
    return HttpRefusal(event.status, event.code, event.message, retry_after_s=event.retry_after_s)


def error_type(status: int) -> str:
    """OpenAI's coarse class of an error."""
    if status >= 500:
        return "server_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error"


def error_json(error: RequestError) -> bytes:
    return msgspec.json.encode({"error": _fields(error, error_type(error.status))})


MESSAGES_PATH = "/v1/messages"
"""Anthropic's endpoints, whose errors have Anthropic's shape."""

_MESSAGE_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def message_error_json(error: RequestError) -> bytes:
    """The error in Anthropic's shape, with OpenAI's further fields."""
    type = _MESSAGE_ERROR_TYPES.get(error.status, "invalid_request_error")
    return msgspec.json.encode({"type": "error", "error": _fields(error, type)})


def _fields(error: RequestError, type: str) -> dict[str, str | None]:
    return {"message": error.message, "type": type, "param": error.param, "code": error.code}


def error_response(error: RequestError, path: str) -> Response:
    """The answer of a request to ``path``."""
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, BodyNotRead):
        headers["Connection"] = "close"
    body = message_error_json(error) if path.startswith(MESSAGES_PATH) else error_json(error)
    return Response(body, error.status, headers, media_type="application/json")


def internal_error(exc: BaseException, request_id: str) -> HttpRefusal:
    """Log ``exc`` with its traceback and return what the client may know about it."""
    logger.error("request %s failed", request_id, exc_info=exc)
    return HttpRefusal(500, "internal_error", INTERNAL_MESSAGE.format(request_id=request_id))


def json_response(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def install_error_handlers(app: FastAPI) -> None:
    """Answer RequestError and routing errors (404, 405) in OpenAI's shape."""
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)


def _on_request_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestError)
    logger.info("request %s refused: %d %s: %s", request.state.request_id, exc.status, exc.code, exc)
    return error_response(exc, request.scope["path"])


def _on_http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    where = f"{one_line(request.method, MAX_QUOTED_CHARS)} {quoted(request.scope['path'])}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(exc.status_code, "http_error")
    response = error_response(HttpRefusal(exc.status_code, code, f"{where}: {exc.detail}."), request.scope["path"])
    response.headers.update(exc.headers or {})  # Allow, with a 405
    return response

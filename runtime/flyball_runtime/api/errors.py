"""Errors on the wire, in the shape of ``flyball_protocol.errors`` for every answer that is not a success."""

import logging
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from flyball_protocol.errors import error_body
from flyball_protocol.quoting import MAX_LISTED, MAX_QUOTED_CHARS, one_line, quoted
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
        names = ", ".join(served[:MAX_LISTED]) + (
            f" and {len(served) - MAX_LISTED} more" if served[MAX_LISTED:] else ""
        )
        super().__init__(f"the model {quoted(model)} is not served here; this server has {names}.", param="model")


class LoraUpdatesClosed(RequestError):
    status, code = 403, "lora_updates_closed"

    def __init__(self) -> None:
        super().__init__(
            "this server loads and unloads no adapters while it runs. To allow it for all clients that may send requests, "
            "start it with --enable-lora and --runtime-lora-dir."
        )


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


def error_json(error: RequestError, path: str = "") -> bytes:
    """The body of an answer to ``path``; OpenAI's shape where it does not matter or is not known."""
    return msgspec.json.encode(error_body(error.status, error.code, error.message, path=path, param=error.param))


def error_response(error: RequestError, path: str) -> Response:
    """The answer of a request to ``path``."""
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, BodyNotRead):
        headers["Connection"] = "close"
    return Response(error_json(error, path), error.status, headers, media_type="application/json")


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

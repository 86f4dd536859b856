"""What the balancer answers by itself, in the OpenAI API's shape."""

from typing import Any

from aiohttp import hdrs, web

RETRY_AFTER_S = 1


def error_body(code: str, message: str, kind: str = "server_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def server_error(status: int, code: str, message: str, *, retry: bool = False) -> web.Response:
    headers = {hdrs.RETRY_AFTER: str(RETRY_AFTER_S)} if retry else {}
    return web.json_response(error_body(code, message), status=status, headers=headers)


def client_error(status: int, code: str, message: str) -> web.Response:
    """Refuse a request, and close its connection: what else comes on it may be the rest of that request."""
    response = web.json_response(error_body(code, message, "invalid_request_error"), status=status)
    response.force_close()
    return response

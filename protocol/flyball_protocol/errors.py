"""The shape of errors over HTTP: OpenAI's, and Anthropic's under its paths. All programs that answer clients use it."""

from typing import Any

MESSAGES_PATH = "/v1/messages"
"""Below it are Anthropic's endpoints."""

_OPENAI_TYPES = {429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(status: int, code: str, message: str, *, path: str, param: str | None = None) -> dict[str, Any]:
    """Return the JSON body of an error that answers a request to ``path``.

    Args:
        param: the field at fault, if it is one.
    """
    if not path.startswith(MESSAGES_PATH):
        otherwise = "server_error" if status >= 500 else "invalid_request_error"
        return {"error": _fields(_OPENAI_TYPES.get(status, otherwise), code, message, param)}
    otherwise = "api_error" if status >= 500 else "invalid_request_error"
    return {"type": "error", "error": _fields(_ANTHROPIC_TYPES.get(status, otherwise), code, message, param)}


def _fields(type: str, code: str, message: str, param: str | None) -> dict[str, str | None]:
    return {"message": message, "type": type, "param": param, "code": code}

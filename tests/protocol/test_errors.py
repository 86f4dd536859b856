"""Errors have the shape that the clients of their path expect."""

from typing import Any

import pytest

from flyball_protocol.errors import error_body


@pytest.mark.parametrize(
    ("status", "path", "type"),
    [
        (400, "", "invalid_request_error"),
        (401, "/v1/models", "invalid_request_error"),
        (429, "/v1/completions", "rate_limit_error"),
        (502, "/v1/chat/completions", "server_error"),
        (417, "/v1/messages", "invalid_request_error"),
        (401, "/v1/messages", "authentication_error"),
        (404, "/v1/messages/count_tokens", "not_found_error"),
        (429, "/v1/messages", "rate_limit_error"),
        (500, "/v1/messages", "api_error"),
        (502, "/v1/messages", "api_error"),
        (503, "/v1/messages", "overloaded_error"),
    ],
)
def test_the_path_decides_on_the_shape(status: int, path: str, type: str) -> None:
    outer: dict[str, Any] = {"type": "error"} if "messages" in path else {}
    fields = {"message": "why", "type": type, "param": "n", "code": "a_code"}
    assert error_body(status, "a_code", "why", path=path, param="n") == outer | {"error": fields}

"""What the balancer answers by itself, in the OpenAI API's shape."""

from typing import Any

from aiohttp import HttpVersion11, hdrs, web

from flyball_protocol.quoting import quoted

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


async def answer_expect(request: web.Request) -> web.Response | None:
    """Tell a client to go on, as the header ``Expect`` asks for; return the refusal of anything else that it asks for."""
    expected = request.headers[hdrs.EXPECT]
    if request.version != HttpVersion11:
        return None
    if expected.lower() != "100-continue":
        what = f"the header Expect is {quoted(expected)}; only 100-continue is understood. Leave it out."
        return client_error(417, "expectation_failed", what)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # nothing of the answer has been sent
    return None

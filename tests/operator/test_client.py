"""Answers that no API server gives, but what stands before one may."""

import asyncio

import kopf
import pytest
from aiohttp import web

from flyball_operator.cluster.client import Client
from flyball_operator.cluster.connection import Connection
from flyball_operator.cluster.errors import NoObject, Unavailable
from flyball_operator.cluster.kinds import POD
from flyball_operator.cluster.metrics import Metrics


def ask(status: int, body: bytes) -> None:
    """Raises what a client makes of the answer."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body, content_type="text/html")

    async def scenario() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server = f"http://127.0.0.1:{runner.addresses[0][1]}"
        connection = Connection(kopf.ConnectionInfo(server=server), Metrics())
        try:
            await Client(connection).get(POD, "team", "chat")
        finally:
            await connection.close()
            await runner.cleanup()

    asyncio.run(scenario())


@pytest.mark.parametrize("body", [b"<h1>Sign in</h1>", b"\xff\xfe\x00", b"[]", b""])
def test_a_page_in_the_place_of_an_object_is_an_error_and_no_crash(body: bytes) -> None:
    with pytest.raises(NoObject, match="get pods team/chat: the answer is no JSON object; is a proxy in between"):
        ask(200, body)


@pytest.mark.parametrize(
    ("body", "message"), [(b"<h1>Oops</h1>", "<h1>Oops</h1>"), (b"\xff", "\ufffd"), (b"", "Bad Gateway")]
)
def test_an_error_page_is_the_message(body: bytes, message: str) -> None:
    with pytest.raises(Unavailable) as caught:
        ask(502, body)
    assert str(caught.value).endswith(message)

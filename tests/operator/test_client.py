"""Answers that no API server gives, but what stands before one may."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from flyball_operator.cluster.api_server import POD, SERVICE, NoObject, Unavailable, Unreachable
from flyball_operator.cluster.client import Client
from flyball_operator.cluster.connection import Connection, Credentials
from flyball_operator.cluster.election import LeaseLost
from flyball_operator.cluster.monitoring import Metrics

Handler = Callable[[web.Request], Awaitable[web.Response]]
Use = Callable[[Connection], Awaitable[None]]


def with_server(handler: Handler, use: Use) -> None:
    """Run ``use`` with a connection to a server whose every path is answered by ``handler``."""

    async def scenario() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server = f"http://127.0.0.1:{runner.addresses[0][1]}"
        connection = Connection(Credentials(Configuration(host=server)), Metrics())
        try:
            await use(connection)
        finally:
            await connection.close()
            await runner.cleanup()

    asyncio.run(scenario())


def ask(status: int, body: bytes) -> None:
    """Raises what a client makes of the answer."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body, content_type="text/html")

    async def get(connection: Connection) -> None:
        await Client(connection).get(POD, "team", "chat")

    with_server(answer, get)


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


WRITES: list[Callable[[Client], Awaitable[object]]] = [
    lambda client: client.create(SERVICE, OBJECT),
    lambda client: client.replace(SERVICE, OBJECT),
    lambda client: client.apply(SERVICE, OBJECT, force=True),
    lambda client: client.merge(SERVICE, "team", "chat", {}),
    lambda client: client.delete(SERVICE, "team", "chat", uid="u1"),
]
OBJECT = {"metadata": {"namespace": "team", "name": "chat"}}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_not_sent_by_a_process_that_does_not_lead(write: Callable[[Client], Awaitable[object]]) -> None:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.method)
        return web.json_response({})

    def lost() -> float:
        raise LeaseLost("the lease is lost")

    async def use(connection: Connection) -> None:
        client = Client(connection, time_to_write=lost)
        await client.get(SERVICE, "team", "chat")
        with pytest.raises(LeaseLost):
            await write(client)

    with_server(answer, use)
    assert seen == ["GET"]


def test_a_write_ends_with_the_lease() -> None:
    """Only a write: a read may take its time."""

    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(0.2 if request.method == "GET" else 3600)
        return web.json_response({})

    async def use(connection: Connection) -> None:
        client = Client(connection, time_to_write=lambda: 0.05)
        await client.get(SERVICE, "team", "chat")
        with pytest.raises(Unreachable, match="Timeout"):
            await asyncio.wait_for(client.create(SERVICE, OBJECT), 60)

    with_server(answer, use)

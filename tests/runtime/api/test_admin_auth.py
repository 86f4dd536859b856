"""Who may ask the admin port: signed requests from anywhere, a bearer token from loopback."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from flyball_protocol import signing
from flyball_runtime.api import MetricsCollector, create_admin_app
from runtime.api.support import ADMIN_TOKEN, bounded, error_of
from runtime.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

PATH, DRAIN = "/admin/limits", "/admin/drain"
ADDRESS = "10.0.0.5:8001"
BODY = b'{"revision": 5, "limits": {"max_num_seqs": 4}}'
NOW_S = 1_795_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def wall_clock() -> Clock:
    return Clock()


@asynccontextmanager
async def asking(
    engine: FakeEngine, metrics: MetricsCollector, wall_clock: Clock, client: str = "10.0.0.9"
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_admin_app(engine, metrics, ADMIN_TOKEN, wall_clock)
    transport = httpx.ASGITransport(bounded(app), client=(client, 40000))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{ADDRESS}") as asked:
        yield asked


@pytest.fixture
async def stranger(
    engine: FakeEngine, metrics: MetricsCollector, wall_clock: Clock
) -> AsyncIterator[httpx.AsyncClient]:
    async with asking(engine, metrics, wall_clock) as client:
        yield client


def signed(
    method: str = "POST", path: str = PATH, body: bytes = BODY, target: str = ADDRESS, time_s: float = NOW_S
) -> signing.SignedRequest:
    return signing.new_request(method, path, target, body, time_s)


def headers(request: signing.SignedRequest, token: str = ADMIN_TOKEN) -> dict[str, str]:
    return {"Authorization": request.header(token)}


async def test_a_signed_request_is_taken_and_its_answer_is_signed(
    stranger: httpx.AsyncClient, engine: FakeEngine
) -> None:
    request = signed()
    response = await stranger.post(PATH, content=BODY, headers=headers(request))
    assert (response.status_code, engine.revision) == (200, 5)
    signature = response.headers[signing.ANSWER_HEADER]
    assert signing.is_signed_answer(ADMIN_TOKEN, request.nonce, 200, response.content, signature)
    request = signed("GET", PATH + "?a=%2F", b"")
    response = await stranger.get(PATH + "?a=%2F", headers=headers(request))
    signature = response.headers[signing.ANSWER_HEADER]
    assert signing.is_signed_answer(ADMIN_TOKEN, request.nonce, 200, response.content, signature)


async def test_an_error_is_signed_as_well(stranger: httpx.AsyncClient) -> None:
    request = signed(body=b"{")
    response = await stranger.post(PATH, content=b"{", headers=headers(request))
    assert error_of(response)["code"] == "invalid_json"
    signature = response.headers[signing.ANSWER_HEADER]
    assert signing.is_signed_answer(ADMIN_TOKEN, request.nonce, 400, response.content, signature)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (signed(method="GET"), "not one of this token"),
        (signed(path=DRAIN), "not one of this token"),
        (signed(target="10.0.0.6:8001"), "signed for 10.0.0.6:8001, and this is 10.0.0.5:8001"),
        (signed(body=b"{}"), "the request's body is not the one that was signed"),
        (signed(time_s=NOW_S - 61), "Set the clocks"),
        (signed(time_s=NOW_S + 61), "Set the clocks"),
    ],
)
async def test_what_was_signed_for_something_else_is_refused_and_says_why(
    stranger: httpx.AsyncClient, engine: FakeEngine, wall_clock: Clock, request_: signing.SignedRequest, says: str
) -> None:
    response = await stranger.post(PATH, content=BODY, headers=headers(request_))
    assert response.status_code == 401
    assert says in error_of(response)["message"]
    assert signing.ANSWER_HEADER not in response.headers
    assert engine.revision == 0


async def test_a_request_is_taken_once(stranger: httpx.AsyncClient, wall_clock: Clock) -> None:
    given = headers(signed())
    assert (await stranger.post(PATH, content=BODY, headers=given)).status_code == 200
    wall_clock.now_s += 30
    response = await stranger.post(PATH, content=BODY, headers=given)
    assert response.status_code == 401
    assert "sent before" in error_of(response)["message"]


async def test_the_body_of_a_stranger_is_not_read(
    engine: FakeEngine, metrics: MetricsCollector, wall_clock: Clock
) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536

    async with asking(engine, metrics, wall_clock) as stranger:
        for given in ({}, {"Authorization": "Bearer x"}, headers(signed(), "wrong")):
            response = await stranger.post(PATH, content=endless(), headers=given)
            assert response.status_code == 401
        response = await stranger.post(PATH, content=b"x" * 100_000, headers=headers(signed()))
        assert response.status_code == 413


@pytest.mark.parametrize("client", ["10.0.0.9", "fd00::9", "::ffff:10.0.0.9", "testclient"])
async def test_a_bearer_token_from_elsewhere_is_refused_and_says_why(
    engine: FakeEngine, metrics: MetricsCollector, wall_clock: Clock, client: str
) -> None:
    async with asking(engine, metrics, wall_clock, client) as asked:
        for token in (ADMIN_TOKEN, "wrong"):
            response = await asked.get(PATH, headers={"Authorization": f"Bearer {token}"})
            assert response.status_code == 401
            assert "on this machine (loopback) only" in error_of(response)["message"]
            assert "kubectl port-forward" in error_of(response)["message"]


@pytest.mark.parametrize("client", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
async def test_a_bearer_token_from_loopback_is_taken(
    engine: FakeEngine, metrics: MetricsCollector, wall_clock: Clock, client: str
) -> None:
    async with asking(engine, metrics, wall_clock, client) as asked:
        response = await asked.get(PATH, headers={"Authorization": f"Bearer {ADMIN_TOKEN}"})
        assert response.status_code == 200
        response = await asked.get(PATH, headers={"Authorization": "Bearer wrong", "X-Forwarded-For": "127.0.0.1"})
        assert response.status_code == 401

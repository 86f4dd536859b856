"""Liveness, readiness and drain as probes see them."""

import httpx
import msgspec
import pytest

from runtime.api.support import error_of
from runtime.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio


async def statuses(client: httpx.AsyncClient) -> dict[str, int]:
    return {path: (await client.get(path)).status_code for path in ("/livez", "/readyz", "/health")}


async def test_idle_engine_is_live_and_ready(client: httpx.AsyncClient) -> None:
    assert await statuses(client) == {"/livez": 200, "/readyz": 200, "/health": 200}
    assert (await client.head("/livez")).status_code == 200


async def test_loading_is_live_and_not_ready(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.ready, engine.stats, engine.heartbeat_s = False, None, 500.0
    assert await statuses(client) == {"/livez": 200, "/readyz": 503, "/health": 503}
    response = await client.get("/readyz")
    assert error_of(response)["code"] == "not_ready" and response.headers["retry-after"]


async def test_draining_is_live_and_not_ready(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.start_drain()
    assert await statuses(client) == {"/livez": 200, "/readyz": 503, "/health": 503}
    assert error_of(await client.get("/health"))["code"] == "draining"


@pytest.mark.parametrize("drains", [False, True])
async def test_stuck_loop_is_neither(client: httpx.AsyncClient, engine: FakeEngine, drains: bool) -> None:
    engine.heartbeat_s, engine.draining, engine.ready = 30.5, drains, not drains
    assert await statuses(client) == {"/livez": 503, "/readyz": 503, "/health": 503}
    assert "no progress for 30.5 s; --max-heartbeat-age allows 30 s" in error_of(await client.get("/livez"))["message"]


async def test_a_slow_machine_is_not_taken_for_a_stuck_one(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """A layer of its largest step takes 40 s, as measured when it started."""
    engine.engine_info = msgspec.structs.replace(engine.engine_info, longest_pause_s=40.0)
    engine.heartbeat_s = 119.0
    assert await statuses(client) == {"/livez": 200, "/readyz": 200, "/health": 200}
    engine.heartbeat_s = 121.0
    assert await statuses(client) == {"/livez": 503, "/readyz": 503, "/health": 503}
    message = error_of(await client.get("/livez"))["message"]
    assert "no progress for 121.0 s; 3 times the longest pause of a step allows 120 s" in message


async def test_a_drain_while_loading_does_not_make_it_look_stuck(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.ready, engine.stats, engine.draining, engine.heartbeat_s = False, None, True, 500.0
    assert await statuses(client) == {"/livez": 200, "/readyz": 503, "/health": 503}


async def test_dead_engine_is_neither(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.die("killed by signal 9")
    assert await statuses(client) == {"/livez": 503, "/readyz": 503, "/health": 503}
    error = error_of(await client.get("/livez"))
    assert error["code"] == "engine_dead" and "signal 9" in error["message"]

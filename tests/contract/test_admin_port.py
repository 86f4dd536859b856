"""The operator's client of the admin port against the runtime's admin port, over a real connection."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from flyball_operator.tuning.admin import AdminClient, Target
from flyball_protocol import LimitsChange, LimitsStatus, LimitsUpdate, signing
from flyball_runtime.api import MetricsCollector, create_admin_app
from flyball_runtime.core.clock import FakeClock
from runtime.api.support import served
from runtime.fake_engine import FakeEngine, step_stats

TOKEN = "a-token"
UPDATE = LimitsUpdate(revision=3, limits=LimitsChange(max_num_seqs=4), ttl_s=60.0)


@asynccontextmanager
async def replica() -> AsyncIterator[tuple[FakeEngine, Target]]:
    engine, metrics = FakeEngine(100, lambda _: [1]), MetricsCollector(model_name="m", clock=FakeClock())
    metrics.attach(engine)
    metrics.measured.step(step_stats())
    async with served(create_admin_app(engine, metrics, TOKEN)) as (host, port):
        yield engine, Target("chat-1", f"http://{host}:{port}")


@asynccontextmanager
async def asking(token: str = TOKEN, ahead_s: float = 0.0) -> AsyncIterator[AdminClient]:
    async with aiohttp.ClientSession() as session:
        yield AdminClient(session, token, timeout_s=30.0, wall_clock=lambda: time.time() + ahead_s)


def test_evidence_is_read_and_limits_are_taken() -> None:
    async def check() -> None:
        async with replica() as (engine, target), asking() as client:
            found = await client.evidence(target)
            assert found.evidence is not None, found.problem
            posted = await client.post(target, UPDATE)
            assert posted.ack is not None, posted.problem
            assert (posted.ack.status, engine.revision) == (LimitsStatus.APPLIED, 3)

    asyncio.run(check())


@pytest.mark.parametrize(
    ("token", "ahead_s", "says"),
    [("wrong", 0.0, "not one of this token"), (TOKEN, -600.0, "Set the clocks"), (TOKEN, 600.0, "Set the clocks")],
)
def test_a_refusal_is_a_problem_in_words(token: str, ahead_s: float, says: str) -> None:
    async def check() -> None:
        async with replica() as (engine, target), asking(token, ahead_s) as client:
            found = await client.evidence(target)
            assert found.evidence is None
            assert says in found.problem
            assert (await client.post(target, UPDATE)).ack is None
            assert engine.revision == 0

    asyncio.run(check())


def test_who_is_at_a_replicas_address_gets_nothing_to_use_elsewhere_and_is_not_believed() -> None:
    """A stranger passes each request on to another replica, and answers with what a replica said to another request."""

    async def check() -> None:
        async with replica() as (engine, target), asking() as client, aiohttp.ClientSession() as session:
            kept: list[tuple[int, bytes, str]] = []

            async def pass_on(request: web.Request) -> web.Response:
                assert TOKEN not in str(request.raw_headers)
                headers = {"Authorization": request.headers["Authorization"]}
                async with session.request(
                    request.method, target.url + request.path_qs, data=await request.read(), headers=headers
                ) as answer:
                    assert answer.status == 401
                    assert "is signed for" in await answer.text()
                status, body, signature = kept[0]
                return web.Response(status=status, body=body, headers={signing.ANSWER_HEADER: signature})

            genuine = signing.new_request(
                "GET", "/admin/evidence", target.url.removeprefix("http://"), b"", client._wall_clock()
            )
            async with session.get(
                target.url + "/admin/evidence", headers={"Authorization": genuine.header(TOKEN)}
            ) as answer:
                kept.append((answer.status, await answer.read(), answer.headers[signing.ANSWER_HEADER]))
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", pass_on)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            impostor = dataclasses.replace(target, url=f"http://127.0.0.1:{port}")
            found = await client.evidence(impostor)
            assert found.evidence is None
            assert "not signed with this deployment's token" in found.problem
            assert (await client.post(impostor, UPDATE)).ack is None
            assert engine.revision == 0
            await runner.cleanup()

    asyncio.run(check())

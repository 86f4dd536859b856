"""The client of a replica's admin port, against servers that answer as a test wants."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from flyball_operator.tuning import PodEvidence
from flyball_operator.tuning.admin import MAX_ANSWER_BYTES, MAX_CONCURRENT, AdminClient, Posted, Target
from flyball_protocol import LimitsAck, LimitsChange, LimitsStatus, LimitsUpdate, signing
from flyball_protocol.limits import LIMITS_HTTP_STATUS
from operator_kit.evidence import LIMITS, make_evidence

TOKEN = "a-token"
EVIDENCE = make_evidence()
UPDATE = LimitsUpdate(revision=3, limits=LimitsChange(max_num_seqs=4), ttl_s=60.0)
Handler = Callable[[web.Request], Awaitable[web.Response]]


@asynccontextmanager
async def replica(handler: Handler, *, signs: bool = True, name: str = "chat-1") -> AsyncIterator[Target]:
    """Serve ``handler`` as an admin port, which fails a test whose request is not signed for it."""
    verifier = signing.Verifier(TOKEN, time.time())

    async def answer(request: web.Request) -> web.Response:
        signed = verifier.check(
            request.headers["Authorization"],
            method=request.method,
            path=request.raw_path,
            target=request.host,
            now_s=time.time(),
        )
        assert signed.covers(await request.read())
        response = await handler(request)
        if signs:
            body = response.body if isinstance(response.body, bytes) else b""
            response.headers[signing.ANSWER_HEADER] = signing.sign_answer(TOKEN, signed.nonce, response.status, body)
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield Target(name, f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


@asynccontextmanager
async def asking(timeout_s: float = 60.0, **options: Any) -> AsyncIterator[AdminClient]:
    async with aiohttp.ClientSession() as session:
        yield AdminClient(session, TOKEN, timeout_s=timeout_s, **options)


def answering(status: int = 200, body: bytes = b"", headers: dict[str, str] | None = None) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body, headers=headers)

    return handler


def asked(
    ask: Callable[[AdminClient, Target], Coroutine[Any, Any, Any]],
    handler: Handler,
    *,
    signs: bool = True,
    **options: Any,
) -> Any:
    """Return what ``ask`` makes of a replica that answers with ``handler``."""

    async def run() -> Any:
        async with replica(handler, signs=signs) as target, asking(**options) as client:
            return await ask(client, target)

    return asyncio.run(run())


def problem_of(handler: Handler, *, signs: bool = True, **options: Any) -> str:
    """Return the problem that the client has with the evidence of a replica."""
    found = asked(AdminClient.evidence, handler, signs=signs, **options)
    assert (found.pod, found.evidence) == ("chat-1", None)
    problem: str = found.problem
    return problem


def an_ack(status: LimitsStatus) -> LimitsAck:
    return LimitsAck(status=status, revision=3, target=LIMITS, effective=LIMITS, reason="so it is")


def test_evidence_is_asked_for_without_a_body_and_an_update_is_sent_as_json() -> None:
    seen: list[tuple[str, str, bytes]] = []

    async def handler(request: web.Request) -> web.Response:
        body = await request.read()
        seen.append((request.method, request.raw_path, body))
        if request.method == "GET":
            return web.Response(body=msgspec.json.encode(EVIDENCE))
        assert request.content_type == "application/json"
        assert msgspec.json.decode(body, type=LimitsUpdate) == UPDATE
        return web.Response(body=msgspec.json.encode(an_ack(LimitsStatus.APPLIED)))

    assert asked(AdminClient.evidence, handler) == PodEvidence(pod="chat-1", evidence=EVIDENCE)
    posted = asked(lambda client, target: client.post(target, UPDATE), handler)
    assert posted == Posted("chat-1", an_ack(LimitsStatus.APPLIED))
    assert [one[:2] for one in seen] == [("GET", "/admin/evidence"), ("POST", "/admin/limits")]
    assert seen[0][2] == b""


@pytest.mark.parametrize("status", LimitsStatus)
def test_every_answer_to_an_update_is_one(status: LimitsStatus) -> None:
    handler = answering(LIMITS_HTTP_STATUS[status], msgspec.json.encode(an_ack(status)))
    assert asked(lambda client, target: client.post(target, UPDATE), handler) == Posted("chat-1", an_ack(status))


def test_all_are_asked_and_each_answer_is_that_replicas() -> None:
    async def check() -> None:
        evidence = answering(200, msgspec.json.encode(EVIDENCE))
        posted: list[LimitsUpdate] = []

        async def refuse(request: web.Request) -> web.Response:
            posted.append(msgspec.json.decode(await request.read(), type=LimitsUpdate))
            return web.Response(status=409, body=msgspec.json.encode(an_ack(LimitsStatus.STALE)))

        async with (
            replica(evidence, name="one") as one,
            replica(answering(503, b"starting"), name="two") as two,
            replica(refuse, name="three") as three,
            asking() as client,
        ):
            assert await client.gather([two, one]) == [
                PodEvidence(pod="two", problem="GET /admin/evidence answered 503: starting"),
                PodEvidence(pod="one", evidence=EVIDENCE),
            ]
            assert await client.gather([]) == []
            assert await client.post_all({three: UPDATE, two: UPDATE}) == [
                Posted("three", an_ack(LimitsStatus.STALE)),
                Posted("two", None, "POST /admin/limits answered 503: starting"),
            ]
            assert posted == [UPDATE]

    asyncio.run(check())


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b"x" * 200 + b"y", "x" * 200),
        (b"two\nlines \x1b[31m", r"two\nlines \x1b[31m"),
        (b"\xff is no UTF-8", "\N{REPLACEMENT CHARACTER} is no UTF-8"),
    ],
)
def test_of_an_answer_that_is_refused_the_head_is_shown_on_one_line(body: bytes, shown: str) -> None:
    assert problem_of(answering(500, body)) == f"GET /admin/evidence answered 500: {shown}"


def test_an_answer_without_a_signature_is_not_believed() -> None:
    problem = problem_of(answering(200, msgspec.json.encode(EVIDENCE)), signs=False)
    assert problem.startswith(
        'GET /admin/evidence answered 200, not signed with this deployment\'s token: {"version":2,"model":"demo",'
    )


def test_an_answer_that_cannot_be_read_is_a_problem() -> None:
    cut = "an answer that cannot be read: Input data was truncated"
    assert problem_of(answering(200, b'{"model": "demo"')) == cut
    posted = asked(lambda client, target: client.post(target, UPDATE), answering(200, b"{}"))
    assert posted == Posted("chat-1", None, "an answer that cannot be read: Object missing required field `status`")


def test_an_answer_may_be_as_long_as_the_limit_and_no_longer() -> None:
    body = msgspec.json.encode(EVIDENCE).ljust(MAX_ANSWER_BYTES)
    assert asked(AdminClient.evidence, answering(200, body)).evidence == EVIDENCE
    assert problem_of(answering(200, body + b" ")) == (
        f"the answer is longer than {MAX_ANSWER_BYTES} bytes: this is no admin port of a runtime"
    )


def test_a_redirect_is_not_followed() -> None:
    handler = answering(302, b"moved", {"Location": "/elsewhere"})
    assert problem_of(handler) == "GET /admin/evidence answered 302: moved"


def test_a_replica_that_does_not_answer_is_given_up() -> None:
    async def handler(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError("it never answers")

    found = re.fullmatch(r"no answer in (\d+\.\d) s", problem_of(handler, timeout_s=0.2))
    assert found is not None
    assert 0.1 <= float(found[1]) < 600


def test_an_address_where_nothing_listens_is_a_problem() -> None:
    async def check() -> None:
        async with asking() as client:
            found = await client.evidence(Target("chat-1", "http://127.0.0.1:1"))
            assert found.problem.startswith("ClientConnectorError: Cannot connect to host 127.0.0.1:1 ")

    asyncio.run(check())


class Crowd:
    """Answers once ``num_expected`` requests are there, and counts how many are at most there at a time."""

    def __init__(self, num_expected: int) -> None:
        self._num_expected = num_expected
        self._all_there = asyncio.Event()
        self._num_here = 0
        self.most = 0

    async def answer(self, _: web.Request) -> web.Response:
        self._num_here += 1
        self.most = max(self.most, self._num_here)
        if self._num_here >= self._num_expected:
            await asyncio.sleep(0.05)  # so that one too many is seen
            self._all_there.set()
        await self._all_there.wait()
        self._num_here -= 1
        return web.Response(body=msgspec.json.encode(EVIDENCE))


def test_so_many_are_asked_at_once_and_no_more() -> None:
    async def check() -> None:
        crowd = Crowd(MAX_CONCURRENT)
        async with replica(crowd.answer) as target, asking() as client:
            found = await client.gather([target] * (MAX_CONCURRENT + 8))
        assert all(one.evidence == EVIDENCE for one in found), found
        assert crowd.most == MAX_CONCURRENT

    asyncio.run(check())


def test_clients_may_share_their_slots() -> None:
    async def check() -> None:
        crowd, slots = Crowd(3), asyncio.Semaphore(3)
        async with replica(crowd.answer) as target, asking(slots=slots) as one, asking(slots=slots) as other:
            await asyncio.gather(one.gather([target] * 4), other.gather([target] * 4))
        assert crowd.most == 3

    asyncio.run(check())

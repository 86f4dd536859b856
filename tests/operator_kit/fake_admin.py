"""Replicas in this process that answer on an admin port, each on a loopback address of its own."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from flyball_operator.observed import Pod
from flyball_protocol import Limits, LimitsAck, LimitsStatus, LimitsUpdate, Objectives, signing
from flyball_protocol.endpoints import ADMIN_EVIDENCE_PATH, ADMIN_LIMITS_PATH, ADMIN_PORT
from flyball_protocol.limits import LIMITS_HTTP_STATUS
from operator_kit.evidence import LIMITS, make_evidence

TOKEN = "a-token"


def any_loopback_address() -> str:
    """An address that other tests on this machine hardly choose too."""
    return f"127.{random.randint(1, 254)}.{random.randint(0, 255)}.{random.randint(1, 254)}"


class FakeReplica:
    """Takes limits as a runtime does, and reports the evidence that a test wants.

    Attributes:
        sees: fields of the evidence, made from the limits in force.
        fault: None, "hang", "garbage", "endless", "stranger" (it answers, and has no token) or an HTTP status to answer with.
        deaf: takes no limits.
        updates: every update that was posted.
    """

    def __init__(self, name: str, sees: Callable[[Limits], dict[str, Any]]) -> None:
        self.name = name
        self.ip = any_loopback_address()
        self._verifier = signing.Verifier(TOKEN, time.time())
        self.sees = sees
        self.fault: str | int | None = None
        self.deaf = False
        self.revision, self.limits = 0, LIMITS
        self.objectives: Objectives | None = None
        self.updates: list[LimitsUpdate] = []
        self.num_requests = 0
        self.ready, self.deleting = True, False
        self._version = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["FakeReplica"]:
        app = web.Application(middlewares=[self._sign])
        app.router.add_get(ADMIN_EVIDENCE_PATH, self._evidence)
        app.router.add_post(ADMIN_LIMITS_PATH, self._limits)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, self.ip, ADMIN_PORT).start()
        try:
            yield self
        finally:
            await runner.cleanup()

    def restart(self, revision: int = 0, limits: Limits = LIMITS) -> None:
        self.revision, self.limits, self.objectives = revision, limits, None

    @property
    def pod(self) -> Pod:
        self._version += 1
        metadata = {"namespace": "default", "name": self.name, "uid": self.name, "resourceVersion": str(self._version)}
        if self.deleting:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        ready = {"type": "Ready", "status": str(self.ready)}
        return Pod.of({"metadata": metadata, "status": {"podIP": self.ip, "conditions": [ready]}})

    @web.middleware
    async def _sign(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.Response:
        answer: web.Response = await handler(request)
        if "signed" in request and self.fault != "stranger":
            body = answer.body if isinstance(answer.body, bytes) else b""
            signature = signing.sign_answer(TOKEN, request["signed"].nonce, answer.status, body)
            answer.headers[signing.ANSWER_HEADER] = signature
        return answer

    async def _evidence(self, request: web.Request) -> web.Response:
        if (answer := await self._faulty(request)) is not None:
            return answer
        fields = {"revision": self.revision, "limits": self.limits, "posted": self.objectives} | self.sees(self.limits)
        return web.Response(body=msgspec.json.encode(make_evidence(**fields)))

    async def _limits(self, request: web.Request) -> web.Response:
        if (answer := await self._faulty(request)) is not None:
            return answer
        update = msgspec.json.decode(await request.read(), type=LimitsUpdate)
        self.updates.append(update)
        status = self._take(update)
        ack = LimitsAck(status=status, revision=self.revision, target=self.limits, effective=self.limits)
        return web.Response(status=LIMITS_HTTP_STATUS[status], body=msgspec.json.encode(ack))

    def _take(self, update: LimitsUpdate) -> LimitsStatus:
        wanted = update.limits.applied_to(self.limits)
        if self.deaf:
            return LimitsStatus.REJECTED
        if update.revision < self.revision:
            return LimitsStatus.STALE
        if update.revision == self.revision and wanted != self.limits:
            return LimitsStatus.REJECTED
        self.revision, self.limits = update.revision, wanted
        self.objectives = update.objectives or self.objectives
        return LimitsStatus.APPLIED

    async def _faulty(self, request: web.Request) -> web.Response | None:
        self.num_requests += 1
        try:
            request["signed"] = self._verifier.check(
                request.headers.get("Authorization", ""),
                method=request.method,
                path=request.raw_path,
                target=signing.target_of(self.ip, ADMIN_PORT),
                now_s=time.time(),
            )
        except signing.SignatureError as error:
            return web.Response(status=401, text=str(error))
        if not request["signed"].covers(await request.read()):
            return web.Response(status=401, text="another body")
        if self.fault == "hang":
            await asyncio.sleep(60)
        if self.fault == "garbage":
            return web.Response(text='{"model": "demo", "uptime_s": ')
        if self.fault == "endless":
            return web.Response(text="x" * 2_000_000)
        return web.Response(status=self.fault, text="no") if isinstance(self.fault, int) else None


@asynccontextmanager
async def fake_replicas(
    count: int, sees: Callable[[Limits], dict[str, Any]] | None = None
) -> AsyncIterator[list[FakeReplica]]:
    async with AsyncExitStack() as stack:
        replicas = [FakeReplica(f"chat-{i}", sees or (lambda _: {})) for i in range(1, count + 1)]
        yield [await stack.enter_async_context(one.serving()) for one in replicas]

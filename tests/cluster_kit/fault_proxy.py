"""A proxy between the operator and the API server that misbehaves when it is told to."""

import asyncio
import json
import selectors
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import aiohttp
import kopf
import yaml
from aiohttp import web

HOP_HEADERS = {"transfer-encoding", "content-length", "content-encoding", "connection", "host"}
CLOSE_TIMEOUT_S = 60.0


class Fault(NamedTuple):
    """What to do to a request. ``status`` answers in the API server's place; ``delay_s`` comes first."""

    status: int = 0
    delay_s: float = 0.0
    retry_after: str = ""


Faults = Callable[[str, str], Fault | None]
"""Method and path (with its query) in, a fault or None for good service out."""


class FaultProxy:
    """Serves plain HTTP on loopback from a thread of its own. Set ``faults`` at any time; ``seen`` is what went through."""

    def __init__(self, kubeconfig: Path) -> None:
        cluster = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]
        self._info = kopf.ConnectionInfo(
            server=cluster["server"],
            ca_path=cluster.get("certificate-authority"),
            ca_data=cluster.get("certificate-authority-data"),
        )
        self.faults: Faults = lambda method, path: None
        self.seen: list[tuple[str, str]] = []
        self._watches: set[web.StreamResponse] = set()
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._start())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def num_watches(self) -> int:
        """How many are open."""
        return len(self._watches)

    def expire_watches(self) -> None:
        """Tell every open watch that its resource version is gone, as etcd's compaction does."""
        self._do(self._send({"code": 410, "reason": "Expired", "message": "too old resource version"}))

    def break_watches(self) -> None:
        """Send every open watch an error of another kind, as an API server does that has trouble with its storage."""
        self._do(self._send({"code": 500, "reason": "InternalError", "message": "injected by the test"}))

    def writes(self) -> list[tuple[str, str]]:
        """What went through and writes, other than the lease."""
        return [(method, path) for method, path in self.seen if method != "GET" and "/leases" not in path]

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    async def _start(self) -> None:
        connector = aiohttp.TCPConnector(ssl=self._info.as_ssl_context(), limit=0)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        await self._runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}  # watches of an operator that was killed
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._session.close()  # last: what a watch lets go after it would stay open
        deadline_s = self._loop.time() + CLOSE_TIMEOUT_S
        while len(self._selector.get_map()) > 1 and self._loop.time() < deadline_s:  # the one wakes the loop
            await asyncio.sleep(0.01)  # TLS says goodbye to its peer

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        fault = self.faults(request.method, request.path_qs) or Fault()
        await asyncio.sleep(fault.delay_s)
        if fault.status:
            return _refusal(fault)
        self.seen.append((request.method, request.path_qs))
        return await self._pass_on(request)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_HEADERS}
        url = f"{self._info.server}{request.path_qs}"
        body = await request.read()
        timeout = aiohttp.ClientTimeout(total=None)
        skip = (
            "Content-Type",
            "Accept",
            "Accept-Encoding",
            "User-Agent",
        )  # what the operator did not send, we do not either
        async with self._session.request(
            request.method, url, headers=headers, data=body or None, timeout=timeout, skip_auto_headers=skip
        ) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_HEADERS}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            if "watch=true" in request.query_string:
                self._watches.add(response)
            try:
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
            finally:
                self._watches.discard(response)
            return response

    async def _send(self, error: dict[str, Any]) -> None:
        told, self._watches = self._watches, set()  # their client opens others
        for watch in told:
            await watch.write(json.dumps({"type": "ERROR", "object": {"kind": "Status", **error}}).encode() + b"\n")


def _refusal(fault: Fault) -> web.Response:
    reasons = {409: "Conflict", 429: "TooManyRequests", 500: "InternalError"}
    reason = reasons.get(fault.status, "Unknown")
    body = {"kind": "Status", "code": fault.status, "reason": reason, "message": "injected by the test"}
    headers = {"Retry-After": fault.retry_after} if fault.retry_after else {}
    return web.json_response(body, status=fault.status, headers=headers)

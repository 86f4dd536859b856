"""How the operator reaches the API server: one address, one session, shared by its own calls and Kopf's watches."""

import os
import time
from pathlib import Path
from typing import Protocol

import aiohttp
import kopf

from flyball_operator.cluster.errors import ClusterError
from flyball_operator.cluster.kinds import Kind
from flyball_operator.cluster.metrics import Metrics, target_of

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_PERIOD_S = 60.0
"""The kubelet writes a new token long before the old one ends; a minute is what client-go takes too."""


class Asked(Protocol):
    """Is told of a list or a watch of a kind."""

    def __call__(self, *, watch: bool) -> None: ...


class TokenFile:
    """A bearer token that somebody else renews on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header = ""
        self._read_at = float("-inf")

    def header(self) -> str:
        """Return the Authorization header."""
        if time.monotonic() - self._read_at > TOKEN_PERIOD_S:
            self._header = f"Bearer {self._path.read_text(encoding='utf-8').strip()}"
            self._read_at = time.monotonic()
        return self._header


class Connection:
    """Credentials and sessions. These count every call, and send a token that is never old."""

    def __init__(self, info: kopf.ConnectionInfo, metrics: Metrics, token: TokenFile | None = None) -> None:
        self._info = info
        self._metrics = metrics
        self._token = token
        self._ssl = info.as_ssl_context()
        self._session: aiohttp.ClientSession | None = None
        self._kopfs: list[aiohttp.ClientSession] = []

    @classmethod
    def find(cls, metrics: Metrics) -> "Connection":
        """Return the connection that $KUBECONFIG, the pod's service account or ~/.kube/config describes, in this order.

        Raises:
            ClusterError: there is none of these, or it cannot be read.
        """
        settings = kopf.OperatorSettings()
        try:
            if not os.environ.get("KUBECONFIG") and (info := kopf.login_with_service_account(settings=settings)):
                return cls(info, metrics, TokenFile(SERVICE_ACCOUNT / "token"))
            if info := kopf.login_with_kubeconfig(settings=settings):
                return cls(info, metrics)
        except (OSError, KeyError, ValueError, kopf.LoginError) as error:
            raise ClusterError(f"the kubeconfig cannot be used: {type(error).__name__}: {error}") from error
        raise ClusterError("no cluster is known: set KUBECONFIG, or run in a pod that has a service account")

    @property
    def server(self) -> str:
        return self._info.server.rstrip("/")

    @property
    def session(self) -> aiohttp.ClientSession:
        """The session of the operator's own calls."""
        if self._session is None:
            self._session = self._open()
        return self._session

    def for_kopf(self, kind: Kind, asked: Asked) -> kopf.AiohttpSession:
        """Return a new session the way Kopf's login handlers do.

        Kopf closes it when its watch ends, and when the API server refuses the credentials.

        Args:
            asked: called at each request for the kind.
        """

        async def notice(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
            if request.url.path.endswith(f"/{kind.plural}"):
                asked(watch="watch" in request.url.query)
            return await handler(request)

        session = self._open(notice)
        self._kopfs = [session, *(one for one in self._kopfs if not one.closed)]
        return kopf.AiohttpSession(
            server=self.server, aiohttp_session=session, default_namespace=self._info.default_namespace
        )

    async def close(self) -> None:
        for session in (self._session, *self._kopfs):
            if session is not None:
                await session.close()

    def _open(self, *middlewares: aiohttp.ClientMiddlewareType) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._ssl),
            headers={"User-Agent": "flyball-operator", **self._info.as_http_headers()},
            proxy=self._info.proxy_url,
            middlewares=(self._count, self._authorize, *middlewares),
        )

    async def _authorize(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        if self._token is not None:
            request.headers["Authorization"] = self._token.header()
        return await handler(request)

    async def _count(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        verb, resource = target_of(request.method, request.url.path, watch="watch" in request.url.query)
        code = "error"
        try:
            response = await handler(request)
            code = str(response.status)
            return response
        finally:
            self._metrics.api_calls.labels(verb, resource, code).inc()

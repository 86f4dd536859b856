"""How the operator reaches the API server: sessions for its own calls and for Kopf's watches."""

from http import HTTPStatus
from typing import Protocol

import aiohttp
import kopf

from flyball_operator.cluster.credentials import Credentials
from flyball_operator.cluster.errors import ClusterError
from flyball_operator.cluster.kinds import Kind
from flyball_operator.cluster.metrics import Metrics, target_of


class Asked(Protocol):
    """Is told of a list or a watch of a kind."""

    def __call__(self, *, watch: bool) -> None: ...


class Connection:
    """Credentials and sessions. These count every call, and send a token that is never old."""

    def __init__(self, credentials: Credentials, metrics: Metrics) -> None:
        self._credentials = credentials
        self._metrics = metrics
        self._ssl = credentials.ssl_context()
        self._session: aiohttp.ClientSession | None = None
        self._kopfs: list[aiohttp.ClientSession] = []

    @classmethod
    async def find(cls, metrics: Metrics, context: str | None = None) -> "Connection":
        """Return the connection that ``Credentials.find`` describes. Raises ClusterError."""
        return cls(await Credentials.find(context), metrics)

    @property
    def namespace(self) -> str | None:
        """The namespace of the kubeconfig's context, None without one."""
        return self._credentials.namespace

    @property
    def server(self) -> str:
        return self._credentials.server

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
        return kopf.AiohttpSession(server=self.server, aiohttp_session=session)

    async def close(self) -> None:
        for session in (self._session, *self._kopfs):
            if session is not None:
                await session.close()

    def _open(self, *middlewares: aiohttp.ClientMiddlewareType) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._ssl),
            headers={"User-Agent": "flyball-operator"},
            proxy=self._credentials.proxy,
            middlewares=(self._count, self._authorize, *middlewares),
        )

    async def _authorize(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        try:
            header = await self._credentials.authorization()
        except ClusterError as error:
            raise aiohttp.ClientConnectionError(str(error)) from error
        if self._credentials.tls_server_name is not None:
            request.server_hostname = self._credentials.tls_server_name
        if header is not None:
            request.headers["Authorization"] = header
        response = await handler(request)
        if response.status == HTTPStatus.UNAUTHORIZED:
            self._credentials.refused()
        return response

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

"""How the operator reaches the API server: credentials, and sessions for its own calls and for Kopf's watches."""

import asyncio
import os
import ssl
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import kopf
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import ConfigException
from kubernetes.aio.config.incluster_config import InClusterConfigLoader
from kubernetes.aio.config.kube_config import KubeConfigLoader, KubeConfigMerger

from flyball_operator.cluster.api_server import ClusterError, Kind, verb_and_resource
from flyball_operator.cluster.monitoring import Metrics

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REFRESH_S = 60.0
"""How often credentials of a kubeconfig are looked at. The package reads a pod's token file as often."""
RELOAD_S = 5.0
"""How often the kubeconfig is read again, at most, after the API server refused its credentials."""


class Loader(Protocol):
    """Reads a kubeconfig; the second time, only what has run out. ``namespace`` is the context's, None without one."""

    namespace: str | None

    async def load_and_set(self, configuration: Configuration) -> None: ...


class Credentials:
    """An address, a TLS context and an Authorization header that is never old.

    Args:
        kubeconfig: paths as in $KUBECONFIG; None for a configuration that renews itself.
        context: of the kubeconfig; None takes the current one.
    """

    def __init__(
        self,
        configuration: Configuration,
        kubeconfig: str | None = None,
        refresh_s: float = REFRESH_S,
        context: str | None = None,
    ) -> None:
        self._configuration = configuration
        self._kubeconfig = kubeconfig
        self._context = context
        self._refresh_s = refresh_s
        self._loader: Loader | None = None
        self._looked_at_s = self._read_at_s = float("-inf")
        self._refreshing = asyncio.Lock()

    @classmethod
    async def find(cls, context: str | None = None) -> "Credentials":
        """Return those of $KUBECONFIG, of the pod's service account or of ~/.kube/config, in this order.

        Args:
            context: of the kubeconfig; None takes the current one. With a context, the service account is not considered.

        Raises:
            ClusterError: there is none of these, or it cannot be used.
        """
        given = os.environ.get("KUBECONFIG")
        configuration = Configuration()
        if context is None and not given and (SERVICE_ACCOUNT / "token").is_file():
            try:
                files = (str(SERVICE_ACCOUNT / "token"), str(SERVICE_ACCOUNT / "ca.crt"))
                InClusterConfigLoader(*files).load_and_set(configuration)
            except (ConfigException, OSError) as error:
                raise ClusterError(f"the pod's service account cannot be used: {error}") from error
            return cls(configuration)
        path = given or str(Path.home() / ".kube" / "config")
        if not any(Path(one).expanduser().is_file() for one in path.split(os.pathsep)):
            raise ClusterError("no cluster is known: set KUBECONFIG, or run in a pod that has a service account")
        return await cls.of_kubeconfig(path, context=context)

    @classmethod
    async def of_kubeconfig(cls, path: str, refresh_s: float = REFRESH_S, context: str | None = None) -> "Credentials":
        """Return the credentials of a context. Raises ClusterError when they cannot be used."""
        made = cls(Configuration(), path, refresh_s, context)
        try:
            await made._refresh()
        except Exception as error:  # the package lets what a strange file leads to pass: KeyError, TypeError
            raise ClusterError(f"the kubeconfig {path} cannot be used: {type(error).__name__}: {error}") from error
        return made

    @property
    def server(self) -> str:
        return str(self._configuration.host).rstrip("/")

    @property
    def namespace(self) -> str | None:
        """The namespace of the kubeconfig's context; None when it has none, and without a kubeconfig."""
        return None if self._loader is None else self._loader.namespace

    @property
    def proxy(self) -> str | None:
        proxy: str | None = self._configuration.proxy
        return proxy

    @property
    def tls_server_name(self) -> str | None:
        """The name in the API server's certificate, where it is not that of the address."""
        name: str | None = self._configuration.tls_server_name
        return name

    def ssl_context(self) -> ssl.SSLContext:
        """Return a context with the cluster's authority and the client's certificate."""
        context: ssl.SSLContext = RESTClientObject(self._configuration).ssl_context
        return context

    async def authorization(self) -> str | None:
        """Return the Authorization header, None without one.

        Raises:
            ClusterError: the credentials have run out and cannot be renewed.
        """
        try:
            await self._refresh()
            header: str | None = await self._configuration.get_api_key_with_prefix("BearerToken")
        except (ConfigException, OSError) as error:
            raise ClusterError(f"the credentials cannot be renewed: {error}") from error
        return None if header is None else header.strip()

    def refused(self) -> None:
        """The API server did not accept the credentials: read the kubeconfig again, and run its plugin."""
        if time.monotonic() - self._read_at_s > RELOAD_S:
            self._loader, self._looked_at_s = None, float("-inf")

    async def _refresh(self) -> None:
        if self._kubeconfig is None or self._is_fresh:
            return
        async with self._refreshing:
            if self._is_fresh:
                return
            if self._loader is None:
                self._loader, self._read_at_s = _Loader(self._kubeconfig, self._context), time.monotonic()
            await self._loader.load_and_set(self._configuration)
            self._looked_at_s = time.monotonic()

    @property
    def _is_fresh(self) -> bool:
        return time.monotonic() - self._looked_at_s < self._refresh_s


class _Loader(KubeConfigLoader):  # type: ignore[misc]  # the package has no types here
    """The package's loader, whose failures are errors and not lines in a log."""

    def __init__(self, paths: str, context: str | None) -> None:
        super().__init__(config_dict=KubeConfigMerger(paths).config, active_context=context, config_base_path=None)
        self.namespace: str | None = self._current_context["context"].safe_get("namespace")

    async def load_from_exec_plugin(self) -> Any:
        done = await super().load_from_exec_plugin()
        if not done or not {"token", "cert_file"} & vars(self).keys():
            raise ConfigException("its exec plugin gave no credentials; the line before this one says why")
        return done

    async def _refresh_oidc(self, provider: Any) -> None:
        # The package would send the refresh token without checking the provider's certificate.
        raise ConfigException("its OIDC id-token has run out; use an exec plugin, such as kubectl oidc-login")


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
        verb, resource = verb_and_resource(request.method, request.url.path, watch="watch" in request.url.query)
        code = "error"
        try:
            response = await handler(request)
            code = str(response.status)
            return response
        finally:
            self._metrics.api_calls.labels(verb, resource, code).inc()

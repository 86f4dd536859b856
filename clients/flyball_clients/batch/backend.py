"""Who answers: a server, or an engine of the batch's own."""

import asyncio
import importlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Protocol

import aiohttp
from msgspec import Struct

from flyball_clients.batch.settings import BatchSettings
from flyball_clients.endpoint import Endpoint
from flyball_clients.errors import ConfigError, EndpointError, RequestTimeout
from flyball_clients.stream import open_session, translated


class Answer(Struct, frozen=True):
    """An HTTP answer, of whatever status. ``retry_after_s`` is None where it does not say when to come back."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None = None


class Backend(Protocol):
    """Answers requests."""

    async def post(self, url: str, body: bytes) -> Answer:
        """Return the answer of any status. Raises EndpointError if there is none."""


class Stopped(EndpointError):
    """No further request can be answered, so the batch ends here. What is done is in the output."""

    kind = "stopped"


def open_backend(settings: BatchSettings) -> AbstractAsyncContextManager[Backend]:
    """Return a connection to the server, or a running engine. Raises ConfigError for wrong flags."""
    return _own_engine(settings) if settings.model is not None else _server(settings)


class _Server:
    def __init__(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        self._session = session
        self._endpoint = endpoint

    async def post(self, url: str, body: bytes) -> Answer:
        request = self._session.post(self._endpoint.base_url + url, data=body)
        async with translated(self._session, self._endpoint), request as response:
            return _answer(response.status, dict(response.headers), await response.read())


@asynccontextmanager
async def _server(settings: BatchSettings) -> AsyncIterator[Backend]:
    endpoint = Endpoint.resolve(settings.base_url, settings.api_key_env)
    async with open_session(endpoint, settings.timeout_s) as session:
        yield _Server(session, endpoint)


class _OfflineApi(Protocol):
    """``flyball_runtime.offline.OfflineApi``, which the clients do not import."""

    dead_reason: str | None

    async def post(self, url: str, body: bytes) -> tuple[int, dict[str, str], bytes]: ...


class _OwnEngine:
    def __init__(self, api: _OfflineApi, timeout_s: float) -> None:
        self._api = api
        self._timeout_s = timeout_s

    async def post(self, url: str, body: bytes) -> Answer:
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = _answer(*await self._api.post(url, body))
        except TimeoutError:
            raise RequestTimeout(self._timeout_s) from None
        if self._api.dead_reason is not None:
            raise Stopped(f"the engine died: {self._api.dead_reason}.")
        return answer


@asynccontextmanager
async def _own_engine(settings: BatchSettings) -> AsyncIterator[Backend]:
    try:  # by name, because the clients do without the runtime unless a command asks for an engine
        runtime = importlib.import_module("flyball_runtime.cli")
        errors = importlib.import_module("flyball_runtime.core.errors")
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    try:
        opened = runtime.open_offline_api(
            settings.model,
            settings.engine_flags,
            num_in_flight=settings.in_flight,
            max_body_bytes=settings.max_body_bytes,
        )
        async with opened as api:
            yield _OwnEngine(api, settings.timeout_s)
    except errors.ConfigError as error:
        raise ConfigError(str(error)) from None
    except errors.EngineError as error:
        raise Stopped(str(error)) from None
    except ModuleNotFoundError as error:
        raise _missing(error) from None


def _missing(error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(
        f"--model needs the Python package {error.name}, which is not installed here: pip install 'flyball[runtime]'"
    )


def _answer(status: int, headers: dict[str, str], body: bytes) -> Answer:
    named = {name.lower(): value for name, value in headers.items()}
    return Answer(status, named.get("x-request-id", ""), body, _retry_after_s(named.get("retry-after")))


def _retry_after_s(header: str | None) -> float | None:
    """Return the seconds that a Retry-After header means, a number or a date; None for anything else."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        when = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds())

"""The API and its engine without sockets, for batches: requests and answers are those of ``flyball serve``."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import httpx

from flyball_runtime.api.app import create_app
from flyball_runtime.api.metrics import MetricsCollector
from flyball_runtime.api.settings import ApiSettings
from flyball_runtime.api.text import ChatTokenizer
from flyball_runtime.core.clock import MonotonicClock
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.engine.client import EngineClient
from flyball_runtime.grammar.checker import GrammarChecker


class OfflineApi:
    """Answers requests until the engine dies."""

    def __init__(self, client: EngineClient, transport: httpx.ASGITransport) -> None:
        self._client = client
        self._transport = transport

    @property
    def dead_reason(self) -> str | None:
        """Why the engine is dead; None while it lives."""
        return self._client.dead_reason

    async def post(self, url: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the answer to a POST. Cancelling it aborts the request.

        Args:
            url: a path of the API, such as ``/v1/completions``.
        """
        headers = {"Content-Type": "application/json"}
        request = httpx.Request("POST", f"http://offline{url}", content=body, headers=headers)
        response = await self._transport.handle_async_request(request)
        return response.status_code, dict(response.headers), await response.aread()


@asynccontextmanager
async def open_api(config: EngineConfig, settings: ApiSettings, tokenizer: ChatTokenizer) -> AsyncIterator[OfflineApi]:
    """Start the engine in a process of its own, as ``flyball serve`` does, and stop it at the end.

    Raises:
        ConfigError: the model cannot be loaded, or the tokenizer is not a fast one.
        EngineError: the engine died while it loaded the model.
    """
    metrics = MetricsCollector(model_name=config.served_model_name, clock=MonotonicClock())
    with closing(GrammarChecker(Path(config.model), settings.structured_outputs_timeout_s)) as grammars:
        async with EngineClient(config, observer=metrics.measured) as client:
            app = create_app(client, tokenizer, settings, metrics, grammars=grammars)
            await client.wait_ready()
            yield OfflineApi(client, httpx.ASGITransport(app))

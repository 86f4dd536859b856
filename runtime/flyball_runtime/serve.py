"""Wires one replica together: sockets, engine process, API and admin servers, signals, drain, exit code."""

import asyncio
import contextlib
import logging
import math
import signal
import socket
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from flyball_protocol import endpoints
from flyball_runtime.api.admin import create_admin_app
from flyball_runtime.api.app import create_app, stuck_reason
from flyball_runtime.api.keys import ApiKeys
from flyball_runtime.api.metrics import MetricsCollector
from flyball_runtime.api.settings import ApiSettings
from flyball_runtime.api.text import ChatTokenizer
from flyball_runtime.core.clock import MonotonicClock
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.errors import ConfigError, EngineError
from flyball_runtime.core.memory import freeze_startup_objects, return_large_buffers
from flyball_runtime.engine.client import EngineClient
from flyball_runtime.engine.heartbeat import pause_limit
from flyball_runtime.grammar.checker import GrammarChecker
from flyball_runtime.listener.holder import send_at_once, taken_listener

logger = logging.getLogger(__name__)

SHUTDOWN_GRACE_S = 2.0
"""How long the last bytes may take to leave when there was no drain; after a drain, the rest of its time."""

DEATH_GRACE_S = 2.0
"""How long a replica whose engine died goes on answering, so that failed requests and a red /livez get out."""

WATCH_S = 1.0
"""Time between two looks at whether the engine makes progress."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The replica's face: addresses, names, drain.

    Attributes:
        listener: Unix socket of a ``flyball listener`` that has the API port; None opens ``host``:``port`` here.
        admin_token: token of the admin port; None leaves the port closed.
        api_keys: keys of the API; None serves every caller.
        drain_timeout_s: how long running requests may go on after SIGTERM.
        drain_quiet_s: after SIGTERM requests are accepted until none has come for so long; 0 refuses them at once.
    """

    host: str
    port: int
    listener: Path | None
    admin_host: str
    admin_port: int
    admin_token: str | None
    api_keys: ApiKeys | None
    api: ApiSettings
    drain_timeout_s: float
    drain_quiet_s: float


class QuietServer(uvicorn.Server):
    """A uvicorn server that leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int, flag: str) -> socket.socket:
    """Bind before the model loads, so that a taken port costs no minutes. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    send_at_once(listener)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}). Choose another {flag}, or stop the program that uses it."
        ) from None
    listener.set_inheritable(True)
    return listener


def api_listener(config: ServeConfig) -> contextlib.AbstractContextManager[socket.socket]:
    """Return the API port's socket, opened here or taken over. Raises ConfigError."""
    if config.listener is None:
        return contextlib.closing(bind(config.host, config.port, "--port"))
    return taken_listener(config.listener)


async def serve(config: ServeConfig, engine_config: EngineConfig, tokenizer: ChatTokenizer) -> int:
    """Serve until a signal or the engine's death; return the exit code of ``flyball_protocol.endpoints``."""
    with contextlib.ExitStack() as resources:
        listener = resources.enter_context(api_listener(config))
        admin_listener = None
        if config.admin_token is not None:
            admin_listener = resources.enter_context(
                contextlib.closing(bind(config.admin_host, config.admin_port, "--admin-port"))
            )
        grammars = resources.enter_context(
            contextlib.closing(GrammarChecker(Path(engine_config.model), config.api.structured_outputs_timeout_s))
        )
        metrics = MetricsCollector(model_name=engine_config.served_model_name, clock=MonotonicClock())
        async with EngineClient(engine_config, observer=metrics.measured) as client:
            replica = ServingReplica(config, client, has_chat=tokenizer.chat_template is not None)
            replica.add_server(create_app(client, tokenizer, config.api, metrics, config.api_keys, grammars), listener)
            if admin_listener is not None and config.admin_token is not None:
                admin = create_admin_app(client, metrics, config.admin_token)
                # X-Forwarded-For says nothing about who may use a bearer token.
                replica.add_server(admin, admin_listener, proxy_headers=False)
            else:
                logger.info(
                    "the admin port is closed; to open it, set %s or --admin-token-file", endpoints.ADMIN_TOKEN_ENV
                )
            if config.api_keys is None:
                logger.info(
                    "no API keys: every request is served; to need one, set %s or --api-key-file", endpoints.API_KEY_ENV
                )
            else:
                logger.info("API keys: %d", len(config.api_keys))
            return await replica.run()


class ServingReplica:
    """The life of one replica: loading, ready, draining, gone."""

    def __init__(self, config: ServeConfig, client: EngineClient, *, has_chat: bool) -> None:
        self._config = config
        self._has_chat = has_chat
        self._client = client
        self._servers: list[tuple[QuietServer, socket.socket]] = []
        self._stop_asked = asyncio.Event()
        self._kill_asked = asyncio.Event()
        self._stuck = asyncio.Event()
        self._deliver_until_s = 0.0  # on the monotonic clock; past without a drain that went well
        self._shutting_down = False

    def add_server(self, app: FastAPI, listener: socket.socket, **uvicorn_options: Any) -> None:
        # Endings are ours: by the time a server shuts down, every request has been answered or failed.
        options = self._config.api.uvicorn_options() | uvicorn_options
        settings = uvicorn.Config(app, log_config=None, lifespan="off", **options)
        self._servers.append((QuietServer(settings), listener))

    async def run(self) -> int:
        self._take_signals()
        freeze_startup_objects()  # while the engine loads
        return_large_buffers()
        servers = [asyncio.create_task(server.serve(sockets=[listener])) for server, listener in self._servers]
        watch = asyncio.create_task(self._watch())
        try:
            exit_code = await self._live()
        finally:
            watch.cancel()
            self._shut_down()
            await asyncio.gather(*servers)
        return exit_code if exit_code != endpoints.EXIT_OK else self._check_delivered()

    def _shut_down(self) -> None:
        """Close the ports, and each connection once its answer is out."""
        left_s = max(SHUTDOWN_GRACE_S, self._deliver_until_s - time.monotonic())
        for server, _ in self._servers:
            server.config.timeout_graceful_shutdown = math.ceil(left_s)
            server.should_exit = True
        self._shutting_down = True

    def _check_delivered(self) -> int:
        """The exit code by whether readers took all of their answers."""
        if not (num_cut := sum(len(server.server_state.connections) for server, _ in self._servers)):
            return endpoints.EXIT_OK
        logger.error("%d connections were closed before their clients had read the whole answer", num_cut)
        return endpoints.EXIT_DRAIN_TIMEOUT

    async def _live(self) -> int:
        if not await self._load():
            return endpoints.EXIT_OK
        await self._first_of(self._client.died.wait(), self._stop_asked.wait())
        if not self._client.died.is_set():
            return await self._drain()
        logger.critical("the engine died: %s", self._client.dead_reason)
        await asyncio.sleep(DEATH_GRACE_S)
        return endpoints.EXIT_ENGINE_DIED

    async def _watch(self) -> None:
        """Know when the engine is stuck, and have the log say where. Ends with the engine's death: nobody is there to ask."""
        while not self._client.died.is_set():
            reason = stuck_reason(self._client, self._config.api.max_heartbeat_age_s)
            if reason is not None and not self._stuck.is_set():
                logger.error("%s; what its threads are doing follows", reason)
                self._client.log_stacks()
                self._stuck.set()
            elif reason is None and self._stuck.is_set():
                logger.warning("the engine makes progress again")
                self._stuck.clear()
            await asyncio.sleep(WATCH_S)

    async def _load(self) -> bool:
        """Wait for the model; False when told to stop meanwhile. Raises ConfigError or EngineError."""
        loading = asyncio.create_task(self._client.wait_ready())
        await self._first_of(asyncio.shield(loading), self._stop_asked.wait())
        if not loading.done():
            loading.cancel()
            logger.info("stopped by a signal while the model was loading; no request was accepted yet")
            return False
        info = await loading
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in info.startup_s.items())
        logger.info(
            "ready: %s, %.1fM parameters, %s on %s, kernels %s, attention %s, %d KV blocks of %d tokens in %s; seconds: %s",
            *(info.model, info.num_parameters / 1e6, info.dtype, info.device),
            *(info.kernel_backend, info.attention_backend),
            *(info.num_kv_blocks, info.block_size, info.kv_dtype, stages),
        )
        limit = pause_limit(self._config.api.max_heartbeat_age_s, info.longest_pause_s)
        logger.info(
            "the longest pause within a step is about %.3g s on this machine; /livez fails after %.4g s without progress (%s)",
            *(info.longest_pause_s, limit.seconds, limit.source),
        )
        for _, listener in self._servers:
            logger.info("listening on http://%s:%d", *listener.getsockname()[:2])
        logger.info("try it: %s", self._first_request())
        return True

    def _first_request(self) -> str:
        url = endpoints.base_url(*self._servers[0][1].getsockname()[:2])
        names, needs_key = self._config.api.served_model_names, self._config.api_keys is not None
        return endpoints.curl_line(url, names[0], chat=self._has_chat, needs_key=needs_key)

    async def _drain(self) -> int:
        deadline_s = time.monotonic() + self._config.drain_timeout_s
        await self._first_of(self._wait_quiet(), *self._what_ends_a_drain())
        self._client.start_drain()
        deadline = asyncio.sleep(deadline_s - time.monotonic())
        await self._first_of(self._client.wait_drained(), deadline, *self._what_ends_a_drain())
        if self._client.died.is_set():
            return endpoints.EXIT_ENGINE_DIED
        if left := self._client.num_unfinished:
            logger.error("%s ended the drain; %d unfinished requests get an error", self._why_a_drain_ended(), left)
            self._client.fail_unfinished("this replica was stopped before the request was finished")
            return endpoints.EXIT_ENGINE_DIED if self._stuck.is_set() else endpoints.EXIT_DRAIN_TIMEOUT
        logger.info("drained: every accepted request was finished")
        self._deliver_until_s = deadline_s
        return endpoints.EXIT_OK

    def _what_ends_a_drain(self) -> list[Coroutine[None, None, bool]]:
        return [event.wait() for event in (self._kill_asked, self._client.died, self._stuck)]

    def _why_a_drain_ended(self) -> str:
        if self._kill_asked.is_set():
            return "a second signal"
        return "a stuck engine" if self._stuck.is_set() else f"--drain-timeout {self._config.drain_timeout_s:g} s"

    async def _wait_quiet(self) -> None:
        """Accept what load balancers that are behind still send here, until nothing comes; at most for half of the drain.

        Connections end with their next answer, so that clients which keep them open go elsewhere.
        """
        self._client.announce_drain()
        for server, _ in self._servers:
            server.config.encoded_headers.append((b"connection", b"close"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_timeout_s / 2):
                while (left_s := self._config.drain_quiet_s - self._client.seconds_since_request()) > 0:
                    await asyncio.sleep(left_s)

    def _take_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._stop_asked.is_set():
            self._kill_asked.set()
        if self._shutting_down:
            for server, _ in self._servers:
                server.force_exit = True
        self._stop_asked.set()

    @staticmethod
    async def _first_of(*awaitables) -> None:  # type: ignore[no-untyped-def]
        tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()


def run_replica(config: ServeConfig, engine_config: EngineConfig, tokenizer: ChatTokenizer) -> int:
    """Blocking form of ``serve``; turns a death while loading into its exit code."""
    try:
        return asyncio.run(serve(config, engine_config, tokenizer))
    except EngineError as error:
        logger.critical("%s", error)
        return endpoints.EXIT_ENGINE_DIED

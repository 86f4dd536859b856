"""What the operator shows of itself: metrics and health, on a port of its own."""

import time
from collections.abc import Callable, Hashable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from flyball_operator.cluster.tuner_metrics import TunerMetrics
from flyball_operator.errors import OperatorError

RECONCILE_BUCKETS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

STUCK_AFTER_S = 300.0
"""Far above what a slow API server makes of a reconcile: each of its few calls ends after 15 s."""


class Metrics:
    """One set of metrics in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.queue_depth = Gauge(
            "flyball_operator_queue_depth",
            "LLMDeployments that wait to be reconciled, those that wait for a retry not counted.",
            registry=self.registry,
        )
        self.queue_retries = Gauge(
            "flyball_operator_queue_retries",
            "LLMDeployments that wait for a retry after a failure. Those that are refused are not counted.",
            registry=self.registry,
        )
        self.refused = Gauge(
            "flyball_operator_refused",
            "LLMDeployments whose condition Accepted is False: a user has to change something.",
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "flyball_operator_reconcile_seconds",
            "Time of one reconcile, from the start to the last write.",
            buckets=RECONCILE_BUCKETS_S,
            registry=self.registry,
        )
        self.reconcile_errors = Counter(
            "flyball_operator_reconcile_errors_total",
            "Reconciles that failed and will be tried again, by kind of error.",
            ["error"],
            registry=self.registry,
        )
        self.api_calls = Counter(
            "flyball_operator_api_calls_total",
            "Calls to the API server, the watches among them. code is the HTTP status, or error where none came.",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self.resources = Gauge(
            "flyball_operator_llmdeployments", "LLMDeployments that this operator sees.", registry=self.registry
        )
        self.leader = Gauge(
            "flyball_operator_leader",
            "1 while this process holds the lease (or needs none) and acts, else 0.",
            registry=self.registry,
        )
        self.tuner = TunerMetrics(self.registry)


class Health:
    """What the probes are told. Alive: the loop turns, and no reconcile has been at it for ``STUCK_AFTER_S``.

    An API server that is down is no reason to be restarted, so it does not count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.waiting_for: str | None = "start-up"
        self._clock = clock
        self._since: dict[Hashable, float] = {}

    def started(self, work: Hashable) -> None:
        self._since[work] = self._clock()

    def ended(self, work: Hashable) -> None:
        self._since.pop(work, None)

    @property
    def stuck(self) -> str | None:
        """What has been worked on for too long, None when nothing has."""
        late = [f"{work}" for work, since in self._since.items() if self._clock() - since > STUCK_AFTER_S]
        return f"no end of {', '.join(late)} after {STUCK_AFTER_S:g} s" if late else None


class HealthServer:
    """Serves ``health`` and ``metrics`` on a port."""

    def __init__(self, health: Health, metrics: Metrics, host: str, port: int) -> None:
        self._health = health
        self._metrics = metrics
        self._host, self._port = host, port
        app = web.Application()
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._show_metrics)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> None:
        """Raises OperatorError when the port is taken."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            raise OperatorError(
                f"cannot listen on {self._host} port {self._port}: {error.strerror}; give another --metrics-port"
            ) from error

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _livez(self, _: web.Request) -> web.Response:
        return _answer(self._health.stuck)

    async def _readyz(self, _: web.Request) -> web.Response:
        return _answer(self._health.stuck or self._health.waiting_for)

    async def _show_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _answer(problem: str | None) -> web.Response:
    return web.Response(status=503 if problem else 200, text=f"{problem or 'ok'}\n")

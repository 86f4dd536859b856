"""The operator's process: what it is made of, and the order in which it starts."""

import asyncio
import itertools
import logging
import math
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import aiohttp

from flyball_operator.children import Platform
from flyball_operator.cluster.admin_token import AdminTokens, load_key
from flyball_operator.cluster.api_server import (
    BUILT_IN_CHILDREN,
    LLM_DEPLOYMENT,
    OPTIONAL_CHILDREN,
    POD,
    POD_MONITOR,
    SCALED_OBJECT,
    ClusterError,
    Forbidden,
    Invalid,
    Kind,
    NotFound,
    TooManyRequests,
)
from flyball_operator.cluster.client import Client, is_allowed, rights_to_watch
from flyball_operator.cluster.connection import Connection
from flyball_operator.cluster.election import LEASE_NAME, Election, LeaseLost, Terms
from flyball_operator.cluster.events import Recorder
from flyball_operator.cluster.monitoring import Health, HealthServer, Metrics
from flyball_operator.cluster.reconciler import Outcome, Reconciler
from flyball_operator.cluster.store import Intake, Store, read_all
from flyball_operator.cluster.tuner import ClusterTuner
from flyball_operator.cluster.watches import WatchFailed, first_of, watch
from flyball_operator.cluster.work_queue import Backoff, WorkQueue
from flyball_operator.observed import Key

log = logging.getLogger(__name__)

T = TypeVar("T")

WAIT_S = 2.0
"""Between two looks for something that has to be there before the start: the CRD, a right."""

ALL_KINDS = (LLM_DEPLOYMENT, POD, *BUILT_IN_CHILDREN, *OPTIONAL_CHILDREN)

UNREACHABLE = Backoff(first_s=0.1, most_s=10.0)
REFUSED = Backoff(first_s=1.0, most_s=120.0)
"""The first is for what passes by itself, the second for what somebody has to change."""


@dataclass(frozen=True, kw_only=True)
class OperatorOptions:
    """How to run.

    Attributes:
        namespaces: those to serve; empty: all.
        own_namespace: where the lease and the key of the admin tokens are.
        identity: names this process in the lease.
        lease: None acts without one, for a single process.
        lease_name: operators with the same name and ``own_namespace`` take turns.
        resync_s: how often everything is listed again, beside the watches.
        platform_s: how often to look whether KEDA or the Prometheus operator has come or gone.
    """

    namespaces: tuple[str, ...]
    own_namespace: str
    identity: str
    runtime_image: str
    host: str = "0.0.0.0"
    metrics_port: int = 8080
    lease: Terms | None = field(default_factory=Terms)
    lease_name: str = LEASE_NAME
    workers: int = 16
    resync_s: float = 300.0
    platform_s: float = 60.0

    @property
    def scopes(self) -> list[str | None]:
        """The namespaces as API calls want them: None is all."""
        return [*self.namespaces] or [None]


class Operator:
    """``run()`` serves until SIGTERM, and raises what makes going on pointless."""

    def __init__(self, connection: Connection, metrics: Metrics, options: OperatorOptions) -> None:
        self._connection = connection
        self._metrics = metrics
        self._options = options
        self._election = self._find_election()
        self._client = Client(connection, time_to_write=self._time_to_write)
        self._store = Store()
        self._queue: WorkQueue[Key] = WorkQueue(UNREACHABLE)
        self._intake = Intake(self._store, self._queue.add)
        self._events = Recorder(self._client, options.identity)
        self._health = Health()
        self._platform = self._platform_with(keda=False, pod_monitor=False)
        self._platform_changed = asyncio.Event()
        self._signal = asyncio.Event()
        metrics.queue_depth.set_function(lambda: self._queue.num_due)
        metrics.queue_retries.set_function(lambda: self._queue.num_failing)
        metrics.refused.set_function(lambda: sum(one.is_refused for one in self._store.resources.values()))
        metrics.resources.set_function(lambda: len(self._store.resources))

    async def run(self) -> None:
        """Raises OperatorError: the port is taken, the lease was lost, or a part ended that should not."""
        server = HealthServer(self._health, self._metrics, self._options.host, self._options.metrics_port)
        await server.start()
        try:
            self._catch_signals()
            await first_of(self._lead(), self._signalled())
        finally:
            await server.close()
            await self._connection.close()

    def _catch_signals(self) -> None:
        """Make SIGTERM and SIGINT end the operator. Each Kopf puts handlers of its own in the place of these."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signal.set)

    async def _signalled(self) -> None:
        await self._signal.wait()

    async def _lead(self) -> None:
        election = self._election
        if election is None:
            await self._act()
            return
        self._health.waiting_for = None  # a process that stands by is ready to
        try:
            await election.acquire()
            await first_of(election.hold(), self._act())
        finally:
            self._metrics.leader.set(0)
            await _quietly(election.release())

    def _find_election(self) -> Election | None:
        options = self._options
        if options.lease is None:
            return None
        client = Client(self._connection)
        return Election(client, options.own_namespace, options.identity, options.lease, options.lease_name)

    def _time_to_write(self) -> float:
        """Return for how many seconds this process may write. Raises LeaseLost when another may lead."""
        return math.inf if self._election is None else self._election.time_to_write()

    async def _while_leading(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Ask and tell replicas only while this process leads."""
        try:
            self._time_to_write()
        except LeaseLost as error:
            raise aiohttp.ClientConnectionError(str(error)) from error
        return await handler(request)

    async def _act(self) -> None:
        self._metrics.leader.set(1)
        await self._wait_for_kind(LLM_DEPLOYMENT)
        await self._insist(self._look_at_platform)
        kinds = self._kinds()
        await self._wait_for_rights(kinds)
        key = await self._insist(lambda: load_key(self._client, self._options.own_namespace))
        # Lists before watches: a reconcile that has not seen all children would look for each by itself.
        for kind, namespace in itertools.product(kinds, self._options.scopes):
            await self._insist(partial(self._list, kind, namespace))
        self._health.waiting_for = None
        # Each round asks on new connections: a pod may have closed the last round's meanwhile.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, middlewares=(self._while_leading,)) as to_pods:
            await self._serve(AdminTokens(key), to_pods)

    async def _list(self, kind: Kind, namespace: str | None) -> None:
        """List a kind for the first time; an optional one may be gone since the platform was looked at."""
        try:
            await read_all(self._client, self._intake, kind, namespace)
        except NotFound:
            if kind not in OPTIONAL_CHILDREN:
                raise

    async def _serve(self, tokens: AdminTokens, to_pods: aiohttp.ClientSession) -> None:
        tuner = ClusterTuner(
            self._store,
            token_of=tokens.token,
            session=to_pods,
            metrics=self._metrics.tuner,
            changed=self._queue.add,
            event=self._events,
        )
        reconciler = Reconciler(
            store=self._store,
            client=self._client,
            tokens=tokens,
            platform=lambda: self._platform,
            tuner=tuner,
            event=self._events,
        )
        workers = [self._work(reconciler) for _ in range(self._options.workers)]
        watches = [self._keep_watching(*what) for what in itertools.product(ALL_KINDS, self._options.scopes)]
        others = (self._events.run(), tuner.run(), self._resync(), self._watch_platform())
        await first_of(*workers, *watches, *others)

    async def _keep_watching(self, kind: Kind, namespace: str | None) -> None:
        """Watch a kind in a scope: again after each failure, and not while the cluster lacks the kind."""
        num_failures, what = 0, f"the watch of {kind.resource} in {namespace or 'all namespaces'}"
        while True:
            started_s = time.monotonic()
            try:
                await self._until_served(kind, again=num_failures > 0)
                await watch(
                    self._connection,
                    self._intake,
                    kind,
                    namespace,
                    started=self._catch_signals,
                    catch_up=partial(read_all, self._client, self._intake, kind, namespace),
                )
            except (WatchFailed, ClusterError) as error:
                ran_well = time.monotonic() - started_s > UNREACHABLE.most_s
                num_failures = 1 if ran_well else num_failures + 1
                delay_s = UNREACHABLE.after(num_failures)
                log.warning("%s ended, again in %.1f s: %s", what, delay_s, error)
                await asyncio.sleep(delay_s)

    async def _until_served(self, kind: Kind, *, again: bool) -> None:
        """Wait until the cluster has the kind.

        Args:
            again: it was watched before, so the cluster may have lost it.
        """
        if kind == LLM_DEPLOYMENT:
            await self._wait_for_kind(kind)
            self._health.waiting_for = None
        elif kind in OPTIONAL_CHILDREN and again:
            await self._look_at_platform()
        while kind not in self._kinds():
            self._platform_changed.clear()
            await self._platform_changed.wait()

    async def _work(self, reconciler: Reconciler) -> None:
        while True:
            key = await self._queue.get()
            self._health.started(key)
            try:
                with self._metrics.reconcile_seconds.time():
                    outcome = await reconciler.reconcile(key)
            except LeaseLost:
                raise
            except (Invalid, Forbidden) as error:
                self._retry(key, error, REFUSED)
            except ClusterError as error:
                self._retry(key, error, UNREACHABLE)
            except Exception as error:
                log.exception("%s: a bug in the operator", key)
                self._retry(key, error, REFUSED)
            else:
                if outcome is Outcome.DONE:
                    self._queue.done(key)
                else:
                    self._queue.failed(key, backoff=REFUSED, expected=outcome is Outcome.REFUSED)
            finally:
                self._health.ended(key)

    def _retry(self, key: Key, error: Exception, backoff: Backoff) -> None:
        self._metrics.reconcile_errors.labels(type(error).__name__).inc()
        at_least_s = error.retry_after_s if isinstance(error, TooManyRequests) else 0.0
        delay_s = self._queue.failed(key, backoff=backoff, at_least_s=at_least_s)
        log.warning("%s: again in %.1f s: %s", key, delay_s, error)

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(self._options.resync_s)
            for kind, namespace in itertools.product(self._kinds(), self._options.scopes):
                try:
                    await read_all(self._client, self._intake, kind, namespace)
                except ClusterError as error:
                    log.warning("the periodic list failed: %s", error)

    async def _watch_platform(self) -> None:
        while True:
            await asyncio.sleep(self._options.platform_s)
            try:
                await self._look_at_platform()
            except ClusterError as error:
                log.warning("what the cluster offers cannot be looked up: %s", error)

    async def _look_at_platform(self) -> None:
        """Find out which optional kinds there are."""
        keda, pod_monitor = await self._client.serves(SCALED_OBJECT), await self._client.serves(POD_MONITOR)
        found = self._platform_with(keda=keda, pod_monitor=pod_monitor)
        if found != self._platform:
            log.info("KEDA: %s, PodMonitor: %s", *("yes" if one else "no" for one in (found.keda, found.pod_monitor)))
            self._platform = found
            self._platform_changed.set()
            for kind in OPTIONAL_CHILDREN:
                if kind not in self._kinds():
                    self._intake.forget(kind)
            for key in self._store.resources:
                self._queue.add(key)

    def _platform_with(self, *, keda: bool, pod_monitor: bool) -> Platform:
        return Platform(
            runtime_image=self._options.runtime_image,
            operator_namespace=self._options.own_namespace,
            keda=keda,
            pod_monitor=pod_monitor,
        )

    def _kinds(self) -> list[Kind]:
        has = {SCALED_OBJECT: self._platform.keda, POD_MONITOR: self._platform.pod_monitor}
        return [LLM_DEPLOYMENT, POD, *BUILT_IN_CHILDREN, *(kind for kind in OPTIONAL_CHILDREN if has[kind])]

    async def _wait_for_kind(self, kind: Kind) -> None:
        while not await self._insist(lambda: self._client.serves(kind)):
            remedy = "set crds.install in the chart, or apply what `flyball crd` prints"
            self._wait_for(f"the CustomResourceDefinition {kind.resource}; {remedy}")
            await asyncio.sleep(WAIT_S)

    async def _wait_for_rights(self, kinds: Sequence[Kind]) -> None:
        missing = rights_to_watch(kinds, self._options.scopes)
        while missing := [one for one in missing if not await self._insist(partial(is_allowed, self._client, one))]:
            self._wait_for(f"rights that the operator's role lacks: {', '.join(map(str, missing))}")
            await asyncio.sleep(WAIT_S)

    async def _insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return what ``call`` returns, as soon as the API server answers."""
        num_failures = 0
        while True:
            try:
                return await call()
            except ClusterError as error:
                num_failures += 1
                self._wait_for(f"an answer: {error}")
                await asyncio.sleep(UNREACHABLE.after(num_failures))

    def _wait_for(self, what: str) -> None:
        if self._health.waiting_for != what:
            log.warning("waiting for %s", what)
        self._health.waiting_for = what


async def _quietly(call: Awaitable[None]) -> None:
    try:
        await call
    except ClusterError as error:
        log.debug("on the way out: %s", error)

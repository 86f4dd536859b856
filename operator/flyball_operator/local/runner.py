"""LocalRunner: brings this machine to what an LLMDeployment says, and keeps it there."""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import aiohttp

from flyball_operator.errors import LocalError, OperatorError, SpecError
from flyball_operator.local.balancer import Balancer
from flyball_operator.local.changes import WatchedFile, describe_changes
from flyball_operator.local.control import ControlServer, Handover, HandoverAnswer, InstanceFolder
from flyball_operator.local.fleet import AcceleratorPool, Fleet, NumaNodes, numa_nodes, visible_devices
from flyball_operator.local.local_tuner import LocalTuner
from flyball_operator.local.replica import CrashBackoff, Replica
from flyball_operator.local.reports import Event, Events, follow_logs, to_log
from flyball_operator.local.snapshot import ReplicaSnapshot, Snapshot
from flyball_operator.local.template import LOOPBACK, local_deployment, process_template
from flyball_operator.observed import Object
from flyball_operator.spec import LLMDeployment, manifest
from flyball_operator.tuning.admin import AdminClient
from flyball_protocol import endpoints
from flyball_protocol.endpoints import API_PORT
from flyball_protocol.quoting import one_line, quoted

log = logging.getLogger(__name__)

NOTHING_TO_CHANGE = "nothing to change"


@dataclass(frozen=True)
class LocalOptions:
    """How to run on this machine.

    Attributes:
        executable: takes the place of the image's ``flyball``.
        host, port: the balanced address; port 0 takes a free one.
        log_dir: for the replicas' logs and ``decisions.jsonl``.
        evidence_period_s: how often snapshots get new evidence; None: only when the slow loop reads it.
        watch_period_s: how often to look at the manifest's file.
        echo: is given the replicas' log lines, each with the name of its file.
        build: makes the Deployment that is run.
    """

    executable: tuple[str, ...]
    log_dir: Path
    host: str = LOOPBACK
    port: int = API_PORT
    evidence_period_s: float | None = None
    watch_period_s: float = 0.5
    echo: Callable[[str, str], None] | None = None
    build: Callable[[LLMDeployment], Object] = local_deployment
    backoff: Callable[[], CrashBackoff] = CrashBackoff
    accelerators: tuple[str, ...] = field(default_factory=visible_devices)
    numa_nodes: tuple[int, ...] = field(default_factory=numa_nodes)


class LocalRunner:
    """Runs one LLMDeployment: ``start()``, then ``drain()``, or ``async with``. ``snapshot()`` may be asked in between.

    The manifest's file is watched. A change that cannot be taken changes nothing and is reported, once.
    """

    def __init__(
        self,
        deployment: LLMDeployment,
        source: Path,
        folder: InstanceFolder,
        options: LocalOptions,
        on_event: Callable[[Event], None] = to_log,
    ) -> None:
        """Raises LocalError when this machine cannot run ``deployment``."""
        self._deployment = deployment
        self._options = options
        self._template = process_template(options.build(deployment), options.executable)
        self._file = WatchedFile(source)
        self._report = Events(on_event)
        self._control = ControlServer(folder, self._take_handover, self.snapshot)
        self._balancer = Balancer(lambda: self._fleet.replicas, lambda: self._stopping)
        self._stopping = False
        self._reload = asyncio.Event()
        self._taking = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain()

    async def start(self) -> None:
        """Take the port, then start the replicas. Raises LocalError when the port is taken."""
        options, spec = self._options, self._deployment.spec
        listener = listen(options.host, options.port)
        self._url = f"http://{options.host}:{listener.getsockname()[1]}"
        options.log_dir.mkdir(parents=True, exist_ok=True)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        token = secrets.token_urlsafe(32)
        self._fleet = Fleet(
            self._template,
            spec.replicas,
            token=token,
            log_dir=options.log_dir,
            session=self._session,
            accelerators=AcceleratorPool(options.accelerators),
            nodes=NumaNodes(options.numa_nodes),
            backoff=options.backoff,
            report=self._report,
        )
        self._tuner = LocalTuner(
            self._deployment.name,
            spec.tuning,
            self._fleet,
            AdminClient(self._session, token),
            record_path=options.log_dir / "decisions.jsonl",
            evidence_period_s=options.evidence_period_s,
            report=self._report,
        )
        await self._balancer.start(listener)
        await self._control.start()
        self._report(
            f"{self._deployment.name} at {self._url}: starting {spec.replicas} replicas (logs: {options.log_dir})"
        )
        self._fleet.start()
        self._tasks = [asyncio.create_task(self._tuner.run()), asyncio.create_task(self._watch_file())]
        if options.echo is not None:
            self._tasks.append(asyncio.create_task(follow_logs(options.log_dir, options.echo, self._report)))

    async def drain(self) -> bool:
        """Refuse new requests, let running ones finish, end everything. Returns whether nothing had to be killed."""
        if not self._stopping:
            self._stopping = True
            await self._end()
        return self._fleet.num_killed == 0

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._control.close()
        await self._fleet.drain()
        await self._balancer.close()
        await self._session.close()

    def kill(self) -> None:
        """End the replicas now; a ``drain()`` that is under way then ends too."""
        self._fleet.kill()

    async def failed(self) -> None:
        """Return only when a background task has ended, which none should; raises what ended it."""
        for task in asyncio.as_completed(self._tasks):
            await task

    def reload(self) -> None:
        """Have the manifest's file read again, changed or not."""
        self._reload.set()

    def apply(self, deployment: LLMDeployment) -> list[str]:
        """Bring the machine to ``deployment`` from now on; returns the plan in words.

        Raises:
            LocalError: this machine cannot run it, it is another deployment, or the instance is stopping. What runs goes on.
        """
        if self._stopping:
            raise LocalError("the instance is stopping; start another one with this manifest when it has ended")
        if deployment.name != self._deployment.name:
            raise LocalError(
                f"metadata.name changed from {self._deployment.name} to {deployment.name}, which is another deployment; "
                "start a second flyball local for it"
            )
        template = process_template(self._options.build(deployment), self._options.executable)
        plan = describe_changes(self._deployment, deployment, self._template, template)
        self._deployment, self._template = deployment, template
        self._fleet.want(template, deployment.spec.replicas)
        self._tuner.tune(deployment.spec.tuning)
        for line in plan:
            self._report(line)
        return plan or [NOTHING_TO_CHANGE]

    async def _take(self, parse: Callable[[], list[LLMDeployment]]) -> tuple[list[str], str]:
        """Apply a manifest; returns the plan, or why nothing was changed. No manifest ends what runs.

        Parsing takes up to two seconds, in a thread, so that the balancer goes on. The caller holds the lock ``_taking``.
        """
        try:
            deployments = await asyncio.to_thread(parse)
            return self.apply(select(deployments, self._deployment.name)), ""
        except OperatorError as error:
            return [], str(error)
        except Exception as error:
            log.exception("a manifest could not be handled")
            return [], f"{type(error).__name__}, a fault of flyball-operator; its log has the traceback"

    def snapshot(self) -> Snapshot:
        """Return how things stand."""
        return Snapshot(
            name=self._deployment.name,
            url=self._url,
            model=self._deployment.spec.model.uri,
            wanted=self._deployment.spec.replicas,
            replicas=tuple(self._snapshot_of(replica) for replica in self._fleet.replicas),
            decision=self._tuner.decision,
            events=self._report.kept,
        )

    def first_request(self) -> str:
        """Return a shell command that chats with the balanced address.

        Whether the model has a chat template is not known here; without one, the answer is an error that says what to use.
        """
        url = endpoints.base_url(self._options.host, int(self._url.rpartition(":")[2]))
        needs_key = endpoints.API_KEY_ENV in os.environ
        return endpoints.curl_line(url, self._deployment.served_name, chat=True, needs_key=needs_key)

    @property
    def url(self) -> str:
        """The balanced address."""
        return self._url

    def _snapshot_of(self, replica: Replica) -> ReplicaSnapshot:
        return ReplicaSnapshot(
            number=replica.number,
            state=replica.state,
            in_state_s=time.monotonic() - replica.since,
            message=replica.message,
            pid=replica.pid,
            port=replica.port,
            outstanding=replica.outstanding,
            served=replica.served,
            restarts=replica.restarts,
            current=replica.template.digest == self._template.digest,
            evidence=self._tuner.evidence.get(replica.name),
        )

    async def _watch_file(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.watch_period_s):
                    await self._reload.wait()
            async with self._taking:
                if self._reload.is_set():
                    self._reload.clear()
                    await self._read_again()
                elif self._file.changed():
                    await self._apply_file()

    async def _read_again(self) -> None:
        try:
            self._file.read()
        except OSError as error:
            self._report(f"{self._file.path} cannot be read, what runs goes on: {one_line(str(error))}")
        else:
            await self._apply_file()

    async def _apply_file(self) -> None:
        """Apply the file's content. What is wrong with it is reported, and what runs goes on."""
        plan, problem = await self._take(lambda: manifest.parse_content(self._file.content, self._file.path))
        if problem:
            self._report(f"{self._file.path} is not taken, what runs goes on: {problem}")
        elif plan == [NOTHING_TO_CHANGE]:
            self._report(f"{self._file.path} was read again: {NOTHING_TO_CHANGE}")

    async def _take_handover(self, handover: Handover) -> HandoverAnswer:
        source = Path(handover.source)
        async with self._taking:
            plan, problem = await self._take(
                lambda: manifest.parse(handover.manifest, source=handover.source, base=source.parent)
            )
            if problem:
                return HandoverAnswer(error=problem, url=self._url)
            self._file = WatchedFile(source, handover.manifest.encode())
        return HandoverAnswer(plan=tuple(plan), url=self._url)


def select(deployments: list[LLMDeployment], name: str | None) -> LLMDeployment:
    """Return the deployment called ``name``, or the only one.

    Raises:
        SpecError: none has that name, or there are several and no name was given.
    """
    known = ", ".join(deployment.name for deployment in deployments)
    if name is None and len(deployments) > 1:
        raise SpecError("manifest", [f"holds {len(deployments)} deployments ({known}); choose one with --name"])
    chosen = [deployment for deployment in deployments if name in (None, deployment.name)]
    if not chosen:
        raise SpecError("manifest", [f"holds no deployment named {quoted(name)}, only {known}"])
    return chosen[0]


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises LocalError when the address is taken or not ours."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise LocalError(
            f"cannot listen on {host} port {port}: {error.strerror}; stop what uses it or give another --port"
        ) from error
    listener.setblocking(False)
    return listener

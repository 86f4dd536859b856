"""One replica: a process that is probed, restarted with backoff, and drained at the end."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path

import aiohttp

from flyball_operator.local.process import Prober, Process, explain_exit
from flyball_operator.local.template import LOOPBACK, ProcessTemplate
from flyball_protocol.quoting import one_line

log = logging.getLogger(__name__)


class CrashBackoff:
    """Seconds to wait before the next start: ``first_s``, doubling with each crash up to ``most_s``."""

    def __init__(self, first_s: float = 1.0, most_s: float = 60.0, stable_s: float = 60.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._stable_s = stable_s
        self._crashes = 0

    def after_crash(self, ran_s: float) -> float:
        """Return the wait after a run of ``ran_s`` seconds; a run of ``stable_s`` starts the count afresh."""
        self._crashes = 1 if ran_s >= self._stable_s else self._crashes + 1
        return float(min(self._most_s, self._first_s * 2 ** min(self._crashes - 1, 30)))


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    UNREADY = "unready"
    BACKOFF = "backoff"
    DRAINING = "draining"
    STOPPED = "stopped"


class Replica:
    """Runs from ``start()`` until ``stop()`` or ``kill()``, through as many processes as that takes.

    Attributes:
        number: counts up over the life of the runner.
        state, since: where it is, and since when on the monotonic clock.
        message: what happened last, for people.
        port, admin_port: loopback ports of the present process; new ones for each process.
        outstanding, served: requests in flight through the balancer, and ever sent here; each choice is one.
        exit_code: of the last process that ended.
        killed: whether a process had to be killed at the end of its grace period.
    """

    def __init__(
        self,
        number: int,
        template: ProcessTemplate,
        env: Mapping[str, str],
        log_path: Path,
        session: aiohttp.ClientSession,
        *,
        on_change: Callable[[], None],
        report: Callable[[str], None],
        backoff: CrashBackoff,
    ) -> None:
        self.number = number
        self.template = template
        self.log_path = log_path
        self.state = State.STARTING
        self.since = time.monotonic()
        self.message = ""
        self.port = self.admin_port = 0
        self.outstanding = self.served = self.restarts = 0
        self.exit_code: int | None = None
        self.killed = False
        self._env = env
        self._session = session
        self._on_change = on_change
        self._report = report
        self._backoff = backoff
        self._stopping = asyncio.Event()
        self._process: Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return f"replica {self.number}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://{LOOPBACK}:{self.admin_port}"

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    @property
    def leaving(self) -> bool:
        return self._stopping.is_set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self.name)

    def stop(self) -> None:
        """Begin to drain; ``join()`` waits for the end. Safe to call again."""
        if not self.leaving:
            self._set(State.DRAINING, f"{self.outstanding} requests running")
            self._stopping.set()

    def kill(self) -> None:
        """End the process now."""
        self.stop()
        if self._process is not None:
            self._process.kill()

    async def join(self) -> None:
        if self._task is not None:
            await self._task

    @contextlib.contextmanager
    def serving(self, num_choices: int = 1) -> Iterator[None]:
        """Count a request's choices as outstanding while it runs."""
        self.outstanding += num_choices
        self.served += num_choices
        try:
            yield
        finally:
            self.outstanding -= num_choices

    async def _run(self) -> None:
        while not self.leaving:
            started = time.monotonic()
            problem = await self._guarded()
            if self.leaving:
                break
            wait_s = self._backoff.after_crash(time.monotonic() - started)
            self.restarts += 1
            self._set(State.BACKOFF, problem)
            self._report(f"{self.name} {problem}; restart {self.restarts} in {wait_s:g} s (log: {self.log_path})")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._stopping.wait()
        self._set(State.STOPPED, self.message)

    async def _guarded(self) -> str:
        """Run a process to its end. A fault of ours counts as a crash: the replica is started again, the others serve on."""
        try:
            return await self._one_process()
        except Exception:
            log.exception("%s failed in the operator", self.name)
            return "failed in the operator, whose log has the traceback"

    async def _one_process(self) -> str:
        """Run a process to its end, and return what that end was."""
        try:
            self.port, self.admin_port = _free_ports(2)
            self._set(State.STARTING, f"port {self.port}")
            process = await Process.start(self.template.argv_for(self.port, self.admin_port), self._env, self.log_path)
        except (OSError, ValueError) as error:  # ValueError: an argument or a variable that no process can have
            return f"cannot be started: {one_line(str(error))}"
        self._process = process
        exited = asyncio.create_task(process.wait())
        probing = asyncio.create_task(self._probe())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({exited, probing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                probing.cancel()
                return await self._drain(process, exited)
            if exited.done():
                return self._unasked_exit(process, exited.result())
            return await self._end_stuck(process, exited, *probing.result())
        finally:
            for task in (probing, stopping):
                task.cancel()
            process.kill()
            self.exit_code = await exited
            self._process = None

    async def _probe(self) -> tuple[str, float]:
        """Follow the probes; return why the process must be ended, and the grace that it gets."""
        template, prober = self.template, Prober(self._session, self.url)
        grace_s = template.startup.grace_s if template.startup.grace_s is not None else template.grace_s
        started = time.monotonic()
        problem = await prober.until_success(template.startup)
        if problem is not None:
            return f"did not start: {problem}", grace_s
        self._set(State.READY, f"ready in {time.monotonic() - started:.1f} s")
        self._report(f"{self.name} {self.message}, port {self.port}")
        following = asyncio.create_task(self._follow_readiness(prober))
        try:
            problem = await prober.until_failure(template.liveness)
        finally:
            following.cancel()
        grace_s = template.liveness.grace_s if template.liveness.grace_s is not None else template.grace_s
        return f"is stuck: {problem}", grace_s

    async def _follow_readiness(self, prober: Prober) -> None:
        while True:
            problem = await prober.until_failure(self.template.readiness)
            self._set(State.UNREADY, problem)
            self._report(f"{self.name} takes no more requests: {problem}")
            while await prober.ask(self.template.readiness) is not None:
                await asyncio.sleep(self.template.readiness.period_s)
            self._set(State.READY, "ready again")
            self._report(f"{self.name} is ready again")

    async def _drain(self, process: Process, exited: "asyncio.Task[int]") -> str:
        started = time.monotonic()
        self.killed = await process.stop(self.template.grace_s)
        took_s = time.monotonic() - started
        how = "was killed at the end of its grace period" if self.killed else "drained and stopped"
        self.message = f"{how} after {took_s:.1f} s: {explain_exit(await exited)}"
        self._report(f"{self.name} {self.message}")
        return self.message

    async def _end_stuck(self, process: Process, exited: "asyncio.Task[int]", problem: str, grace_s: float) -> str:
        self._set(State.UNREADY, problem)
        await process.stop(grace_s)
        return f"{problem}; ended it ({explain_exit(await exited)})"

    def _unasked_exit(self, process: Process, code: int) -> str:
        verb = "failed to start" if self.state is State.STARTING else "ended"
        last_words = process.last_words()
        return f"{verb}: {explain_exit(code)}" + (f": {last_words}" if last_words else "")

    def _set(self, state: State, message: str) -> None:
        if self.leaving and state is not State.STOPPED:
            return  # a probe may still finish while the replica drains
        self.state, self.message, self.since = state, message, time.monotonic()
        self._on_change()


def _free_ports(count: int) -> list[int]:
    """Return ports that are free at this moment. A process that loses the race for one ends, and is restarted with others."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]

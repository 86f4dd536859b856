"""The replicas of one deployment, kept at the number and template that are wanted."""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from flyball_operator.local.replica import CrashBackoff, Replica, State
from flyball_operator.local.template import RESOURCE_NAME, ProcessTemplate
from flyball_protocol.endpoints import ADMIN_TOKEN_ENV, TEMPLATE_ENV

VISIBLE_ENV = "CUDA_VISIBLE_DEVICES"


def visible_devices(environ: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the NVIDIA devices that processes here may use, as CUDA_VISIBLE_DEVICES names them."""
    if VISIBLE_ENV in environ:
        return tuple(filter(None, (name.strip() for name in environ[VISIBLE_ENV].split(","))))
    numbers = [path.name.removeprefix("nvidia") for path in dev.glob("nvidia[0-9]*")]
    return tuple(sorted(numbers, key=int))


class AcceleratorPool:
    """Hands devices out by replica number; each belongs to one replica at a time, as with a device plugin."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        self.devices = devices
        self._taken: dict[int, tuple[str, ...]] = {}

    @property
    def free(self) -> tuple[str, ...]:
        taken = {device for devices in self._taken.values() for device in devices}
        return tuple(device for device in self.devices if device not in taken)

    def room(self, num_each: int) -> int | None:
        """Return how many more replicas of ``num_each`` devices fit, or None when they need none."""
        return len(self.free) // num_each if num_each else None

    def take(self, number: int, num_devices: int) -> dict[str, str]:
        """Give replica ``number`` its devices; returns the variable that shows it these and no others."""
        if num_devices == 0:
            return {}
        self._taken[number] = self.free[:num_devices]
        return {VISIBLE_ENV: ",".join(self._taken[number])}

    def give_back(self, number: int) -> None:
        self._taken.pop(number, None)


NUMA_FLAG = "--numa-node"


def numa_nodes(sys: Path = Path("/sys")) -> tuple[int, ...]:
    """Return the NUMA nodes whose cores processes here may use; () if the kernel does not say."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    links = (link for core in cores for link in (sys / f"devices/system/cpu/cpu{core}").glob("node[0-9]*"))
    return tuple(sorted({int(link.name.removeprefix("node")) for link in links}))


class NumaNodes:
    """Hands NUMA nodes out by replica number, each time the one with the fewest replicas."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes = nodes
        self._taken: dict[int, int] = {}

    def take(self, number: int) -> int | None:
        """Return the node of replica ``number``; None where there are not several."""
        if len(self._nodes) < 2:
            return None
        used = Counter(self._taken.values())
        self._taken[number] = min(self._nodes, key=lambda node: used[node])
        return self._taken[number]

    def give_back(self, number: int) -> None:
        self._taken.pop(number, None)


@dataclass(frozen=True)
class Seen:
    """A replica that is not on its way out. ``current``: it runs the template that is wanted now."""

    number: int
    current: bool
    ready: bool


@dataclass(frozen=True)
class StartReplica:
    """Start one replica of the current template."""


@dataclass(frozen=True)
class StopReplica:
    """Drain and end a replica."""

    number: int
    reason: str


def next_actions(wanted: int, seen: Sequence[Seen], *, room: int | None = None) -> list[StartReplica | StopReplica]:
    """Return what to do now: a rolling update with maxSurge 1 and maxUnavailable 0. Call again whenever a replica changes.

    Args:
        wanted: replicas that should run.
        room: how many more can be started on this machine; None where nothing limits them.
    """
    stops = list(_stops(wanted, seen, room))
    left = len(seen) - len(stops)
    num_current = sum(replica.current for replica in seen) - sum(_is_current(stop.number, seen) for stop in stops)
    surge = 1 if any(not replica.current for replica in seen) and wanted else 0
    missing = min(wanted - num_current, wanted + surge - left)
    starts = [StartReplica()] * max(0, missing if room is None else min(missing, room))
    return [*stops, *starts]


def _stops(wanted: int, seen: Sequence[Seen], room: int | None) -> Iterator[StopReplica]:
    old = [replica for replica in seen if not replica.current]
    current = [replica for replica in seen if replica.current]
    for replica in old:
        if not replica.ready:
            yield StopReplica(replica.number, "out of date, and not ready anyway")
    ready_old = [replica for replica in old if replica.ready]
    spare = len(ready_old) + sum(replica.ready for replica in current) - wanted
    for replica in ready_old[: max(0, spare)]:
        yield StopReplica(replica.number, "out of date, and another is ready in its place")
    if room == 0 and ready_old and spare <= 0 and len(seen) >= wanted and all(replica.ready for replica in seen):
        yield StopReplica(ready_old[0].number, "out of date, and this machine has no room for another beside it")
    # Those that are not ready go first, then the youngest.
    by_worth = sorted(current, key=lambda replica: (replica.ready, -replica.number))
    for replica in by_worth[: max(0, len(current) - wanted)]:
        yield StopReplica(replica.number, "one more than spec.replicas")


def _is_current(number: int, seen: Sequence[Seen]) -> bool:
    return any(replica.number == number and replica.current for replica in seen)


class Fleet:
    """Starts and stops replicas until ``want()`` is met; every change of a replica is a reason to look again."""

    def __init__(
        self,
        template: ProcessTemplate,
        wanted: int,
        *,
        token: str,
        log_dir: Path,
        session: aiohttp.ClientSession,
        accelerators: AcceleratorPool,
        nodes: NumaNodes,
        backoff: Callable[[], CrashBackoff],
        report: Callable[[str], None],
    ) -> None:
        self.template = template
        self.wanted = wanted
        self.num_killed = 0
        self._token = token
        self._log_dir = log_dir
        self._session = session
        self._accelerators = accelerators
        self._nodes = nodes
        self._backoff = backoff
        self._report = report
        self._replicas: dict[int, Replica] = {}
        self._next_number = 1
        self._changed = asyncio.Event()
        self._no_room = False
        self._task: asyncio.Task[None] | None = None

    @property
    def replicas(self) -> Sequence[Replica]:
        """Every replica that has not ended, in the order they were started."""
        return [replica for replica in self._replicas.values() if replica.state is not State.STOPPED]

    def start(self) -> None:
        self._task = asyncio.create_task(self._reconcile_forever(), name="fleet")

    def want(self, template: ProcessTemplate, wanted: int) -> None:
        """Change what is wanted."""
        self.template, self.wanted = template, wanted
        self._changed.set()

    async def drain(self) -> None:
        """Drain all replicas at once and wait for their end. Nothing is started afterwards."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        for replica in self.replicas:
            replica.stop()
        await asyncio.gather(*(replica.join() for replica in self._replicas.values()))
        self._forget_ended()

    def kill(self) -> None:
        """End all replicas now."""
        for replica in self.replicas:
            replica.kill()

    async def _reconcile_forever(self) -> None:
        while True:
            self._changed.clear()
            self._forget_ended()
            self._reconcile()
            await self._changed.wait()

    def _forget_ended(self) -> None:
        for replica in [one for one in self._replicas.values() if one.state is State.STOPPED]:
            self._accelerators.give_back(replica.number)
            self._nodes.give_back(replica.number)
            self.num_killed += replica.killed
            del self._replicas[replica.number]

    def _reconcile(self) -> None:
        room = self._accelerators.room(self.template.num_accelerators)
        seen = [
            Seen(replica.number, current=replica.template.digest == self.template.digest, ready=replica.ready)
            for replica in self.replicas
            if not replica.leaving
        ]
        for action in next_actions(self.wanted, seen, room=room):
            match action:
                case StartReplica():
                    self._start_one()
                case StopReplica(number=number, reason=reason):
                    self._report(f"replica {number} drains: {reason}")
                    self._replicas[number].stop()
        self._tell_if_no_room(room, len(seen))

    def _start_one(self) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        devices = self._accelerators.take(number, self.template.num_accelerators)
        replica = Replica(
            number,
            self._placed(number),
            {**self.template.env, **devices, ADMIN_TOKEN_ENV: self._token, TEMPLATE_ENV: self.template.digest},
            self._log_dir / f"replica-{number}.log",
            self._session,
            on_change=self._changed.set,
            report=self._report,
            backoff=self._backoff(),
        )
        self._replicas[number] = replica
        replica.start()

    def _placed(self, number: int) -> ProcessTemplate:
        """Return the template for a replica: where several on CPUs share a machine, each has the cores of one NUMA node."""
        template = self.template
        has_choice = self.wanted > 1 and template.num_accelerators == 0
        if not has_choice or any(word.partition("=")[0] == NUMA_FLAG for word in template.argv):
            return template
        node = self._nodes.take(number)
        return template if node is None else replace(template, argv=(*template.argv, f"{NUMA_FLAG}={node}"))

    def _tell_if_no_room(self, room: int | None, num_active: int) -> None:
        no_room = room == 0 and num_active < self.wanted and len(self.replicas) == num_active
        if no_room and not self._no_room:
            self._report(
                f"{self.wanted} replicas of {self.template.num_accelerators} {RESOURCE_NAME} are wanted, and this machine has "
                f"{len(self._accelerators.devices)}; running {num_active}. Lower spec.replicas, or set accelerator.count to 0"
            )
        self._no_room = no_room

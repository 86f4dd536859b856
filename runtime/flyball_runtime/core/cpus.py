"""Which cores and how much CPU time this process may use, how much it got, and how much nobody used."""

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from flyball_runtime.core.cgroups import V2, cgroups, read
from flyball_runtime.core.errors import ConfigError

logger = logging.getLogger(__name__)

_STAT_FIELDS_OF_IDLE = (4, 5)  # idle, iowait; after the name of the core


class Demand(NamedTuple):
    """Seconds in which threads ran, and in which they could have run and waited for a core."""

    ran_s: float
    waited_s: float


def cpu_limit(root: Path = Path("/")) -> float | None:
    """Return how many CPUs' worth of time cgroups allow, the least of them; None without a limit.

    A container with ``limits: {cpu: 1500m}`` may run on every core of its node, and is stopped for the rest of each tenth of
    a second in which it has used 0.15 s in all.

    Args:
        root: of the file system, for tests.
    """
    return min(_limits(root), default=None)


def throttled_s(of: Iterable[tuple[Path, str]]) -> float:
    """Return the seconds in which CPU limits have stopped threads: of all cores together, since the cgroups began.

    Args:
        of: folder and version of each cgroup, as ``cgroups`` yields them, which takes longer than to read what they say.
    """
    seconds = 0.0
    for folder, kind in of:
        name, unit_s = ("throttled_usec", 1e-6) if kind == V2 else ("throttled_time", 1e-9)
        for line in read(folder / "cpu.stat").splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                seconds += int(value) * unit_s
    return seconds


def demand(root: Path = Path("/")) -> dict[str, Demand]:
    """Return what each thread of this process got of the cores, by its id; empty if the kernel does not say.

    Linux counts it with CONFIG_SCHED_INFO, which every distribution sets; sandboxes such as gVisor do not.
    """
    tasks = root / "proc/self/task"
    found = {}
    for task in tasks.iterdir() if tasks.is_dir() else ():
        try:
            ran_ns, waited_ns, _ = (task / "schedstat").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has just ended, or none has such a file
        found[task.name] = Demand(int(ran_ns) / 1e9, int(waited_ns) / 1e9)
    return found if any(one.ran_s for one in found.values()) else {}


def demand_since(before: Mapping[str, Demand], now: Mapping[str, Demand]) -> Demand:
    """Return what the threads that are there now got of the cores since another reading."""
    ran_s = waited_s = 0.0
    for thread, (ran_now_s, waited_now_s) in now.items():
        ran_before_s, waited_before_s = before.get(thread, (0.0, 0.0))
        if ran_before_s > ran_now_s:  # it is another one with the same id
            ran_before_s = waited_before_s = 0.0
        ran_s += ran_now_s - ran_before_s
        waited_s += waited_now_s - waited_before_s
    return Demand(ran_s, waited_s)


def cores() -> set[int]:
    """Return the cores on which this thread may run; empty if the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def stay_on(cores: Collection[int]) -> None:
    """Have this thread run on these cores, wherever the thread that has started it may run; with no cores it stays there."""
    try:
        if cores:
            os.sched_setaffinity(0, cores)
    except OSError as error:  # the process has got other cores since
        logger.warning("a thread stays where it is: %s", error)


def idle_s(cores: Collection[int], root: Path = Path("/")) -> float:
    """Return the seconds in which these cores had nothing to do, of all of them together, since boot."""
    mine = {f"cpu{number}" for number in cores}
    ticks = 0
    for line in read(root / "proc/stat").splitlines():
        fields = line.split()
        if fields and fields[0] in mine:
            ticks += sum(int(fields[i]) for i in _STAT_FIELDS_OF_IDLE)
    return ticks / os.sysconf("SC_CLK_TCK")


def numa_nodes(root: Path = Path("/")) -> dict[int, set[int]]:
    """Return the cores that this process may use, by NUMA node; empty if the kernel does not say.

    On a machine with several sockets each has memory of its own, a node, and reads that of the others at a part of the speed.
    """
    nodes: dict[int, set[int]] = {}
    for core in os.sched_getaffinity(0):
        for link in (root / f"sys/devices/system/cpu/cpu{core}").glob("node[0-9]*"):
            nodes.setdefault(int(link.name.removeprefix("node")), set()).add(core)
    return nodes


def bind_to_numa_node(node: int, root: Path = Path("/")) -> int:
    """Have this thread, and those that it starts from now on, run on the cores of a NUMA node only; return how many those are.

    Memory is then the node's own: the kernel takes it from the node of the thread that writes to it first.

    Raises:
        ConfigError: there is no such node, or none of its cores may be used.
    """
    nodes = numa_nodes(root)
    if node not in nodes:
        known = ", ".join(map(str, sorted(nodes))) or "the kernel names none"
        raise ConfigError(f"--numa-node is {node}; nodes with cores that this process may use: {known}.")
    os.sched_setaffinity(0, nodes[node])
    return len(nodes[node])


def _limits(root: Path) -> Iterator[float]:
    """Yield the limit of each cgroup that has one."""
    for folder, kind in cgroups("cpu", root):
        if kind == V2:
            quota, _, period = read(folder / "cpu.max").partition(" ")
        else:
            quota, period = (read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota not in ("", "max", "-1") and period:
            yield int(quota) / int(period)

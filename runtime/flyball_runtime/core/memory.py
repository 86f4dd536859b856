"""How much memory this process may still take, and what it gives back."""

import contextlib
import ctypes
import gc
import mmap
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from flyball_protocol import MemoryState
from flyball_runtime.core.cgroups import V1, V2, cgroups, read


class _Controller(NamedTuple):
    """Where a version of cgroups keeps what we ask for, by file name and by field of ``memory.stat``."""

    limits: tuple[str, ...]
    usage: str
    limit_of_ancestors: str
    page_cache: str


_CONTROLLERS = {
    V2: _Controller(("memory.max", "memory.high"), "memory.current", "", "inactive_file"),
    V1: _Controller(
        ("memory.limit_in_bytes",), "memory.usage_in_bytes", "hierarchical_memory_limit", "total_inactive_file"
    ),
}


_NO_LIMIT = 2**60
"""Version 1 writes a number of about 2^63 for "no limit"."""


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory this process may still take: what the machine has available, or the least that any of its cgroups leaves.

    Page cache that the kernel drops first (``inactive_file``) is available, as the kubelet counts it: a checkpoint that
    was just read lies there.

    Args:
        root: of the file system, for tests.
    """
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    machine_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    return max(0, min([machine_bytes, *_bytes_left_by_cgroups(root)]))


def memory_state(pids: Iterable[int], *, pool_bytes: int, pool_max_bytes: int, root: Path = Path("/")) -> MemoryState:
    """Return the memory of a replica's processes, read from files of the kernel: some milliseconds.

    Args:
        pids: this process and others in its cgroup; one that has ended counts nothing.
        pool_bytes, pool_max_bytes: of the KV blocks, now and at most.
    """
    groups = list(_cgroups(root))
    limits = [limit for folder, controller in groups if (limit := _limit(folder, controller)) is not None]
    return MemoryState(
        pool_bytes=pool_bytes,
        pool_max_bytes=pool_max_bytes,
        process_bytes=sum(resident_bytes(pid, root) for pid in set(pids)),
        limit_bytes=min(limits, default=None),
        available_bytes=available_memory_bytes(root),
        pressure=_pressure([*(folder / "memory.pressure" for folder, _ in groups), root / "proc/pressure/memory"]),
    )


def resident_bytes(pid: int, root: Path = Path("/")) -> int:
    """Return how much memory of a process is in use; 0 without /proc."""
    fields = read(root / "proc" / str(pid) / "statm").split()
    return int(fields[1]) * mmap.PAGESIZE if len(fields) > 1 else 0


def _pressure(files: Iterable[Path]) -> float | None:
    """Return the first "some avg10" of pressure stall information (PSI) as a share; None where the kernel keeps none."""
    for file in files:
        try:
            found = re.search(r"some avg10=(\d+(?:\.\d+)?)", read(file))
        except OSError:  # PSI can be built in and switched off: the file is there, and cannot be read
            continue
        if found is not None:
            return float(found[1]) / 100
    return None


def _bytes_left_by_cgroups(root: Path) -> Iterator[int]:
    """Yield what each cgroup of this process that has a limit leaves."""
    for folder, controller in _cgroups(root):
        if (left_bytes := _bytes_left(folder, controller)) is not None:
            yield left_bytes


def _cgroups(root: Path) -> Iterator[tuple[Path, _Controller]]:
    for folder, version in cgroups("memory", root):
        yield folder, _CONTROLLERS[version]


def _bytes_left(folder: Path, controller: _Controller) -> int | None:
    """Return limit less use of one cgroup; None if it has no limit or does not tell its use."""
    limit, used = _limit(folder, controller), read(folder / controller.usage)
    if limit is None or not used:
        return None
    return limit - int(used) + int(_stat(folder).get(controller.page_cache, 0))


def _limit(folder: Path, controller: _Controller) -> int | None:
    """Return the lowest limit of one cgroup; None without one."""
    limits = [read(folder / name) for name in controller.limits]
    limits.append(_stat(folder).get(controller.limit_of_ancestors, ""))
    bounds = [int(limit) for limit in limits if limit not in ("", "max")]
    return min((one for one in bounds if one < _NO_LIMIT), default=None)


def _stat(folder: Path) -> dict[str, str]:
    return dict(line.split() for line in read(folder / "memory.stat").splitlines())


def return_large_buffers() -> None:
    """Have glibc give buffers of 1 MiB and more back to the system as soon as they are freed.

    Left to itself it raises that bound to the largest buffer freed so far, up to 32 MiB: what bodies of requests took, or most
    of it, would then stay with the process. Other C libraries are left as they are.
    """
    with contextlib.suppress(AttributeError, OSError):  # no glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)


_M_MMAP_THRESHOLD = -3  # of malloc.h


def freeze_startup_objects() -> None:
    """Leave what start-up made out of later garbage collections.

    The libraries' objects, several 100,000, live as long as the process. Walking them in every full collection stops a
    process for 0.2 to 0.3 s: all streams of an API process, or a step of an engine.
    """
    gc.collect()
    gc.freeze()

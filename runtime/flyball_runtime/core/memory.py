"""How much memory this process may still take, and what it gives back."""

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class _Controller(NamedTuple):
    """Where a version of cgroups keeps what we ask for, by file name and by field of ``memory.stat``."""

    limits: tuple[str, ...]
    usage: str
    limit_of_ancestors: str
    page_cache: str


_CONTROLLERS = {
    "cgroup2": _Controller(("memory.max", "memory.high"), "memory.current", "", "inactive_file"),
    "cgroup": _Controller(
        ("memory.limit_in_bytes",), "memory.usage_in_bytes", "hierarchical_memory_limit", "total_inactive_file"
    ),
}
"""By file system type, as ``/proc/self/mountinfo`` names it."""


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


def _bytes_left_by_cgroups(root: Path) -> Iterator[int]:
    """Yield what each cgroup of this process leaves, from its own to the topmost visible one."""
    paths = _cgroup_paths(root)
    for mount_root, mount_point, kind in _cgroup_mounts(root):
        if kind not in paths:
            continue
        top = root / mount_point.lstrip("/")
        path = PurePosixPath(paths[kind])
        # In a container the mount may show a part of the tree only, of which this process's cgroup is the root.
        below = path.relative_to(mount_root) if path.is_relative_to(mount_root) else PurePosixPath()
        for folder in (below, *below.parents):
            if (left_bytes := _bytes_left(top / folder, _CONTROLLERS[kind])) is not None:
                yield left_bytes


def _cgroup_paths(root: Path) -> dict[str, str]:
    """Return the path of this process's memory cgroup in each hierarchy that may have one."""
    paths = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    return paths


def _cgroup_mounts(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield root, mount point and file system type of each mounted hierarchy that may have a memory controller."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, file_system = line.partition(" - ")
        _, _, _, mount_root, mount_point, *_ = mount.split()
        kind, _, options = file_system.split()
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            yield mount_root, mount_point, kind


def _bytes_left(folder: Path, controller: _Controller) -> int | None:
    """Return limit less use of one cgroup; None if it has no limit or does not tell its use."""
    stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    limits = [_read(folder / name) for name in controller.limits]
    limits.append(stat.get(controller.limit_of_ancestors, ""))
    bounds = [int(limit) for limit in limits if limit not in ("", "max")]
    used = _read(folder / controller.usage)
    if not bounds or not used:
        return None
    return min(bounds) - int(used) + int(stat.get(controller.page_cache, 0))


def _read(file: Path) -> str:
    """Return the content, stripped; empty if there is no such file (the root cgroup has no limit, for one)."""
    return file.read_text().strip() if file.is_file() else ""


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

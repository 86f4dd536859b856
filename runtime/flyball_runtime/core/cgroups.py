"""The control groups that this process is in, of both versions: where the limits of a container are."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

V1, V2 = "cgroup", "cgroup2"
"""File system types, as ``/proc/self/mountinfo`` names them."""


def cgroups(controller: str, root: Path) -> Iterator[tuple[Path, str]]:
    """Yield folder and version of each of this process's cgroups, from its own to the topmost visible one.

    Args:
        controller: ``memory`` or ``cpu``; version 1 has a hierarchy for each.
        root: of the file system.
    """
    paths = _paths(controller, root)
    for mount_root, mount_point, kind in _mounts(controller, root):
        if kind not in paths:
            continue
        top = root / mount_point.lstrip("/")
        path = PurePosixPath(paths[kind])
        # In a container the mount may show a part of the tree only, of which this process's cgroup is the root.
        below = path.relative_to(mount_root) if path.is_relative_to(mount_root) else PurePosixPath()
        for folder in (below, *below.parents):
            yield top / folder, kind


def read(file: Path) -> str:
    """Return the content, stripped; empty if there is no such file (the root cgroup has no limit, for one)."""
    return file.read_text().strip() if file.is_file() else ""


def _paths(controller: str, root: Path) -> dict[str, str]:
    """Return the path of this process's cgroup in each hierarchy that may have the controller."""
    paths = {}
    for line in read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            paths[V2] = path
        elif controller in controllers.split(","):
            paths[V1] = path
    return paths


def _mounts(controller: str, root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield root, mount point and version of each mounted hierarchy that may have the controller."""
    for line in read(root / "proc/self/mountinfo").splitlines():
        mount, _, file_system = line.partition(" - ")
        _, _, _, mount_root, mount_point, *_ = mount.split()
        kind, _, options = file_system.split()
        if kind == V2 or (kind == V1 and controller in options.split(",")):
            yield mount_root, mount_point, kind

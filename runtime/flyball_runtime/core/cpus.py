"""How much CPU time this process may use."""

from collections.abc import Iterator
from pathlib import Path

from flyball_runtime.core.cgroups import V2, cgroups, read


def cpu_limit(root: Path = Path("/")) -> float | None:
    """Return how many CPUs' worth of time cgroups allow, the least of them; None without a limit.

    A container with ``limits: {cpu: 1500m}`` may run on every core of its node, and is stopped for the rest of each tenth of
    a second in which it has used 0.15 s in all.

    Args:
        root: of the file system, for tests.
    """
    return min(_limits(root), default=None)


def _limits(root: Path) -> Iterator[float]:
    for folder, kind in cgroups("cpu", root):
        if kind == V2:
            quota, _, period = read(folder / "cpu.max").partition(" ")
        else:
            quota, period = (read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota not in ("", "max", "-1") and period:
            yield int(quota) / int(period)

"""CPU limits, by made-up /proc and cgroup trees."""

from pathlib import Path

import pytest
import torch

from flyball_runtime.core.cpus import cpu_limit
from flyball_runtime.engine.start_up import set_num_threads

V1_MOUNT = "37 24 0:32 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct"
V1_OTHER = "36 24 0:31 / /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory"
V2_MOUNT = "35 24 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


@pytest.fixture(autouse=True)
def _no_wish_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return root


def v2(root: Path, *limits: str) -> Path:
    """A process in a cgroup of version 2 with this ``cpu.max``; further ones are of the cgroups above."""
    path = "/".join("abcdef"[: len(limits)])
    write(root, {"proc/self/cgroup": f"0::/{path}", "proc/self/mountinfo": V2_MOUNT})
    for depth, limit in enumerate(reversed(limits), 1):
        write(root, {f"sys/fs/cgroup/{path[: 2 * depth - 1]}/cpu.max": limit})
    return root


def v1(root: Path, quota: int, period: int = 100_000) -> Path:
    folder = "sys/fs/cgroup/cpu,cpuacct/pod"
    return write(
        root,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/pod\n4:memory:/other",
            "proc/self/mountinfo": f"{V1_OTHER}\n{V1_MOUNT}",
            f"{folder}/cpu.cfs_quota_us": str(quota),
            f"{folder}/cpu.cfs_period_us": str(period),
        },
    )


def test_there_is_no_limit_where_nobody_sets_one(tmp_path: Path) -> None:
    assert cpu_limit(tmp_path / "no cgroups") is None
    assert cpu_limit(v2(tmp_path / "v2", "max 100000")) is None
    assert cpu_limit(v1(tmp_path / "v1", -1)) is None


def test_a_limit_is_quota_by_period(tmp_path: Path) -> None:
    assert cpu_limit(v2(tmp_path / "v2", "150000 100000")) == 1.5
    assert cpu_limit(v1(tmp_path / "v1", 40_000)) == 0.4
    assert cpu_limit(v1(tmp_path / "other period", 40_000, 10_000)) == 4.0


def test_the_least_limit_up_the_tree_counts(tmp_path: Path) -> None:
    assert cpu_limit(v2(tmp_path, "400000 100000", "max 100000", "250000 100000")) == 2.5


@pytest.mark.parametrize(
    ("limit", "num_cores", "expected"),
    [(0.4, 8, 1), (1.4, 8, 1), (1.5, 8, 2), (2.5, 8, 3), (4.0, 8, 4), (7.9, 8, 8), (8.0, 8, 8), (16.0, 8, 8)],
)
def test_threads_are_the_nearest_number_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: float, num_cores: int, expected: int
) -> None:
    assert _num_threads(monkeypatch, num_cores, None, v2(tmp_path, f"{int(limit * 100_000)} 100000")) == expected


def test_who_asks_for_a_number_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = v2(tmp_path, "150000 100000")
    assert _num_threads(monkeypatch, 8, 3, root) == 3
    assert _num_threads(monkeypatch, 8, None, tmp_path / "no limit") == 8
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert _num_threads(monkeypatch, 8, None, root) == 8


def _num_threads(monkeypatch: pytest.MonkeyPatch, before: int, requested: int | None, root: Path) -> int:
    threads = [before]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    set_num_threads(requested, root)
    return threads[-1]

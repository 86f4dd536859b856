"""CPU limits and NUMA nodes, by made-up /proc, /sys and cgroup trees."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flyball_runtime.core.cgroups import cgroups
from flyball_runtime.core.cpus import bind_to_numa_node, cpu_limit, numa_nodes, throttled_s
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.engine import start_up
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


def test_what_limits_have_stopped_is_a_sum_of_both_versions(tmp_path: Path) -> None:
    v2_root = v2(tmp_path / "v2", "150000 100000")
    write(v2_root, {"sys/fs/cgroup/a/cpu.stat": "usage_usec 9\nnr_throttled 3\nthrottled_usec 2500000"})
    assert throttled_s(cgroups("cpu", v2_root)) == 2.5
    v1_root = v1(tmp_path / "v1", 40_000)
    write(v1_root, {"sys/fs/cgroup/cpu,cpuacct/pod/cpu.stat": "nr_periods 4\nthrottled_time 1500000000"})
    assert throttled_s(cgroups("cpu", v1_root)) == 1.5
    assert throttled_s(cgroups("cpu", tmp_path / "no cgroups")) == 0.0


def each_core_a_node(root: Path) -> list[int]:
    """Make a machine on which each core that this process may use, and one more, is a NUMA node of its own."""
    mine = sorted(os.sched_getaffinity(0))
    for node, core in enumerate([*mine, max(mine) + 1]):
        (root / f"sys/devices/system/cpu/cpu{core}/node{node}").mkdir(parents=True)
    return mine


def test_nodes_have_the_cores_that_may_be_used(tmp_path: Path) -> None:
    mine = each_core_a_node(tmp_path)
    assert numa_nodes(tmp_path) == {node: {core} for node, core in enumerate(mine)}
    assert numa_nodes(tmp_path / "no /sys") == {}


BOUND = """
import os, sys
from pathlib import Path
from flyball_runtime.core.cpus import bind_to_numa_node
num_cores = bind_to_numa_node(int(sys.argv[2]), Path(sys.argv[1]))
import torch
print(num_cores, sorted(os.sched_getaffinity(0)), torch.get_num_threads())
"""


def test_an_engine_that_is_bound_runs_on_the_cores_of_its_node(tmp_path: Path) -> None:
    mine = each_core_a_node(tmp_path)
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", BOUND, str(tmp_path), str(len(mine) - 1)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=variables).stdout
    assert printed == f"1 [{mine[-1]}] 1\n"
    assert sorted(os.sched_getaffinity(0)) == mine


def test_a_node_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    mine = each_core_a_node(tmp_path)
    known = ", ".join(map(str, range(len(mine))))
    with pytest.raises(ConfigError, match=f"--numa-node is 99; nodes with cores that this process may use: {known}\\."):
        bind_to_numa_node(99, tmp_path)
    with pytest.raises(ConfigError, match=f"--numa-node is {len(mine)}; "):  # its core is somebody else's
        bind_to_numa_node(len(mine), tmp_path)
    with pytest.raises(ConfigError, match="may use: the kernel names none"):
        bind_to_numa_node(0, tmp_path / "no /sys")


def test_a_node_has_no_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(start_up, "bind_to_numa_node", {0: 4, 1: 16}.__getitem__)
    start_up.use_numa_node(1)
    start_up.use_numa_node(0)
    assert threads == [8, 4]

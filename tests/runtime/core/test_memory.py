"""What memory there is, by made-up /proc and cgroup trees."""

import mmap
import os
from pathlib import Path

import pytest

from flyball_protocol import MemoryState
from flyball_runtime.core.memory import available_memory_bytes, memory_state

MIB = 2**20
MACHINE = 8000 * MIB
V2_MOUNT = "35 24 0:30 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "36 24 0:31 {root} /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory"
V1_OTHER = "37 24 0:32 / /sys/fs/cgroup/cpu rw,nosuid - cgroup cgroup rw,cpu,cpuacct"
V1_NO_LIMIT = 9223372036854771712


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with MACHINE bytes available, without cgroups."""
    write(tmp_path, {"proc/meminfo": f"MemTotal: 16000000 kB\nMemAvailable: {MACHINE // 1024} kB\nSwapFree: 0 kB"})
    return tmp_path


def v2(root: Path, path: str, mount_root: str = "/") -> None:
    write(root, {"proc/self/cgroup": f"0::{path}", "proc/self/mountinfo": V2_MOUNT.format(root=mount_root)})


def v2_group(root: Path, folder: str, limit: object, used: int, inactive_file: int = 0, high: object = "max") -> None:
    files = {
        "memory.max": limit,
        "memory.high": high,
        "memory.current": used,
        "memory.stat": f"anon 1\nfile 2\nactive_file 3\ninactive_file {inactive_file}\nslab 4",
    }
    write(root, {f"sys/fs/cgroup/{folder}/{name}": value for name, value in files.items()})


def v1(root: Path, path: str, mount_root: str = "/") -> None:
    mounts = f"{V1_OTHER}\n{V1_MOUNT.format(root=mount_root)}"
    write(root, {"proc/self/cgroup": f"5:cpu,cpuacct:/x\n4:memory:{path}", "proc/self/mountinfo": mounts})


def v1_group(root: Path, folder: str, limit: int, used: int, inactive_file: int = 0, above: int = V1_NO_LIMIT) -> None:
    files = {
        "memory.limit_in_bytes": limit,
        "memory.usage_in_bytes": used,
        "memory.stat": f"inactive_file 1\nhierarchical_memory_limit {above}\ntotal_inactive_file {inactive_file}",
    }
    write(root, {f"sys/fs/cgroup/memory/{folder}/{name}": value for name, value in files.items()})


def test_without_cgroups_the_machine_counts(root: Path) -> None:
    assert available_memory_bytes(root) == MACHINE


def test_page_cache_that_the_kernel_drops_first_is_available(root: Path) -> None:
    v2(root, "/")
    v2_group(root, "", limit=4000 * MIB, used=3500 * MIB, inactive_file=3000 * MIB)
    assert available_memory_bytes(root) == 3500 * MIB


def test_the_same_with_version_1(root: Path) -> None:
    v1(root, "/")
    v1_group(root, "", limit=4000 * MIB, used=3500 * MIB, inactive_file=3000 * MIB)
    assert available_memory_bytes(root) == 3500 * MIB


def test_a_cgroup_that_leaves_more_than_the_machine_has_does_not_count(root: Path) -> None:
    v2(root, "/")
    v2_group(root, "", limit=2 * MACHINE, used=0)
    assert available_memory_bytes(root) == MACHINE


@pytest.mark.parametrize("limit", ["max", 2**63 - 1])
def test_no_limit_is_no_limit(root: Path, limit: object) -> None:
    v2(root, "/")
    v2_group(root, "", limit=limit, used=100 * MIB)
    assert available_memory_bytes(root) == MACHINE


def test_no_limit_is_a_huge_number_in_version_1(root: Path) -> None:
    v1(root, "/")
    v1_group(root, "", limit=V1_NO_LIMIT, used=100 * MIB)
    assert available_memory_bytes(root) == MACHINE


def test_above_memory_high_a_process_is_throttled_so_it_counts(root: Path) -> None:
    v2(root, "/")
    v2_group(root, "", limit=4000 * MIB, high=3000 * MIB, used=1000 * MIB)
    assert available_memory_bytes(root) == 2000 * MIB


def test_the_tightest_ancestor_counts_with_its_own_use(root: Path) -> None:
    v2(root, "/pods/pod/container")
    v2_group(root, "pods", limit=6000 * MIB, used=5800 * MIB, inactive_file=100 * MIB)
    v2_group(root, "pods/pod", limit=2000 * MIB, used=500 * MIB)
    v2_group(root, "pods/pod/container", limit="max", used=400 * MIB)
    assert available_memory_bytes(root) == 300 * MIB


def test_version_1_tells_the_limit_of_ancestors_that_are_not_visible(root: Path) -> None:
    v1(root, "/pods/container", mount_root="/pods/container")
    v1_group(root, "", limit=V1_NO_LIMIT, used=500 * MIB, above=2000 * MIB)
    assert available_memory_bytes(root) == 1500 * MIB


@pytest.mark.parametrize(
    ("path", "mount_root"),
    [
        ("/pods/container", "/pods/container"),  # the container's part of the host's tree is mounted
        ("/pods/container", "/"),  # the path is the host's, the mount is the container's
        ("/", "/../.."),  # a cgroup namespace
        ("/../other", "/pods/container"),
    ],
)
def test_in_a_container_the_mount_is_the_cgroup(root: Path, path: str, mount_root: str) -> None:
    v2(root, path, mount_root)
    v2_group(root, "", limit=2000 * MIB, used=500 * MIB)
    assert available_memory_bytes(root) == 1500 * MIB


def test_both_versions_side_by_side(root: Path) -> None:
    mounts = f"{V1_MOUNT.format(root='/')}\n{V2_MOUNT.format(root='/').replace('cgroup rw', 'cgroup/unified rw')}"
    write(root, {"proc/self/cgroup": "4:memory:/a\n0::/a", "proc/self/mountinfo": mounts})
    write(root, {"sys/fs/cgroup/unified/a/cgroup.procs": "1"})
    v1_group(root, "a", limit=2000 * MIB, used=500 * MIB)
    assert available_memory_bytes(root) == 1500 * MIB


def test_a_cgroup_over_its_limit_leaves_nothing(root: Path) -> None:
    v2(root, "/")
    v2_group(root, "", limit=100 * MIB, used=101 * MIB)
    assert available_memory_bytes(root) == 0


def test_this_machine_has_some() -> None:
    assert available_memory_bytes() > 0


def state(root: Path, *pids: int) -> MemoryState:
    return memory_state(pids, pool_bytes=3, pool_max_bytes=4, root=root)


def statm(root: Path, pid: int, pages: int) -> None:
    write(root, {f"proc/{pid}/statm": f"99999 {pages} 5 1 0 6 0"})


def test_the_state_without_cgroups_or_pressure(root: Path) -> None:
    statm(root, 7, 100)
    found = state(root, 7, 7, 8)
    assert found.process_bytes == 100 * mmap.PAGESIZE, "7 counts once, and 8 has ended"
    assert (found.pool_bytes, found.pool_max_bytes, found.available_bytes) == (3, 4, MACHINE)
    assert (found.limit_bytes, found.pressure, found.device_free_bytes) == (None, None, None)


def test_the_lowest_limit_counts_and_the_pressure_of_the_own_group(root: Path) -> None:
    v2(root, "/pod/a")
    v2_group(root, "pod", 900 * MIB, 500 * MIB)
    v2_group(root, "pod/a", 1000 * MIB, 400 * MIB)
    psi = "some avg10={} avg60=1.00 avg300=0.00 total=5\nfull avg10=9.00 avg60=0.00 avg300=0.00 total=2"
    write(root, {"proc/pressure/memory": psi.format("40.00")})
    assert state(root).pressure == 0.4
    write(root, {"sys/fs/cgroup/pod/a/memory.pressure": psi.format("12.50")})
    found = state(root)
    assert (found.limit_bytes, found.available_bytes, found.pressure) == (900 * MIB, 400 * MIB, 0.125)


def test_version_1_without_a_limit_has_none(root: Path) -> None:
    v1(root, "/pod")
    v1_group(root, "pod", V1_NO_LIMIT, 10 * MIB)
    assert state(root).limit_bytes is None
    v1_group(root, "pod", 700 * MIB, 10 * MIB, above=600 * MIB)
    assert state(root).limit_bytes == 600 * MIB


def test_this_machine_has_a_state() -> None:
    found = memory_state((os.getpid(),), pool_bytes=0, pool_max_bytes=0)
    assert found.process_bytes > MIB
    assert found.available_bytes is not None and found.available_bytes > 0
    assert found.pressure is None or 0 <= found.pressure <= 1

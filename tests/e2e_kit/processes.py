"""Kills processes inside the node's containers, which share its PID namespace."""

import os
import signal
import time
from pathlib import Path

from cluster_kit.errors import ClusterError

START_TIMEOUT_S = 60.0


class NotRunning(ClusterError):
    def __init__(self, words: tuple[str, ...]) -> None:
        super().__init__(f"no process of {' '.join(words)!r} came within {START_TIMEOUT_S:g} s")


def kill(*words: str, cgroup: str = "") -> None:
    """Kill -9 the oldest process with these words in its command line; one that is just being restarted is waited for.

    Args:
        cgroup: part of the process's cgroup path, like a container's id.
    """
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not (found := _running(words, cgroup)):
        if time.monotonic() > deadline_s:
            raise NotRunning(words)
        time.sleep(0.05)
    os.kill(found[0], signal.SIGKILL)


def _running(words: tuple[str, ...], cgroup: str) -> list[int]:
    return sorted(pid for pid in _pids() if _matches(pid, words, cgroup))


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _matches(pid: int, words: tuple[str, ...], cgroup: str) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        groups = Path(f"/proc/{pid}/cgroup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return all(any(part.endswith(word) for part in command) for word in words) and cgroup in groups

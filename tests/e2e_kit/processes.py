"""Kills processes inside the node's containers, which share its PID namespace."""

import os
import signal
from pathlib import Path

from cluster_kit.api import until

START_TIMEOUT_S = 60.0


def kill(*words: str, cgroup: str = "") -> None:
    """Kill -9 the oldest process with these words in its command line; one that is just being restarted is waited for.

    Args:
        cgroup: part of the process's cgroup path, like a container's id.
    """
    found = until(lambda: _running(words, cgroup), f"a process of {' '.join(words)!r}", START_TIMEOUT_S)
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

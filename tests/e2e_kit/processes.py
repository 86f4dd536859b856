"""Finds processes inside the node's containers, which share its PID namespace."""

from pathlib import Path


def running(*words: str, cgroup: str = "") -> list[int]:
    """Return the processes with these words in their command lines, the oldest first.

    Args:
        cgroup: part of the process's cgroup path, like a container's id.
    """
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

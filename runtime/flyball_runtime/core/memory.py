"""How much memory there is."""

from pathlib import Path


def available_memory_bytes() -> int:
    """Memory this process may still take: the machine's, or its cgroup's when that is tighter."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    machine = int(fields["MemAvailable"].split()[0]) * 1024
    limit, current = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and current.exists() and (text := limit.read_text().strip()) != "max":
        return min(machine, int(text) - int(current.read_text()))
    return machine

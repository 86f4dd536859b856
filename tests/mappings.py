"""What Linux says of this process's memory."""

import re
from pathlib import Path

import pytest

needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages"
)


def is_mapped(library: str) -> bool:
    """Return whether a library of this name is loaded; False where there is no /proc."""
    maps = Path("/proc/self/maps")
    return maps.exists() and library in maps.read_text()


def flags(address: int) -> set[str]:
    """Return what the kernel knows of the mapping there: proc_pid_smaps(5), VmFlags."""
    smaps = Path("/proc/self/smaps").read_text()
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", smaps):
        start, end = (int(one, 16) for one in mapping.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            return set(mapping.rpartition("VmFlags:")[2].split())
    raise AssertionError(f"nothing is mapped at {address:x}")

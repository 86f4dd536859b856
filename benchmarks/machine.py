"""Where a figure comes from."""

import platform
import subprocess
from pathlib import Path


def describe_machine() -> str:
    """Name processor, Python and commit."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout.strip()
    return f"{cpu}, Python {platform.python_version()}, commit {commit}"

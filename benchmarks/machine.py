"""What every benchmark prints about where it ran, and how it times two things fairly."""

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch


def describe() -> str:
    """Return one line: CPU, threads, GPU if any, torch."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{cpu}, {torch.get_num_threads()} threads{gpu}, torch {torch.__version__}"


def compare(ours: Callable[[], object], theirs: Callable[[], object], *, seconds: float = 0.5) -> tuple[float, float]:
    """Return the median seconds of each, run in turns so that a disturbance hits both."""
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while len(times[0]) < 7 or time.perf_counter() < end:
        for run, seen in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            run()
            seen.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])

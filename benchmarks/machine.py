"""Where a figure comes from, and how two things are timed fairly."""

import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # older checkouts, which versus_checkout.py measures by this code, have no such module
    from flyball_runtime.bounds import Reached

ROOT = Path(__file__).parents[1]


def environment() -> dict[str, Any]:
    """Machine, versions and commit, as they go into every result."""
    return {
        "device": _device(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_sets": _instruction_sets(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "triton", "transformers")},
        "commit": os.environ.get("FLYBALL_COMMIT") or commit_of(ROOT) or "unknown",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def describe() -> str:
    """The environment in one line."""
    return ", ".join(f"{name} {value}" for name, value in environment().items())


def median_of(values: Iterable[float]) -> dict[str, float]:
    kept = sorted(values)
    return {"median": statistics.median(kept), "min": kept[0], "max": kept[-1], "runs": len(kept)}


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


def in_results(reached: "Reached") -> dict[str, float]:
    """Return what a machine reached, as results have it."""
    return {
        "copy_gb_per_s": 1e-9 * reached.copy_bytes_per_s,
        "matmul_gflop_per_s": 1e-9 * reached.product_operations_per_s,
    }


def bounds_of(measured: Sequence["Reached"]) -> dict[str, Any]:
    """Return the medians of what a machine reached in a run, and the dtype of the product."""
    rates = [in_results(reached) for reached in measured]
    return {rate: median_of(one[rate] for one in rates) for rate in rates[0]} | {"product": measured[0].product}


def _device() -> str:
    try:
        import torch  # optional: the scheduler's benchmarks need none
    except ModuleNotFoundError:
        return _cpu()
    return torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu()


def _cpu() -> str:
    """Name the CPU; virtual machines have names as short as ``AMD EPYC``, which family and model tell apart."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name") or platform.processor()
    return f"{name} (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else name


def _instruction_sets() -> str:
    """Those of the CPU's that decide how fast 16-bit arithmetic is."""
    cpuinfo = Path("/proc/cpuinfo")
    found = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return " ".join(name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16", "sve") if name in found)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


_CHANGES = ("status", "--porcelain", "--untracked-files=no", ".", ":!benchmarks/results")
"""Of the sources: results of the scripts that ran before do not count."""


def commit_of(checkout: Path) -> str | None:
    """Return what git says of a checkout; None where it is none, as where sources were copied (see FLYBALL_COMMIT)."""
    git = shutil.which("git")
    if git is None:
        return None
    commit, changes = (_git(git, checkout, *words) for words in (("describe", "--always"), _CHANGES))
    return None if commit is None else commit + ("-dirty" if changes else "")


def _git(git: str, checkout: Path, *words: str) -> str | None:
    """Return what git prints for the whole repository, None where there is none."""
    result = subprocess.run([git, *words], capture_output=True, text=True, check=False, cwd=checkout)
    return result.stdout.strip() if result.returncode == 0 else None

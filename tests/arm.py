"""Runs the kernel tests on the C++ ops for Arm, cross-compiled, under QEMU: ``make arm``.

Three libraries, as arm64 images carry them, each on a CPU that has what it asks for and no more. This says nothing of speed.
Debian's bookworm has the system libraries and Python 3.11, PyPI the packages. The newest torch there that needs no CUDA on Arm
is 2.10; the libraries are compiled for it, from the same sources.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path

from pytest import ExitCode

from avx512 import NO_LIBRARY
from cluster_kit.go_program import cache_folder
from flyball_kernels.cpu import build
from flyball_kernels.cpu.variants import Variant, variants_of

ROOT = Path(__file__).parent.parent
PROGRAMS = {
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64-static": "qemu-user-static",
    "mmdebstrap": "mmdebstrap",
}
"""Each with its Debian package."""

SUITE = "bookworm"
SYSTEM = ("python3.11", "libpython3.11-stdlib", "libstdc++6", "libgomp1")
TORCH = "torch==2.10.0"
PACKAGES = (
    *("numpy", "triton", "hypothesis", "sortedcontainers", "msgspec"),
    *("pytest", "pytest-xdist", "execnet", "pluggy", "iniconfig", "packaging", "pygments"),
    *("typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock"),  # torch's
)
"""What the tests import, in this environment's versions."""

CPUS = {"armv8.2-a-bf16": "max", "armv8.2-a-dotprod": "neoverse-n1", "armv8-a": "cortex-a72"}
"""QEMU's, by variant."""

PYTEST = ("-q", "-p", "no:cacheprovider", "-W", "ignore")
NOT_HERE = "not triton and not transformers and not huge_pages and not each_thread_gets_a_core"
"""The interpreter runs Triton kernels in Python, transformers is not installed, QEMU does not show which pages are huge, and
what it runs cannot start another program for Arm."""

SELECTION = f"addopts=--import-mode=importlib -m 'not gpu and not slow and not e2e' -k '{NOT_HERE}'"


def check_programs() -> None:
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if missing:
        raise SystemExit(f"make arm needs Debian packages: apt-get install --no-install-recommends {' '.join(missing)}")


def prepared(folder: Path) -> Path:
    """Return the folder with ``system`` and ``packages`` for Arm, made if need be."""
    if folder.exists():
        return folder
    fresh = folder.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    extract = ("mmdebstrap", "--quiet", "--variant=extract", "--architectures=arm64", f"--include={','.join(SYSTEM)}")
    subprocess.run([*extract, SUITE, fresh / "system"], check=True)
    wheels = ["--no-deps", "--only-binary=:all:", "--python-version=3.11", "--platform=any", "--target"]
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (28, 27, 17)]
    wanted = [TORCH, *(f"{name}=={version(name)}" for name in PACKAGES)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", *platforms, *wheels, fresh / "packages", *wanted]
    subprocess.run(pip, check=True)
    fresh.rename(folder)  # whole or not at all
    return folder


def compiled(variant: Variant, arm: Path) -> Path:
    """Return the library, named so that its CPU's flags are not looked for: QEMU shows this machine's."""
    torch, unit, target = arm / "packages/torch", arm / "ops.cpp", arm / f"{variant.name}.so"
    unit.write_text("".join(f'#include "{source}"\n' for source in build.sources()))
    includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    flags = [*build.COMPILE_FLAGS, "-w", "-D_GLIBCXX_USE_CXX11_ABI=1", *includes, *variant.compile_flags]
    libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", torch / "lib/libgomp.so.1"]
    subprocess.run(["aarch64-linux-gnu-g++", *flags, "-shared", unit, "-o", target, *libraries], check=True)
    return target


def run(variant: Variant, library: Path, arm: Path) -> Iterator[subprocess.CompletedProcess[str]]:
    """Yield the runs of the files of tests, each in a process of its own, as many at a time as there are cores."""
    paths = [arm / "packages", *(ROOT / name for name in ("protocol", "kernels", "runtime", "tests"))]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "FLYBALL_CPU_LIBRARY": str(library),
    }
    system = arm / "system"
    python = ["qemu-aarch64-static", "-cpu", CPUS[variant.name], "-L", str(system), str(system / "usr/bin/python3.11")]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        runs = [
            pool.submit(
                subprocess.run,
                [*python, "-m", "pytest", *PYTEST, "-o", SELECTION, str(file.relative_to(ROOT))],
                env=environment,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for file in sorted((ROOT / "tests/kernels").glob("test_*.py"))
            if file.name not in NO_LIBRARY
        ]
        yield from map(Future.result, as_completed(runs))


def main() -> int:
    """Return 0 if all tests passed."""
    parser = argparse.ArgumentParser(description="Run the kernel tests on C++ ops for Arm.")
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"default: all of {', '.join(CPUS)}")
    wanted = parser.parse_args().variants or list(CPUS)
    if unknown := [name for name in wanted if name not in CPUS]:
        parser.error(f"there is no {', '.join(unknown)}; choose from {', '.join(CPUS)}")
    check_programs()
    arm, failed = prepared(cache_folder() / "arm"), False
    for variant in variants_of("aarch64"):
        if variant.name not in wanted:
            continue
        print(f"{variant.name}, on QEMU's {CPUS[variant.name]}:", flush=True)
        for done in run(variant, compiled(variant, arm), arm):
            is_fine = done.returncode in (ExitCode.OK, ExitCode.NO_TESTS_COLLECTED)
            failed = failed or not is_fine
            print(f"{done.args[-1]}: {done.stdout.splitlines()[-1] if is_fine else done.stdout}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

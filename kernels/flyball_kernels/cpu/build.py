"""Compiles the C++ ops with this machine's compiler, for this machine's CPU, into a cache.

``python -m flyball_kernels.cpu.build`` does it at set-up time; otherwise the first use of an op does. With ``--output`` it
writes a library for another machine instead, which finds it through ``FLYBALL_CPU_LIBRARY`` and needs no compiler.
"""

import argparse
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

PACKAGE_DIR = Path(__file__).resolve().parent.parent
TORCH_DIR = Path(torch.__file__).resolve().parent
LIBRARY_NAME = "libflyball_kernels.so"

COMPILE_FLAGS = ["-std=c++20", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
COMPILE_FLAGS += [
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
    "-Wno-psabi",
]
NATIVE = "native"
SANITIZE_FLAGS = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


class BuildError(RuntimeError):
    """The C++ ops cannot be compiled here; the message says what is missing."""


def sources() -> list[Path]:
    """Return the C++ files, one per op."""
    return sorted(PACKAGE_DIR.glob("*/kernel.cpp"))


def cache_dir() -> Path:
    """Return where compiled libraries are kept: ``$FLYBALL_CACHE_DIR/kernels``, by default under ``~/.cache/flyball``."""
    root = os.environ.get("FLYBALL_CACHE_DIR") or Path.home() / ".cache" / "flyball"
    return Path(root) / "kernels"


def find_compiler() -> str:
    """Return the path of ``$CXX`` or g++.

    Raises:
        BuildError: there is none.
    """
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise BuildError(
            f"No C++ compiler: {name!r} is not on PATH. Install g++ 11 or newer (Debian, Ubuntu: apt install g++) "
            "or set CXX to a GCC-compatible compiler."
        )
    return path


def library_path(compiler: str) -> Path:
    """Return where the library for these sources, this torch, this compiler and this CPU belongs."""
    key = hashlib.sha256()
    for path in [*sources(), *sorted(PACKAGE_DIR.glob("cpu/*.h"))]:
        key.update(path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    for part in (torch.__version__, version, " ".join(COMPILE_FLAGS), _cpu_flags()):
        key.update(part.encode())
    return cache_dir() / key.hexdigest()[:16] / LIBRARY_NAME


def build() -> Path:
    """Return the compiled library, compiling it unless the cache has it. Safe to call from many processes at once.

    Raises:
        BuildError: no compiler, or it failed; the message carries its last lines.
    """
    compiler = find_compiler()
    target = library_path(compiler)
    if target.exists():
        return target
    target.parent.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.parent.with_suffix(".lock")):
        if not target.exists():
            _compile_once(compiler, target)
    return target


def build_for(march: str, target: Path, *, sanitize: bool = False) -> Path:
    """Compile a library for every CPU that has what gcc's ``-march`` value ``march`` stands for, like x86-64-v3.

    Args:
        sanitize: with AddressSanitizer and UBSan, for tests (``make sanitize``). A process that loads it must have
            libasan in LD_PRELOAD.
    Raises:
        BuildError: as ``build``.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        _compile(find_compiler(), march, target, Path(scratch), SANITIZE_FLAGS if sanitize else [])
    return target


def _compile_once(compiler: str, target: Path) -> None:
    start = time.perf_counter()
    logger.info("Compiling the C++ ops for this machine into %s (once, under a minute).", target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent.parent) as scratch:
        staging = Path(scratch) / "staging"
        staging.mkdir()
        _compile(compiler, NATIVE, staging / LIBRARY_NAME, Path(scratch))
        staging.rename(target.parent)  # whole or not at all
    logger.info("Compiled the C++ ops in %.0f s.", time.perf_counter() - start)


def _compile(compiler: str, march: str, target: Path, scratch: Path, extra_flags: Sequence[str] = ()) -> None:
    unit = scratch / "ops"
    # torch's headers take most of the time, so all ops are one translation unit
    unit.with_suffix(".cpp").write_text("".join(f'#include "{source}"\n' for source in sources()))
    _run([compiler, *_compile_flags(march), *extra_flags, "-c", f"{unit}.cpp", "-o", f"{unit}.o"])
    _run([compiler, *extra_flags, "-shared", f"{unit}.o", "-o", str(target), *_link_flags()])


def _compile_flags(march: str) -> list[str]:
    include = TORCH_DIR / "include"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [f"-march={march}", *COMPILE_FLAGS, abi, f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]


def _link_flags() -> list[str]:
    """Link to the OpenMP runtime that torch brings, so that both use one pool of threads."""
    openmp = [*TORCH_DIR.glob("lib/libgomp*.so*"), *TORCH_DIR.parent.glob("torch.libs/libgomp*.so*")]
    return [f"-L{TORCH_DIR / 'lib'}", "-lc10", "-ltorch_cpu", str(openmp[0]) if openmp else "-lgomp"]


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        tail = "\n".join(result.stderr.splitlines()[-20:])
        raise BuildError(f"The C++ ops do not compile here: {command[0]} ended with {result.returncode}.\n{tail}")


def _cpu_flags() -> str:
    """What -march=native depends on: a cache on a shared disk may meet another CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()} {flags}"


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Compile, say where the library is; exit code 1 when it cannot be compiled."""
    parser = argparse.ArgumentParser(description="Compile the C++ CPU ops for this machine, or for others.")
    parser.add_argument("--march", default=NATIVE, help="gcc's name of the CPU to compile for; needs --output")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the library, instead of the cache")
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UBSan; needs --output")
    options = parser.parse_args()
    if (options.march != NATIVE or options.sanitize) and options.output is None:
        parser.error("--march and --sanitize need --output: the cache is for this machine's CPU")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        path = build_for(options.march, options.output, sanitize=options.sanitize) if options.output else build()
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

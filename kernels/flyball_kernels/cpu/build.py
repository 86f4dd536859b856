"""Compiles the C++ ops with this machine's compiler, for this machine's CPU, into a cache.

``python -m flyball_kernels.cpu.build`` does it at set-up time; otherwise the first use of an op does. With ``--output`` it
writes a library for another machine instead, or with ``--variants`` one for each instruction set. That machine finds them
through ``FLYBALL_CPU_LIBRARY`` and needs no compiler.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from flyball_kernels.cpu import variants
from flyball_kernels.cpu.variants import Variant

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
NATIVE = ("-march=native",)
SANITIZE_FLAGS = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


class BuildError(RuntimeError):
    """The C++ ops cannot be compiled here; the message says what is missing."""


def sources() -> list[Path]:
    """Return the C++ files, one in each folder."""
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
    for path in [*sources(), *sorted(PACKAGE_DIR.glob("*/*.h"))]:
        key.update(path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    cpu = f"{platform.machine()} {variants.cpu_flags_line()}"  # a cache on a shared disk may meet another CPU
    for part in (torch.__version__, version, " ".join(COMPILE_FLAGS), cpu):
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


def build_for(flags: Sequence[str], target: Path, *, sanitize: bool = False) -> Path:
    """Compile a library for every CPU that has what ``flags`` let the compiler use.

    Args:
        flags: of the compiler, like ``-march=x86-64-v3``.
        sanitize: with AddressSanitizer and UBSan, for tests (``make sanitize``). A process that loads it must have
            libasan in LD_PRELOAD.
    Raises:
        BuildError: as ``build``.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        _compile(find_compiler(), [*flags, *(SANITIZE_FLAGS if sanitize else [])], target, Path(scratch))
    return target


def build_variants(names: Sequence[str], folder: Path) -> list[Path]:
    """Compile a library for each of the named variants of this machine, or for all of them if none is named.

    Raises:
        BuildError: as ``build``; or this machine has no such variant.
    """
    known = variants.variants_of(platform.machine())
    chosen = [variant for variant in known if not names or variant.name in names]
    unknown = set(names) - {variant.name for variant in known}
    if unknown or not known:
        raise BuildError(
            f"There is no variant {', '.join(sorted(unknown)) or 'at all'} for {platform.machine()}, which has "
            f"{', '.join(variant.name for variant in known) or 'none'}. Use --march to compile for one kind of CPU."
        )
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda variant: _build_variant(variant, folder), chosen))


def _build_variant(variant: Variant, folder: Path) -> Path:
    logger.info("Compiling the C++ ops for %s.", variant.name)
    return build_for(variant.compile_flags, folder / variant.file_name)


def _compile_once(compiler: str, target: Path) -> None:
    start = time.perf_counter()
    logger.info("Compiling the C++ ops for this machine into %s (once, under a minute).", target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent.parent) as scratch:
        staging = Path(scratch) / "staging"
        staging.mkdir()
        _compile(compiler, NATIVE, staging / LIBRARY_NAME, Path(scratch))
        staging.rename(target.parent)  # whole or not at all
    logger.info("Compiled the C++ ops in %.0f s.", time.perf_counter() - start)


def _compile(compiler: str, flags: Sequence[str], target: Path, scratch: Path) -> None:
    unit = scratch / "ops"
    # torch's headers take most of the time, so all ops are one translation unit
    unit.with_suffix(".cpp").write_text("".join(f'#include "{source}"\n' for source in sources()))
    _run([compiler, *_common_flags(), *flags, "-c", f"{unit}.cpp", "-o", f"{unit}.o"])
    _run([compiler, *flags, "-shared", f"{unit}.o", "-o", str(target), *_link_flags()])


def _common_flags() -> list[str]:
    include = TORCH_DIR / "include"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [*COMPILE_FLAGS, abi, f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]


def _link_flags() -> list[str]:
    """Link to the OpenMP runtime that torch brings, so that both use one pool of threads."""
    openmp = [*TORCH_DIR.glob("lib/libgomp*.so*"), *TORCH_DIR.parent.glob("torch.libs/libgomp*.so*")]
    return [f"-L{TORCH_DIR / 'lib'}", "-lc10", "-ltorch_cpu", str(openmp[0]) if openmp else "-lgomp"]


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        tail = "\n".join(result.stderr.splitlines()[-20:])
        raise BuildError(f"The C++ ops do not compile here: {command[0]} ended with {result.returncode}.\n{tail}")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Compile, say where the library is; exit code 1 when it cannot be compiled."""
    parser = argparse.ArgumentParser(description="Compile the C++ CPU ops for this machine, or for others.")
    parser.add_argument("--march", help="gcc's name of the CPU to compile for, instead of this one; needs --output")
    parser.add_argument(
        "--variants",
        nargs="*",
        metavar="NAME",
        help="compile a library for each of these instruction sets, or for all that this machine's kind has, into the "
        "folder --output: " + ", ".join(variant.name for variant in variants.VARIANTS),
    )
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UBSan; needs --output")
    parser.add_argument("--output", type=Path, metavar="PATH", help="where to write, instead of the cache")
    options = parser.parse_args()
    if options.output is None and (options.march or options.sanitize or options.variants is not None):
        parser.error("--march, --variants and --sanitize need --output: the cache is for this machine's CPU")
    if options.variants is not None and (options.march or options.sanitize):
        parser.error("--variants goes without --march and --sanitize")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        print(*_built(options), sep="\n")
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _built(options: argparse.Namespace) -> list[Path]:
    if options.output is None:
        return [build()]
    if options.variants is not None:
        return build_variants(options.variants, options.output)
    flags = [f"-march={options.march}"] if options.march else NATIVE
    return [build_for(flags, options.output, sanitize=options.sanitize)]


if __name__ == "__main__":
    sys.exit(main())

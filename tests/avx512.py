"""Runs the kernel tests on the C++ ops for AVX-512, also where the CPU has less: ``make avx512``.

One library for each x86 instruction set above AVX2 that images carry. The instructions that the sources call by name and this
CPU lacks are emulated (``tests/kernels/emulated_avx512.h`` and ``emulated_amx.h``). So what these sets have of their own in the
sources is tested on any CPU with AVX2; what the compiler would make for them is not.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flyball_kernels.cpu import build, library, variants
from flyball_kernels.cpu.variants import X86_64_V3, Variant, variants_of

ROOT = Path(__file__).parent.parent
NO_LIBRARY = ("test_aot_compile.py", "test_backend.py", "test_variants.py")  # they compile, or choose
NOT_OURS = "not triton"  # the interpreter runs Triton kernels in Python
AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
VARIANTS = tuple(variant for variant in variants_of("x86_64") if variant.cpu_flags > X86_64_V3)


def compile_flags(variant: Variant, cpu_flags: frozenset[str]) -> tuple[str, ...]:
    """Return what compiles the ops for ``variant`` on a CPU with these flags: what it lacks is emulated."""
    base = next(known for known in variants_of("x86_64") if known.cpu_flags <= variant.cpu_flags & cpu_flags)
    lacking = variant.cpu_flags - base.cpu_flags
    flags = list(base.compile_flags)
    if lacking - AMX:
        flags += ["-include", f"{ROOT}/tests/kernels/emulated_avx512.h"]
        flags += [f"-DFLYBALL_EMULATED_{name}" for name in ("VNNI", "BF16") if f"avx512_{name.lower()}" in lacking]
    if lacking & AMX:
        flags.append(f'-DFLYBALL_AMX_EMULATOR="{ROOT}/tests/kernels/emulated_amx.h"')
    return tuple(flags)


def run_tests(environment: dict[str, str], files: Iterable[str] | None = None) -> int:
    """Return the exit code of the kernel tests, or of these files of them."""
    chosen = [f"tests/kernels/{name}" for name in files or ()]
    all_of_them = ["tests/kernels", *(f"--ignore=tests/kernels/{name}" for name in NO_LIBRARY)]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *(chosen or all_of_them), "-k", NOT_OURS]
    return subprocess.run(command, env=environment, cwd=ROOT).returncode


def compiled(variant: Variant, cpu_flags: frozenset[str], folder: Path) -> Path:
    """Return the library, under a name that says nothing of CPUs, so that this one is not refused."""
    return build.build_for(compile_flags(variant, cpu_flags), folder / variant.name / build.LIBRARY_NAME)


def main() -> int:
    """Return 0 if all tests passed."""
    names = [variant.name for variant in VARIANTS]
    parser = argparse.ArgumentParser(description="Run the kernel tests on C++ ops for AVX-512.")
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"default: all of {', '.join(names)}")
    wanted = parser.parse_args().variants or names
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"there is no {', '.join(unknown)}; choose from {', '.join(names)}")
    machine, cpu_flags = variants.this_cpu()
    if machine != "x86_64" or X86_64_V3 - cpu_flags:
        raise SystemExit(f"make avx512 needs an x86_64 CPU with AVX2; this one is {machine}.")
    failed = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        chosen = [variant for variant in VARIANTS if variant.name in wanted]
        libraries = list(pool.map(lambda variant: compiled(variant, cpu_flags, Path(folder)), chosen))
        for variant, path in zip(chosen, libraries, strict=True):
            lacking = ", ".join(sorted(variant.cpu_flags - cpu_flags))
            print(f"{variant.name}, {f'with {lacking} emulated' if lacking else 'on this CPU'}:", flush=True)
            failed = run_tests(os.environ | {library.PREBUILT_VARIABLE: str(path)}) or failed
    return failed


if __name__ == "__main__":
    sys.exit(main())

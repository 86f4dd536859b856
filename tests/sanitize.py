"""Runs the kernel tests on C++ ops that are compiled with AddressSanitizer and UBSan: ``make sanitize``.

First two calls with bad arguments, past the public ops' checks, must each be reported: otherwise a build that lost its
sanitizers would pass. The sanitizers end the process at their first report, and the tests with it.

What uses AMX is tested with its instructions emulated, also on CPUs that have them: there no sanitizer sees what they read. The
AVX-512 that it needs can be emulated too, on CPUs with AVX2 alone: ``make sanitize SANITIZE=--emulate-avx512``. That takes ten
minutes more.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import avx512
from flyball_kernels.cpu import build, library, variants

WITH_AMX = ("test_linear.py", "test_paged_attention.py", "test_decoder_layer.py", "test_experts.py")
LOAD = "import torch; from flyball_kernels.cpu import library; library.load(); "
CONTROLS = {
    "AddressSanitizer": "torch.ops.flyball.rms_norm(torch.ones(4, 64), torch.ones(8), 1e-6, 0.0)",
    "runtime error: division by zero": "cache, ids = torch.zeros(1, 4, 0, 16), torch.tensor([0, 1], dtype=torch.int32); "
    "query = torch.zeros(1, 2, 16); "
    "torch.ops.flyball.paged_attention(query, cache, cache, ids[:1, None], ids, ids[1:], 1.0, None, None, None, None, cache)",
}
"""What a sanitizer must say of each call."""


def environment(file: Path) -> dict[str, str]:
    """Return this environment for a process that loads the sanitized library ``file``."""
    variables = {name: value for name, value in os.environ.items() if name not in ("ASAN_OPTIONS", "UBSAN_OPTIONS")}
    return variables | {
        library.PREBUILT_VARIABLE: str(file),
        "LD_PRELOAD": " ".join(runtime_file(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python and torch keep memory to their end
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def runtime_file(name: str) -> str:
    """Return the path of a library of the compiler. Python is not linked with it, so it is loaded before all others."""
    command = [build.find_compiler(), f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        raise SystemExit(f"{command[0]} has no {name}; the sanitizers need GCC and its libraries (apt install g++).")
    return path


def check_controls(variables: dict[str, str]) -> None:
    for report, call in CONTROLS.items():
        result = subprocess.run([sys.executable, "-c", LOAD + call], env=variables, capture_output=True, text=True)
        if result.returncode == 0 or report not in result.stderr:
            raise SystemExit(f"this call should end in {report!r}:\n{call}\n{result.returncode}\n{result.stderr}")


def run(flags: Sequence[str], files: Sequence[str] | None = None) -> int:
    """Compile with these flags, and return the exit code of the tests."""
    with tempfile.TemporaryDirectory() as folder:
        variables = environment(build.build_for(flags, Path(folder) / build.LIBRARY_NAME, sanitize=True))
        check_controls(variables)
        print("Both sanitizers report what they should; now the tests.", flush=True)
        return avx512.run_tests(variables, files)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the kernel tests on sanitized C++ ops.")
    parser.add_argument("--emulate-avx512", action="store_true", help="test what uses AMX on a CPU with AVX2 alone too")
    emulates = parser.parse_args().emulate_avx512
    machine, cpu_flags = variants.this_cpu()
    if failed := run(build.NATIVE):
        return failed
    needed = variants.X86_64_V3 if emulates else {"avx512_bf16"}
    if machine != "x86_64" or needed - cpu_flags:
        print(
            "What uses AMX is not tested: that needs an x86_64 CPU with avx512_bf16, or with AVX2 and --emulate-avx512."
        )
        return 0
    print("With AMX, emulated:", flush=True)
    return run(avx512.compile_flags(avx512.VARIANTS[0], cpu_flags - avx512.AMX), WITH_AMX)


if __name__ == "__main__":
    sys.exit(main())

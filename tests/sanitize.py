"""Runs the kernel tests on C++ ops that are compiled with AddressSanitizer and UBSan: ``make sanitize``.

First two calls with bad arguments, past the public ops' checks, must each be reported: otherwise a build that lost its
sanitizers would pass. The sanitizers end the process at their first report, and the tests with it.

What uses AMX is tested with its instructions emulated, also on CPUs that have them: there no sanitizer sees what they read.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flyball_kernels.cpu import build, library, variants

ROOT = Path(__file__).parent.parent
NOT_OURS = "not triton"  # the interpreter runs Triton kernels in Python
NO_LIBRARY = ("test_aot_compile.py", "test_backend.py", "test_variants.py")  # they compile, or choose
EMULATED_AMX = f'-DFLYBALL_AMX_EMULATOR="{ROOT}/tests/kernels/emulated_amx.h"'
WITH_AMX = ("test_linear.py", "test_paged_attention.py", "test_decoder_layer.py")
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


def run(flags: Sequence[str], tests: Sequence[str]) -> int:
    """Compile with these flags, and return the exit code of the tests."""
    with tempfile.TemporaryDirectory() as folder:
        variables = environment(build.build_for(flags, Path(folder) / build.LIBRARY_NAME, sanitize=True))
        check_controls(variables)
        print("Both sanitizers report what they should; now the tests.", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *tests, "-k", NOT_OURS]
        return subprocess.run(command, env=variables, cwd=ROOT).returncode


def main() -> int:
    failed = run(build.NATIVE, ["tests/kernels", *(f"--ignore=tests/kernels/{name}" for name in NO_LIBRARY)])
    if failed:
        return failed
    if "avx512_bf16" not in variants.this_cpu()[1]:
        print("What uses AMX is not tested: that needs a CPU with avx512_bf16.")
        return 0
    print("With AMX, emulated:", flush=True)
    return run([*build.NATIVE, EMULATED_AMX], [f"tests/kernels/{name}" for name in WITH_AMX])


if __name__ == "__main__":
    sys.exit(main())

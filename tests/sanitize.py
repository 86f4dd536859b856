"""Runs the kernel tests on C++ ops that are compiled with AddressSanitizer and UBSan: ``make sanitize``.

First two calls with bad arguments, past the public ops' checks, must each be reported: otherwise a build that lost its
sanitizers would pass. The sanitizers end the process at their first report, and the tests with it.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from flyball_kernels.cpu import build, library

ROOT = Path(__file__).parent.parent
NOT_OURS = "not triton"  # the interpreter runs Triton kernels in Python
NO_LIBRARY = ("test_aot_compile.py", "test_backend.py", "test_variants.py")  # they compile, or choose
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


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        file = build.build_for(build.NATIVE, Path(folder) / build.LIBRARY_NAME, sanitize=True)
        variables = environment(file)
        check_controls(variables)
        print("Both sanitizers report what they should; now the tests.", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "tests/kernels", "-k", NOT_OURS]
        command += [f"--ignore=tests/kernels/{name}" for name in NO_LIBRARY]
        return subprocess.run(command, env=variables, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())

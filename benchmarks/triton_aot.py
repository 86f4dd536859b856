"""What each Triton kernel needs on GPUs that are not here: registers, spills and shared memory, from ptxas.

    python benchmarks/triton_aot.py

Writes benchmarks/results/triton_aot.json. Takes about a minute where Triton has compiled none of them before.
"""

import subprocess
from pathlib import Path

import triton.backends.nvidia

from common import save
from flyball_kernels import aot


def ptxas_versions() -> dict[str, str]:
    """Return the versions that come with Triton: one for architectures before sm_100, and one from there on."""
    folder = Path(triton.backends.nvidia.__file__).parent / "bin"
    return {path.name: _version(path) for path in sorted(folder.glob("ptxas*"))}


def _version(program: Path) -> str:
    text = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=True).stdout
    return text.strip().splitlines()[-1]


def main() -> None:
    kernels = []
    for row in aot.rows(list(aot.ARCHITECTURES)):
        kernels.append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    save("triton_aot", {"ptxas": ptxas_versions(), "kernels": kernels})


if __name__ == "__main__":
    main()

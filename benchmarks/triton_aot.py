"""What each Triton kernel needs on GPUs that are not here: registers, spills and shared memory, from ptxas.

python benchmarks/triton_aot.py        # writes benchmarks/results/triton_aot.json
"""

import subprocess
from pathlib import Path

import triton.backends.nvidia

from common import save
from flyball_kernels import aot


def ptxas_version() -> str:
    ptxas = Path(triton.backends.nvidia.__file__).parent / "bin" / "ptxas"
    text = subprocess.run([str(ptxas), "--version"], capture_output=True, text=True, check=True).stdout
    return text.strip().splitlines()[-1]


def main() -> None:
    kernels = []
    for row in aot.rows(list(aot.ARCHITECTURES)):
        kernels.append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    save("triton_aot", {"ptxas": ptxas_version(), "kernels": kernels})


if __name__ == "__main__":
    main()

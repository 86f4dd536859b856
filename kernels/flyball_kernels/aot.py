"""Compiles the Triton kernels ahead of time for GPUs that are not here, and says what they need there.

    python -m flyball_kernels.aot            # a table
    python -m flyball_kernels.aot --json     # one object per kernel and architecture

Uses the ptxas and cuobjdump that come with Triton. Must run without TRITON_INTERPRET.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from flyball_kernels.spec import Spec

ARCHITECTURES = (80, 90, 100)


def specs() -> Iterator[Spec]:
    """Yield the variants to compile: those of every op that has a ``kernel.py``."""
    for path in sorted(Path(__file__).parent.glob("*/kernel.py")):
        yield from import_module(f"flyball_kernels.{path.parent.name}.kernel").specs()


def compile_for(spec: Spec, architecture: int) -> CompiledKernel:
    """Return the kernel compiled to a cubin for ``sm_<architecture>``."""
    names = spec.kernel.arg_names
    signature = {name: spec.types.get(name, "constexpr") for name in names}
    index = {name: (i,) for i, name in enumerate(names)}
    # what the launcher finds at run time: tensors start at multiples of 16 bytes, and so do their rows
    aligned = [name for name, kind in spec.types.items() if kind.startswith("*") or "stride" in name or "numel" in name]
    source = ASTSource(
        spec.kernel,
        signature=signature,
        constexprs={index[name]: value for name, value in spec.constants.items()},
        attrs={index[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=spec.options)


def resources(compiled: CompiledKernel) -> dict[str, int]:
    """Return registers per thread, bytes of stack per thread (spills), and bytes of shared memory per block."""
    cuobjdump = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(cuobjdump), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    return {"registers": registers, "stack_bytes": stack, "shared_bytes": compiled.metadata.shared}


def rows(architectures: list[int]) -> Iterator[dict[str, Any]]:
    """Yield what each kernel needs on each architecture."""
    for spec in specs():
        for architecture in architectures:
            used = resources(compile_for(spec, architecture))
            yield {"kernel": spec.name, "architecture": f"sm_{architecture}", **used}


def main() -> int:
    """Print a line per kernel and architecture."""
    parser = argparse.ArgumentParser(description="Compile the Triton kernels for GPUs that are not here.")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument(
        "--architectures", type=int, nargs="+", default=ARCHITECTURES, metavar="N", help="e.g. 80 90 100"
    )
    arguments = parser.parse_args()
    for row in rows(arguments.architectures):
        if arguments.json:
            print(json.dumps(row), flush=True)
        else:
            used = f"{row['registers']:4} registers {row['stack_bytes']:6} B stack {row['shared_bytes']:7} B shared"
            print(f"{row['kernel']:40} {row['architecture']:7} {used}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

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
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from flyball_kernels.paged_attention import kernel as paged_attention
from flyball_kernels.rope_kv_write import kernel as kv_write

ARCHITECTURES = (80, 90, 100)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Spec = tuple[
    str, Any, dict[str, str], dict[str, Any], dict[str, Any]
]  # name, kernel, argument types, constants, options


def specs() -> Iterator[Spec]:
    """Yield the variants to compile: decode and prefill, each dtype, common head sizes, and the KV write."""
    for head_dim, group in ((64, 3), (128, 8)):
        for max_query_len in (1, 512):
            yield attention_spec("bf16", head_dim, group, max_query_len, window=None)
    for dtype in ("fp16", "fp32"):
        yield attention_spec(dtype, 128, 2, 512, window=None)
    yield attention_spec("bf16", 80, 1, 512, window=4096)
    yield attention_spec("bf16", 256, 2, 512, window=4096, softcap=50.0)
    yield attention_spec("bf16", 64, 8, 512, window=128, has_sinks=True)
    pointers = dict.fromkeys(("key_ptr", "value_ptr", "k_cache_ptr", "v_cache_ptr"), "*bf16")
    sizes = dict.fromkeys(("key_stride", "value_stride", "row_numel"), "i32")
    types = {**pointers, "slot_mapping_ptr": "*i64", **sizes}
    yield "kv_write bf16", kv_write.kv_write_kernel, types, {"BLOCK": 1024}, kv_write.OPTIONS


def attention_spec(
    dtype: str,
    head_dim: int,
    group: int,
    max_query_len: int,
    window: int | None,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> Spec:
    types = dict.fromkeys(("query_ptr", "k_cache_ptr", "v_cache_ptr", "out_ptr"), f"*{dtype}")
    types |= dict.fromkeys(("block_tables_ptr", "cu_query_lens_ptr", "context_lens_ptr"), "*i32")
    types |= {"scale": "fp32", "max_blocks": "i32"}
    constants = {"NUM_KV_HEADS": 8, "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16, "WINDOW": window}
    types |= {"sinks_ptr": "*fp32"} if has_sinks else {}
    constants |= {"SOFTCAP": softcap} | ({} if has_sinks else {"sinks_ptr": None})
    constants |= {"DOT_DTYPE": paged_attention.dot_dtype(DTYPES[dtype])}
    constants |= paged_attention.tile_shape(DTYPES[dtype], group, head_dim, max_query_len)
    name = f"paged_attention {'decode' if max_query_len == 1 else 'prefill'} {dtype} d{head_dim} g{group}"
    return name, paged_attention.paged_attention_kernel, types, constants, paged_attention.OPTIONS


def compile_for(spec: Spec, architecture: int) -> CompiledKernel:
    """Return the kernel compiled to a cubin for ``sm_<architecture>``."""
    _, kernel, types, constants, options = spec
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    index = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    # what the launcher finds at run time: tensors start at multiples of 16 bytes, and so do their rows
    aligned = [name for name, kind in types.items() if kind.startswith("*") or "stride" in name or "numel" in name]
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={index[name]: value for name, value in constants.items()},
        attrs={index[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


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
            yield {"kernel": spec[0], "architecture": f"sm_{architecture}", **used}


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

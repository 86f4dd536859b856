"""PackedLinear on CPU against torch: F.linear, and oneDNN with a prepacked weight. Or Int8Linear against PackedLinear.

Weights rotate through copies that exceed the caches, as the layers of a model do.

    python benchmarks/linear.py [--dtype bfloat16] [--quantization int8]

A library for fewer instructions than this CPU has is measured by FLYBALL_CPU_LIBRARY. Torch is held to the same
instructions by, for AVX2, ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2.
"""

import argparse
import itertools

import torch
from torch.nn.functional import linear

from flyball_kernels import Backend, Int8Linear, PackedLinear, choose_backend
from machine import compare, describe

SHAPES = {"qkv": (768, 1280), "out": (768, 768), "gate_up": (768, 4096), "down": (2048, 768), "head": (768, 8192)}
NUM_ROWS = (1, 8, 32, 64, 128, 512)
WORKING_SET_BYTES = 160e6


def prepacked(weight: torch.Tensor) -> torch.Tensor:
    """Return oneDNN's layout of the weight, through the private op that torch.compile uses."""
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--quantization", default="none", choices=["none", "int8"])
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    backend = choose_backend("cpu", "cpp")
    print(f"{describe()}; C++ ops for {torch.ops.flyball.instruction_set()}; {dtype}")
    for name, (in_features, out_features) in SHAPES.items():
        weight = torch.randn(out_features, in_features, dtype=dtype) * 0.02
        if args.quantization == "int8":
            compare_int8(name, weight, backend)
            continue
        copies = max(1, round(WORKING_SET_BYTES / weight.nbytes))
        layers = itertools.cycle([PackedLinear(weight, backend=backend) for _ in range(copies)])
        plain = itertools.cycle([weight.clone() for _ in range(copies)])
        onednn = itertools.cycle([prepacked(weight) for _ in range(copies)])
        for num_rows in NUM_ROWS:
            x = torch.randn(num_rows, in_features, dtype=dtype)
            ours, theirs = compare(
                lambda x=x, layers=layers: next(layers)(x), lambda x=x, plain=plain: linear(x, next(plain))
            )
            _, packed = compare(
                lambda: None,
                lambda x=x, onednn=onednn: torch.ops.mkldnn._linear_pointwise(x, next(onednn), None, "none", [], ""),
            )
            work = 2e-9 * num_rows * in_features * out_features
            print(
                f"{name:8} {in_features:4} -> {out_features:4} x {num_rows:3}  ours {ours * 1e6:7.0f} us  "
                f"F.linear {theirs * 1e6:7.0f} us {theirs / ours:5.2f}x  oneDNN packed {packed * 1e6:7.0f} us "
                f"{packed / ours:5.2f}x   {work / ours:5.0f} GFLOP/s {weight.nbytes * 1e-9 / ours:5.1f} GB/s",
                flush=True,
            )


def compare_int8(name: str, weight: torch.Tensor, backend: Backend) -> None:
    """Print how long a layer takes in 8 bits and in the dtype of its weight."""
    out_features, in_features = weight.shape
    copies = range(max(1, round(WORKING_SET_BYTES / weight.numel())))
    rounded = itertools.cycle([Int8Linear(weight, backend=backend) for _ in copies])
    packed = itertools.cycle([PackedLinear(weight, backend=backend) for _ in copies])
    for num_rows in NUM_ROWS:
        x = torch.randn(num_rows, in_features, dtype=weight.dtype)
        ours, theirs = compare(lambda x=x: next(rounded)(x), lambda x=x: next(packed)(x))
        work = 2e-9 * num_rows * in_features * out_features
        print(
            f"{name:8} {in_features:4} -> {out_features:4} x {num_rows:3}  int8 {ours * 1e6:7.0f} us  "
            f"{weight.dtype} {theirs * 1e6:7.0f} us {theirs / ours:5.2f}x   {work / ours:5.0f} GOP/s "
            f"{weight.numel() * 1e-9 / ours:5.1f} GB/s",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""Our linear layers on CPU against others: in bf16 torch's and oneDNN's with a prepacked weight, quantized our own in bf16.

Weights rotate through copies that exceed the caches, as the layers of a model do. Each layer stands beside two bounds,
measured just before it: the rate of torch's matrix product (in fp32 where a CPU has AVX2 alone, else in bf16), and the bytes a
second that torch copies, read and written. With AVX2 alone oneDNN has no bf16 either, so both others compute in fp32 then.

    python benchmarks/linear.py [--dtype bfloat16] [--quantization int8 | w8a16 | int4 | w4a8]

A library for fewer instructions than this CPU has is measured by FLYBALL_CPU_LIBRARY. Torch is held to the same
instructions by, for AVX2, ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2.
Writes results/linear_DTYPE.json or results/linear_QUANTIZATION.json.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from common import save
from flyball_kernels import GroupedLinear, Int8Linear, PackedLinear, choose_backend
from flyball_runtime import doctor
from flyball_runtime.bounds import Bounds
from machine import compare, in_results

SHAPES = {"qkv": (768, 1280), "out": (768, 768), "gate_up": (768, 4096), "down": (2048, 768), "head": (768, 8192)}
NUM_ROWS = (1, 8, 32, 64, 128, 256, 512)
WORKING_SET_BYTES = 160e6

Layer = Callable[[Tensor], object]


def torchs(weight: Tensor) -> Layer:
    own = weight.clone()
    return lambda x: linear(x, own)


def prepacked(weight: Tensor) -> Layer:
    """Return a layer with oneDNN's layout of the weight, through the private ops that torch.compile uses."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def ours(layer: Callable[..., Layer]) -> Callable[[Tensor], Layer]:
    backend = choose_backend("cpu", "cpp")
    return lambda weight: layer(weight, backend=backend)


QUANTIZED = {
    "int8": (ours(Int8Linear), doctor.bytes_per_weight("int8")),
    "w8a16": (ours(partial(GroupedLinear, bits=8)), doctor.bytes_per_weight("w8a16")),
    "int4": (ours(GroupedLinear), doctor.bytes_per_weight("int4")),
    "w4a8": (ours(partial(GroupedLinear, input_bits=8)), doctor.bytes_per_weight("w4a8")),
}
"""A layer, and the bytes that it has for each weight, scales included."""


def rotating(make: Callable[[Tensor], Layer], weight: Tensor, bytes_per_weight: float) -> Layer:
    """Return a layer that is another copy each time."""
    copies = max(1, round(WORKING_SET_BYTES / (weight.numel() * bytes_per_weight)))
    layers = itertools.cycle([make(weight) for _ in range(copies)])
    return lambda x: next(layers)(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--quantization", choices=list(QUANTIZED))
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    if args.quantization:
        (make, bytes_per_weight), others = QUANTIZED[args.quantization], {args.dtype: ours(PackedLinear)}
    else:
        make, bytes_per_weight = ours(PackedLinear), float(dtype.itemsize)
        others = {"F.linear": torchs, "oneDNN packed": prepacked}
    name = args.quantization or args.dtype
    bounds = Bounds()
    theirs = bounds.dtype if dtype is torch.bfloat16 and not args.quantization else dtype
    print(f"C++ ops for {torch.ops.flyball.instruction_set()}, {torch.get_num_threads()} threads")
    measured = []
    for shape, (in_features, out_features) in SHAPES.items():
        weight = torch.randn(out_features, in_features, dtype=dtype) * 0.02
        layer = rotating(make, weight, bytes_per_weight)
        rivals = {other: rotating(one, weight.to(theirs), theirs.itemsize) for other, one in others.items()}
        bound = in_results(bounds.measure())
        print(f"bounds: copies {bound['copy_gb_per_s']:.1f} GB/s, products {bound['matmul_gflop_per_s']:.0f} GFLOP/s")
        for num_rows in NUM_ROWS:
            x = torch.randn(num_rows, in_features, dtype=dtype)
            row = measure(layer, rivals, x, x.to(theirs))
            seconds = 1e-6 * row[OURS]
            gflop_per_s = 2e-9 * num_rows * weight.numel() / seconds
            gb_per_s = 1e-9 * bytes_per_weight * weight.numel() / seconds
            rates = {
                "gflop_per_s": round(gflop_per_s, 1),
                "gb_per_s": round(gb_per_s, 2),
                "share_of_matmul": round(gflop_per_s / bound["matmul_gflop_per_s"], 3),
                "share_of_copy": round(gb_per_s / bound["copy_gb_per_s"], 3),
            }
            where = {"layer": shape, "in_features": in_features, "out_features": out_features, "num_rows": num_rows}
            measured.append(where | row | rates)
            shown = "  ".join(f"{key} {value:8.2f}" for key, value in (row | rates).items())
            print(f"{shape:8} {in_features:4} -> {out_features:4} x {num_rows:3}  {shown}", flush=True)
    settings = {
        "ops": torch.ops.flyball.instruction_set(),
        "threads": torch.get_num_threads(),
        "dtype": args.dtype,
        "dtype_of_others": str(theirs).removeprefix("torch."),
        "product_of_the_bound": str(bounds.dtype).removeprefix("torch."),
        "working_set_bytes": WORKING_SET_BYTES,
    }
    save(f"linear_{name}", settings | {"layers": measured})


OURS = "us"


def measure(layer: Layer, rivals: dict[str, Layer], x: Tensor, theirs: Tensor) -> dict[str, float]:
    """Return the microseconds of our layer, and how many times as long the others take, each in turns with ours.

    theirs: the same inputs in the others' dtype.
    """
    row: dict[str, float] = {}
    for other, rival in rivals.items():
        own_s, rival_s = compare(lambda: layer(x), lambda rival=rival: rival(theirs))
        row.setdefault(OURS, round(1e6 * own_s, 1))
        row[f"x_{other}"] = round(rival_s / own_s, 3)
    return row


if __name__ == "__main__":
    main()

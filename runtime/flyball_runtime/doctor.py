"""``flyball doctor``: what this machine has, which of our ops run on it and why, and what it should reach."""

import argparse
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from flyball_protocol import endpoints
from flyball_runtime import __version__
from flyball_runtime.bounds import Bounds, Reached, median_seconds
from flyball_runtime.core.cpus import cpu_limit, numa_nodes
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.memory import available_memory_bytes
from flyball_runtime.core.quantization import Quantization

FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "asimddp", "bf16", "i8mm")
"""Of a CPU, those that decide how fast it multiplies."""

FEATURES = 2048
"""In and out of the layer that is measured: 8 MiB in bf16."""
WORKING_SET_BYTES = 512 * 2**20
"""Of the copies of it that take turns: more than caches hold, as a model is."""
MANY_ROWS = 512
SECONDS = 1.0
"""For each figure."""
LOW_SHARE = 0.5
"""Of a bound; the report says what to do about layers that reach less."""


class Speed(Struct, frozen=True, kw_only=True):
    """What linear layers reach.

    Attributes:
        weights: what is multiplied: bf16, or a value of ``--quantization``.
        bytes_per_weight: memory of a weight, its part of a scale included.
        read_bytes_per_s: bytes of weights that one row reads, a second.
        operations_per_s: multiplications and additions of MANY_ROWS rows, a second.
        bounds: what torch reached just before, on the same threads.
    """

    weights: str
    bytes_per_weight: float
    read_bytes_per_s: float
    operations_per_s: float
    bounds: Reached

    @property
    def share_of_copy(self) -> float:
        """read_bytes_per_s as a fraction of torch's copy. It may exceed 1, because reading can be faster than copying."""
        return self.read_bytes_per_s / self.bounds.copy_bytes_per_s

    @property
    def share_of_product(self) -> float:
        """operations_per_s as a fraction of torch's product. It may exceed 1: 8 and 4 bits have faster instructions."""
        return self.operations_per_s / self.bounds.product_operations_per_s

    def at_bounds(self) -> "Speed":
        """Return the speed of layers that would reach both bounds."""
        return msgspec.structs.replace(
            self,
            read_bytes_per_s=self.bounds.copy_bytes_per_s,
            operations_per_s=self.bounds.product_operations_per_s,
        )

    def decode_tokens_per_s(self, num_parameters: float) -> float:
        """Return how many tokens a second one stream gets at most: each reads all weights."""
        return self.read_bytes_per_s / (num_parameters * self.bytes_per_weight)

    def prompt_tokens_per_s(self, num_parameters: float) -> float:
        return self.operations_per_s / (2 * num_parameters)


class Report(Struct, frozen=True, kw_only=True):
    """What there is to say of a machine.

    Attributes:
        num_numa_nodes: of the cores; 1 if the kernel names none.
        cpu_limit: CPUs' worth of time that cgroups allow; None without a limit.
        num_threads: that the engine would use.
        available_bytes: memory that a process may still take.
        gpus: names of those that torch sees.
        ops: which implementation of the ops runs on the CPU, cpp or torch.
        instruction_set: that the C++ ops are compiled for; None where they do not run.
        better_instruction_set: that the CPU has and the ops are not compiled for; None if there is none.
        linear: whose linear layers run on the CPU, cpp or torch.
        arithmetic: what multiplies weights of a kind by inputs of bf16, and what multiplies in attention; empty where the C++
            ops do not run.
        reasons: why it is not the best that there is.
        speeds: none if nothing was measured.
    """

    version: str
    cpu: str
    num_cores: int
    num_numa_nodes: int
    cpu_limit: float | None
    num_threads: int
    flags: list[str]
    available_bytes: int
    gpus: list[str]
    ops: str
    instruction_set: str | None
    better_instruction_set: str | None
    linear: str
    arithmetic: dict[str, str]
    reasons: list[str]
    speeds: list[Speed] = []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say what this machine has for serving, which of Flyball's ops run on it and why, and what it should reach."
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--no-measure", action="store_true", help="leave out the figures, which take about 30 seconds")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="folder of a checkpoint to compute the bounds for (default: 1B parameters)",
    )


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError: the model cannot be read."""
    name, num_parameters = "a model of 1B parameters", 1e9
    if args.model is not None:
        name, num_parameters = str(args.model), count_parameters(args.model)
    found = report(measured=not args.no_measure)
    if args.json:
        print(json.dumps(in_json(found), indent=1))
    else:
        print("\n".join(lines(found, name, num_parameters)))
    return endpoints.EXIT_OK


def count_parameters(path: Path) -> int:
    """Return how many numbers the weights of a checkpoint have. Raises ConfigError: they cannot be read."""
    from flyball_runtime.model.loader import iter_headers, weight_files  # imports torch

    if not path.is_dir():
        raise ConfigError(f"--model {path} is not a folder. Name one with config.json and safetensors.")
    return sum(math.prod(header.shape) for header in iter_headers(weight_files(path)))


def report(*, measured: bool) -> Report:
    import torch

    from flyball_kernels.backend import Backend, choose_backend, reason_for_torch
    from flyball_kernels.cpu import variants
    from flyball_runtime.engine.start_up import device_name, set_num_threads

    set_num_threads(None)
    machine, cpu_flags = variants.this_cpu()
    names = [variant.name for variant in variants.variants_of(machine) if variant.cpu_flags <= cpu_flags]
    reasons, instruction_set, arithmetic = [], None, {}
    try:
        backend = choose_backend("cpu", "cpp")
    except (RuntimeError, ValueError) as error:
        reasons.append(str(error))
        backend = Backend("torch")
    else:
        backend = choose_backend("cpu")
        instruction_set = torch.ops.flyball.instruction_set()
        arithmetic = _arithmetic(backend.linear)
        if backend.linear == "torch" and (reason := reason_for_torch(instruction_set, machine, cpu_flags)):
            reasons.append(f"linear layers: torch's, because {reason}")
    return Report(
        version=__version__,
        cpu=device_name(torch.device("cpu")).rpartition(" x")[0],
        num_cores=_num_cores(),
        num_numa_nodes=len(numa_nodes()) or 1,
        cpu_limit=cpu_limit(),
        num_threads=torch.get_num_threads(),
        flags=[flag for flag in FLAGS if flag in cpu_flags],
        available_bytes=available_memory_bytes(),
        gpus=[torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        ops=backend.name,
        instruction_set=instruction_set,
        better_instruction_set=names[0] if instruction_set in names[1:] else None,
        arithmetic=arithmetic,
        linear=backend.linear,
        reasons=reasons,
        speeds=list(speeds(backend)) if measured else [],
    )


def _arithmetic(linear: str) -> dict[str, str]:
    import torch

    ops = torch.ops.flyball
    bf16, int8, int4 = ops.linear_bf16_arithmetic(), ops.linear_int8_arithmetic(), ops.linear_grouped_arithmetic(4)
    return {
        "bf16": bf16 if linear == "cpp" else "torch",
        "int8": int8,
        "w8a16": ops.linear_grouped_arithmetic(8),
        "int4": int4,
        "w4a8": int8 if int4 == "fp32 FMA" else int4,  # bytes by bytes, by the instruction that int4 has if it has one
        # attention takes the bf16 dot product, or AMX, where linear layers do, and has no blocks of whole numbers
        "attention": bf16 if ops.linear_arithmetic(torch.bfloat16) == "dot" else "fp32 FMA",
    }


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def speeds(
    backend: Any, features: int = FEATURES, working_set_bytes: int = WORKING_SET_BYTES, bounds: Bounds | None = None
) -> Iterator[Speed]:
    """Measure linear layers in bf16, and in each quantization where the C++ ops run, and before each what torch reaches.

    Args:
        backend: a ``flyball_kernels.Backend`` for CPUs.
    """
    import torch

    from flyball_runtime.model.linear import IN_GROUPS

    bounds = bounds or Bounds()
    weight = torch.randn(features, features, dtype=torch.bfloat16)
    quantizations: list[Quantization] = ["none", "int8", *IN_GROUPS] if backend.name == "cpp" else ["none"]
    for quantization in quantizations:
        num_bytes = features * features * bytes_per_weight(quantization)
        make = _maker(quantization, weight, backend)
        layers = [make() for _ in range(max(1, round(working_set_bytes / num_bytes)))]
        reached = bounds.measure(SECONDS / 2)
        one, many = (_seconds(layers, torch.randn(rows, features, dtype=torch.bfloat16)) for rows in (1, MANY_ROWS))
        yield Speed(
            weights="bf16" if quantization == "none" else quantization,
            bytes_per_weight=bytes_per_weight(quantization),
            read_bytes_per_s=num_bytes / one,
            operations_per_s=2 * MANY_ROWS * features * features / many,
            bounds=reached,
        )


def bytes_per_weight(quantization: Quantization) -> float:
    """Return the memory of a weight that is rounded from bf16 so, with its part of the scale where groups have one."""
    from flyball_kernels.linear import GROUP_SIZES
    from flyball_runtime.model.linear import IN_GROUPS

    if quantization in IN_GROUPS:
        bits = IN_GROUPS[quantization].weight
        return bits / 8 + 2 / GROUP_SIZES[bits]  # scales of weights in bf16 have 16 bits
    return 2.0 if quantization == "none" else 1.0


def _maker(quantization: Quantization, weight: Any, backend: Any) -> Callable[[], Callable[[Any], Any]]:
    """Return what makes a layer as models do. Each layer has memory of its own."""
    from flyball_kernels.linear import GROUP_SIZES
    from flyball_kernels.linear.reference import round_groups
    from flyball_runtime.model.linear import IN_GROUPS, Place

    place = Place(weight.dtype, weight.device, backend, quantization)
    if quantization not in IN_GROUPS:
        return lambda: place.linear(weight.clone())
    bits = IN_GROUPS[quantization].weight
    rounded = round_groups(weight, GROUP_SIZES[bits], bits)  # once for all layers, since it takes long
    return lambda: place.grouped_linear(rounded, None)


def _seconds(layers: list[Callable[[Any], Any]], x: Any) -> float:
    """Return the median time of a layer."""
    turns = itertools.cycle(layers)
    return median_seconds(lambda: next(turns)(x), SECONDS)


def in_json(found: Report) -> dict[str, Any]:
    """Return the report with the shares that each speed is of its bounds."""
    fields = msgspec.to_builtins(found)
    for speed, one in zip(found.speeds, fields["speeds"], strict=True):
        one |= {"share_of_copy": speed.share_of_copy, "share_of_product": speed.share_of_product}
    return fields  # type: ignore[no-any-return]


def _compiled(found: Report) -> str:
    if found.instruction_set is None:
        return ""
    better = found.better_instruction_set
    return (
        f", compiled for {found.instruction_set}, {f'and this CPU has {better}' if better else 'the best for this CPU'}"
    )


def lines(found: Report, name: str, num_parameters: float) -> Iterator[str]:
    """Yield the report as text."""
    limit = "no CPU limit" if found.cpu_limit is None else f"a limit of {found.cpu_limit:.3g} CPUs"
    yield f"flyball     {found.version}"
    cores = f"{found.num_cores} cores" + (f" on {found.num_numa_nodes} NUMA nodes" if found.num_numa_nodes > 1 else "")
    yield f"CPU         {found.cpu}: {cores}, {limit}, {found.num_threads} threads for the engine"
    yield f"            {' '.join(found.flags) or 'none of the instructions that make serving fast'}"
    yield f"memory      {found.available_bytes / 2**30:.1f} GiB available"
    yield f"GPUs        {', '.join(found.gpus) or 'none that torch can use'}"
    yield f"CPU ops     {found.ops}{_compiled(found)}; linear layers: {found.linear}"
    if found.arithmetic:
        yield f"            {', '.join(f'{kind} by {what}' for kind, what in found.arithmetic.items())}"
    yield from (f"            {reason}" for reason in found.reasons)
    if found.speeds:
        yield from _measured(found, name, num_parameters)


def _measured(found: Report, name: str, num_parameters: float) -> Iterator[str]:
    product = found.speeds[0].bounds.product
    yield f"linear layers of 1 token, beside torch's copy, and of {MANY_ROWS}, beside its matrix product in {product}:"
    for speed in found.speeds:
        yield (
            f"  {speed.weights}: weights are read at {speed.read_bytes_per_s * 1e-9:.1f} GB/s, {speed.share_of_copy:.0%} of "
            f"the copy's {speed.bounds.copy_bytes_per_s * 1e-9:.1f}; {speed.operations_per_s * 1e-9:.0f} G operations/s, "
            f"{speed.share_of_product:.0%} of the product's {speed.bounds.product_operations_per_s * 1e-9:.0f}"
        )
    if low := list(_low(found.speeds)):
        yield f"  Less than {LOW_SHARE:.0%} is reached by {', '.join(low)}. {_remedy(found)}"
    yield f"{name} should come near, and cannot exceed (in parentheses: if layers ran at torch's rates):"
    for speed in found.speeds:
        bound = speed.at_bounds()
        yield (
            f"  {speed.weights}: {speed.decode_tokens_per_s(num_parameters):.3g} tokens/s for one stream "
            f"({bound.decode_tokens_per_s(num_parameters):.3g}), {speed.prompt_tokens_per_s(num_parameters):.3g} "
            f"prompt tokens/s ({bound.prompt_tokens_per_s(num_parameters):.3g})"
        )


def _low(speeds: list[Speed]) -> Iterator[str]:
    for speed in speeds:
        if speed.share_of_copy < LOW_SHARE:
            yield f"{speed.weights} with 1 token"
        if speed.share_of_product < LOW_SHARE:
            yield f"{speed.weights} with {MANY_ROWS} tokens"


def _remedy(found: Report) -> str:
    from flyball_kernels.cpu.library import PREBUILT_VARIABLE  # imports torch

    if found.instruction_set is None:
        return "The C++ ops, which are faster, do not run here; the reason is above."
    if found.better_instruction_set is not None:
        return f"Have {PREBUILT_VARIABLE} name C++ ops for {found.better_instruction_set}, or unset it."
    return "Run this again while nothing else computes. If shares stay low, the layers are slow on this CPU: please report it."

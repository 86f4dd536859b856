"""``flyball doctor``: what this machine has, which of our ops run on it and why, and what it should reach."""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from flyball_protocol import endpoints
from flyball_runtime import __version__
from flyball_runtime.core.cpus import cpu_limit, numa_nodes
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.memory import available_memory_bytes

FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "asimddp", "bf16", "i8mm")
"""Of a CPU, those that decide how fast it multiplies."""

FEATURES = 2048
"""In and out of the layer that is measured: 8 MiB in bf16."""
WORKING_SET_BYTES = 512 * 2**20
"""Of the copies of it that take turns: more than caches hold, as a model is."""
MANY_ROWS = 512
SECONDS = 1.0
"""For each figure."""


class Speed(Struct, frozen=True, kw_only=True):
    """What linear layers reach.

    Attributes:
        weights: what is multiplied, bf16 or int8.
        read_bytes_per_s: of weights, by one row.
        operations_per_s: multiplications and additions, by MANY_ROWS rows.
    """

    weights: str
    read_bytes_per_s: float
    operations_per_s: float

    def decode_tokens_per_s(self, num_parameters: float) -> float:
        """Return how many tokens a second one stream gets at most: each reads all weights."""
        return self.read_bytes_per_s / (num_parameters * (1 if self.weights == "int8" else 2))

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
        arithmetic: what multiplies weights of a kind; empty where the C++ ops do not run.
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
    parser.add_argument("--no-measure", action="store_true", help="leave out the figures, which take some seconds")
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
        print(json.dumps(msgspec.to_builtins(found), indent=1))
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
        bf16 = torch.ops.flyball.linear_bf16_arithmetic() if backend.linear == "cpp" else "torch"
        arithmetic = {
            "bf16": bf16,
            "int8": torch.ops.flyball.linear_int8_arithmetic(),
            "w8a16": torch.ops.flyball.linear_grouped_arithmetic(8),
            "int4": torch.ops.flyball.linear_grouped_arithmetic(4),
        }
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


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def speeds(backend: Any, features: int = FEATURES, working_set_bytes: int = WORKING_SET_BYTES) -> Iterator[Speed]:
    """Measure linear layers in bf16, and in int8 where there are any.

    Args:
        backend: a ``flyball_kernels.Backend`` for CPUs.
    """
    import torch

    from flyball_kernels import Int8Linear, PackedLinear

    kinds: dict[str, tuple[Callable[..., Any], int]] = {"bf16": (PackedLinear, 2)}
    if backend.name == "cpp":
        kinds["int8"] = Int8Linear, 1
    weight = torch.randn(features, features, dtype=torch.bfloat16)
    for name, (kind, itemsize) in kinds.items():
        num_bytes = features * features * itemsize
        layers = [kind(weight, backend=backend) for _ in range(max(1, working_set_bytes // num_bytes))]
        one, many = (_seconds(layers, torch.randn(rows, features, dtype=torch.bfloat16)) for rows in (1, MANY_ROWS))
        yield Speed(
            weights=name,
            read_bytes_per_s=num_bytes / one,
            operations_per_s=2 * MANY_ROWS * features * features / many,
        )


def _seconds(layers: list[Callable[[Any], Any]], x: Any) -> float:
    """Return the median time of a layer."""
    times: list[float] = []
    end_s = time.perf_counter() + SECONDS
    while time.perf_counter() < end_s or len(times) < len(layers) + 3:
        start_s = time.perf_counter()
        layers[len(times) % len(layers)](x)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[len(times) // 4 :])


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
        yield f"            {', '.join(f'{kind} weights by {what}' for kind, what in found.arithmetic.items())}"
    yield from (f"            {reason}" for reason in found.reasons)
    for speed in found.speeds:
        yield (
            f"{speed.weights:11} weights are read at {speed.read_bytes_per_s * 1e-9:.1f} GB/s, "
            f"{speed.operations_per_s * 1e-9:.0f} G operations/s"
        )
    if found.speeds:
        yield f"{name} should come near, and cannot exceed:"
    for speed in found.speeds:
        yield (
            f"  {speed.weights}: {speed.decode_tokens_per_s(num_parameters):.3g} tokens/s for one stream, "
            f"{speed.prompt_tokens_per_s(num_parameters):.3g} prompt tokens/s"
        )

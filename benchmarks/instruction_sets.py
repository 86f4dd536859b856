"""The C++ ops for each instruction set that this CPU has, as images carry them, forced one after the other on one machine, in
turns; and ``native``, those that a checkout compiles for its machine.

    python -m flyball_kernels.cpu.build --variants --output out/libraries
    python benchmarks/instruction_sets.py ops out/libraries [--runs 2]
    python benchmarks/instruction_sets.py model out/libraries [--runs 3]

``ops``: linear layers and attention, in microseconds. ``model``: output tokens a second of an 88M model in bf16 on two offline
loads, decodes above all and prompts above all. A process is stopped (SIGSTOP) while another is measured. Linear layers are the
C++ ones in all of them. Writes results/instruction_sets_ops.json or results/instruction_sets_model.json.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from common import make_checkpoint, save
from flyball_kernels.backend import LINEAR_VARIABLE
from flyball_kernels.cpu.library import PREBUILT_VARIABLE
from flyball_kernels.cpu.variants import this_cpu, variants_of
from machine import median_of
from servers import in_turns
from versus_vllm import OfflineEngine

LOADS = ("32x32x32", "4x512x4")
SECONDS = 0.2
"""For each op, in each run."""


def libraries(folder: Path) -> dict[str, dict[str, str]]:
    """Return the environment that forces each library of the folder which this CPU can run, best first, and this machine's."""
    machine, cpu_flags = this_cpu()
    paths = {one.name: folder.absolute() / one.file_name for one in variants_of(machine) if one.cpu_flags <= cpu_flags}
    found = {name: path for name, path in paths.items() if path.is_file()}
    if not found:
        raise SystemExit(f"{folder} has no library for this CPU. It could have {', '.join(paths) or 'nothing'}.")
    forced = {name: {PREBUILT_VARIABLE: str(path)} for name, path in found.items()} | {"native": {}}
    return {name: variables | {LINEAR_VARIABLE: "cpp"} for name, variables in forced.items()}


def ops() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what is measured, with its name."""
    import torch

    from flyball_kernels import PackedLinear, choose_backend, paged_attention
    from linear import QUANTIZED, ours, rotating
    from paged_attention import HEAD_DIM, batch

    weight = torch.randn(4096, 768, dtype=torch.bfloat16) * 0.02
    for kind, (make, bytes_per_weight) in {"bf16": (ours(PackedLinear), 2.0), **QUANTIZED}.items():
        rotated = rotating(make, weight, bytes_per_weight)
        for num_rows in (1, 8, 512):
            yield f"linear {kind}, {num_rows} rows", partial(rotated, torch.randn(num_rows, 768, dtype=torch.bfloat16))
    for name, shape in {"decodes, 8 x 2048": (8, 1, 2048), "a prompt of 1024": (1, 1024, 1024)}.items():
        inputs = batch(*shape, torch.bfloat16)
        attend = partial(
            paged_attention, scale=HEAD_DIM**-0.5, max_query_len=shape[1], backend=choose_backend("cpu", "cpp")
        )
        yield f"attention, {name}", partial(attend, **inputs)


def time_ops() -> dict[str, float]:
    """Return the median microseconds of each op in this process."""
    from machine import compare

    return {name: 1e6 * compare(op, lambda: None, seconds=SECONDS)[0] for name, op in ops()}


def measure_ops(sides: dict[str, dict[str, str]], runs: int) -> dict[str, Any]:
    times: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for name, variables in in_turns(sides, runs):
        command = [sys.executable, __file__, "time-ops"]
        done = subprocess.run(command, env=os.environ | variables, check=True, stdout=subprocess.PIPE, text=True)
        times[name].append(json.loads(done.stdout.splitlines()[-1]))
    names = next(iter(times.values()))[0]
    return {op: {side: median_of(run[op] for run in of_side) for side, of_side in times.items()} for op in names}


def measure_model(sides: dict[str, dict[str, str]], runs: int) -> dict[str, Any]:
    checkpoint = make_checkpoint(Path("out/checkpoints").absolute(), "small")
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                contextlib.closing(OfflineEngine(sys.executable, "flyball", checkpoint, variables))
            )
            for name, variables in sides.items()
        }
        speeds: dict[str, dict[str, list[float]]] = {load: {name: [] for name in sides} for load in LOADS}
        for load in LOADS:
            for engine in engines.values():  # the first run of a shape is slower
                engine.measure(load)
            for name, engine in in_turns(engines, runs):
                speeds[load][name].append(engine.measure(load))
    return {load: {name: median_of(of_side) for name, of_side in by_side.items()} for load, by_side in speeds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", choices=["ops", "model", "time-ops"], help="time-ops: in this process, as the others do"
    )
    parser.add_argument("libraries", type=Path, nargs="?", metavar="FOLDER")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    if args.what == "time-ops":
        print(json.dumps(time_ops()))
        return
    if args.libraries is None:
        parser.error("name the folder that has the libraries")
    sides = libraries(args.libraries)
    measured = (measure_ops if args.what == "ops" else measure_model)(sides, args.runs)
    for name, by_side in measured.items():
        print(f"{name:28}", *(f"{side} {figures['median']:9.1f}" for side, figures in by_side.items()))
    unit = "microseconds" if args.what == "ops" else "output_tokens_per_s"
    save(f"instruction_sets_{args.what}", {"shape": "small", unit: measured})


if __name__ == "__main__":
    main()

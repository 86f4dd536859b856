"""Two replicas on the cores of one machine, or one beside another program: whether their threads hold each other up.

    python benchmarks/neighbours.py [--runs 5]

The same clients in a closed loop, half of them with each replica, or all with the only one. Replicas have as many threads as
they find cores for, which is the default, or all cores or half of them by --num-threads. The other program keeps one core busy.
All take turns; what is not measured is stopped. Writes results/neighbours.json.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from common import make_checkpoint, save
from machine import median_of
from servers import Server, awake, in_turns, load, server

NUM_CLIENTS = (2, 8)
"""Of all replicas together."""

PROGRAM = "while True: pass"


class Arrangement(NamedTuple):
    """``flags`` are those of each replica; ``busy``: the other program runs."""

    flags: list[list[str]]
    busy: bool = False


def arrangements() -> dict[str, Arrangement]:
    cores = len(os.sched_getaffinity(0))
    every, half = [f"--num-threads={cores}"], [f"--num-threads={max(1, cores // 2)}"]
    fewer = [f"--num-threads={max(1, cores - 1)}"]
    return {
        "one": Arrangement([[]]),
        f"one, {every[0]}": Arrangement([every]),
        "two": Arrangement([[], []]),
        f"two, {every[0]}": Arrangement([every, every]),
        f"two, {half[0]}": Arrangement([half, half]),
        "one beside a program": Arrangement([[]], busy=True),
        f"one beside a program, {every[0]}": Arrangement([every], busy=True),
        f"one beside a program, {fewer[0]}": Arrangement([fewer], busy=True),
    }


def measure(
    servers: list[Server], checkpoint: Path, num_clients: int, seed: int, busy: bool = False
) -> dict[str, float]:
    """Return what all clients get together, and means of the replicas' latencies.

    Args:
        busy: another program keeps a core busy meanwhile.
    """
    each = num_clients // len(servers)

    async def at_once() -> list[dict[str, float]]:
        options = {"num_requests": max(8, 4 * each), "keep_alive": True}
        loads = [load(one, checkpoint, each, 1000 * seed + i, **options) for i, one in enumerate(servers)]
        return await asyncio.gather(*loads)

    with contextlib.ExitStack() as stack:
        for one in servers:
            stack.enter_context(awake(one.group))
        if busy:
            program = subprocess.Popen([sys.executable, "-c", PROGRAM])
            stack.callback(program.wait)
            stack.callback(program.kill)
        found = asyncio.run(at_once())
    means = {name: fmean(one[name] for one in found) for name in found[0]}
    return means | {"output_tokens_per_s": sum(one["output_tokens_per_s"] for one in found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shape", default="small")
    args = parser.parse_args()
    checkpoint = make_checkpoint(Path("out/checkpoints").absolute(), args.shape)
    serve = [sys.executable, "-m", "flyball_runtime.cli", "serve", str(checkpoint), "--served-model-name", "m"]
    found = arrangements()
    figures: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started = {
            name: [
                stack.enter_context(server([*serve, *flags], logs / f"{name} {i}", {}))
                for i, flags in enumerate(one.flags)
            ]
            for name, one in found.items()
        }
        for num_clients in NUM_CLIENTS:
            seeds = itertools.count(num_clients * 100)
            for name, servers in started.items():  # the first run of a shape is slower
                measure(servers, checkpoint, num_clients, next(seeds), found[name].busy)
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in started}
            for name, servers in in_turns(started, args.runs):
                runs[name].append(measure(servers, checkpoint, num_clients, next(seeds), found[name].busy))
            figures[str(num_clients)] = {
                name: {figure: median_of([run[figure] for run in own]) for figure in own[0]}
                for name, own in runs.items()
            }
            for name, of_name in figures[str(num_clients)].items():
                medians = ", ".join(f"{figure} {values['median']:.1f}" for figure, values in of_name.items())
                print(f"{num_clients} clients, {name}: {medians}", flush=True)
    save("neighbours", {"shape": args.shape, "by_clients": figures})


if __name__ == "__main__":
    main()

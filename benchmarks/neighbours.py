"""Two replicas on the cores of one machine, beside one replica: whether their threads hold each other up.

    python benchmarks/neighbours.py [--runs 5]

The same clients in a closed loop, half of them with each replica, or all with the only one. Two replicas have as many threads
as cores each, or half as many, or are bound to half of the cores. All take turns; what is not measured is stopped. Writes
results/neighbours.json.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from common import make_checkpoint, save
from machine import median_of
from servers import Server, awake, in_turns, load, server

NUM_CLIENTS = (2, 8)
"""Of all replicas together."""


Command = tuple[list[str], list[str]]
"""What stands before and behind the command of a replica."""


def replicas() -> dict[str, list[Command]]:
    """Return the replicas of each arrangement."""
    cores = sorted(os.sched_getaffinity(0))
    halves = (cores[: len(cores) // 2], cores[len(cores) // 2 :])
    threads = f"--num-threads={len(halves[0])}"
    pinned: list[Command] = [(["taskset", "--cpu-list", ",".join(map(str, half))], []) for half in halves]
    plain: Command = ([], [])
    with_threads: Command = ([], [threads])
    return {"one": [plain], "two": [plain] * 2, f"two, {threads}": [with_threads] * 2, "two, pinned": pinned}


def measure(servers: list[Server], checkpoint: Path, num_clients: int, seed: int) -> dict[str, float]:
    """Return what all clients get together, and means of the replicas' latencies."""
    each = num_clients // len(servers)

    async def at_once() -> list[dict[str, float]]:
        options = {"num_requests": max(8, 4 * each), "keep_alive": True}
        loads = [load(one, checkpoint, each, 1000 * seed + i, **options) for i, one in enumerate(servers)]
        return await asyncio.gather(*loads)

    with contextlib.ExitStack() as stack:
        for one in servers:
            stack.enter_context(awake(one.group))
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
    figures: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arrangements = {
            name: [
                stack.enter_context(server([*before, *serve, *behind], logs / f"{name} {i}", {}))
                for i, (before, behind) in enumerate(own)
            ]
            for name, own in replicas().items()
        }
        for num_clients in NUM_CLIENTS:
            seeds = itertools.count(num_clients * 100)
            for servers in arrangements.values():  # the first run of a shape is slower
                measure(servers, checkpoint, num_clients, next(seeds))
            found: dict[str, list[dict[str, float]]] = {name: [] for name in arrangements}
            for name, servers in in_turns(arrangements, args.runs):
                found[name].append(measure(servers, checkpoint, num_clients, next(seeds)))
            figures[str(num_clients)] = {
                name: {figure: median_of([run[figure] for run in runs]) for figure in runs[0]}
                for name, runs in found.items()
            }
            for name, of_name in figures[str(num_clients)].items():
                medians = ", ".join(f"{figure} {values['median']:.1f}" for figure, values in of_name.items())
                print(f"{num_clients} clients, {name}: {medians}", flush=True)
    save("neighbours", {"shape": args.shape, "by_clients": figures})


if __name__ == "__main__":
    main()

"""Two replicas on the cores of one machine, beside one replica: whether their threads hold each other up.

    python benchmarks/neighbours.py [--runs 5]

The same clients in a closed loop, half of them with each replica, or all with the only one: as many threads as cores for each
replica, one for each, and one core for each. All take turns; what is not measured is stopped. Writes results/neighbours.json.
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
from flyball_clients.bench.benchmark import run_benchmark
from flyball_clients.bench.settings import BenchSettings
from machine import median_of
from servers import INPUT_LEN, OUTPUT_LEN, Server, awake, in_turns, server

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


def settings(one: Server, checkpoint: Path, num_clients: int, seed: int) -> BenchSettings:
    return BenchSettings(
        base_url=one.url,
        tokenizer=str(checkpoint),
        num_requests=max(8, 4 * num_clients),
        concurrency=num_clients,
        input_len=str(INPUT_LEN),
        output_len=str(OUTPUT_LEN),
        ignore_eos=True,
        seed=seed,
    )


def load(servers: list[Server], checkpoint: Path, num_clients: int, seed: int) -> dict[str, float]:
    """Return what all clients get together, and means of the replicas' latencies."""

    async def both() -> list[Any]:
        each = num_clients // len(servers)
        loads = [settings(one, checkpoint, each, 1000 * seed + i) for i, one in enumerate(servers)]
        return await asyncio.gather(*map(run_benchmark, loads))

    with contextlib.ExitStack() as stack:
        for one in servers:
            stack.enter_context(awake(one.group))
        results = asyncio.run(both())
    if any(one.requests.failed for one in results):
        raise RuntimeError(f"requests failed: {[one.requests.errors for one in results]}")
    return {
        "output_tokens_per_s": sum(one.throughput.output_tokens_per_s for one in results),
        "ttft_p50_ms": 1000 * fmean(one.latency.ttft_s.p50 for one in results),
        "itl_p50_ms": 1000 * fmean(one.latency.itl_s.p50 for one in results),
        "itl_p95_ms": 1000 * fmean(one.latency.itl_s.p95 for one in results),
    }


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
                load(servers, checkpoint, num_clients, next(seeds))
            found: dict[str, list[dict[str, float]]] = {name: [] for name in arrangements}
            for name, servers in in_turns(arrangements, args.runs):
                found[name].append(load(servers, checkpoint, num_clients, next(seeds)))
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

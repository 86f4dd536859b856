"""How many tokens a second one core can stream: what the API process takes for each token.

    python benchmarks/api_process.py [--runs 5] [--clients 1 8 32 128 256]

A model of two small layers generates tokens faster than the API process streams them. `flyball bench` reads them in a closed
loop, with short prompts and long outputs, from a server that sends each token by itself and from one that sends eight at once
(`--stream-interval 8`), in turns. The CPU time is that of the API process (`process_cpu_seconds_total`), so it says what one
core can do however many cores the engine and the client leave to it. Writes results/api_process.json.
"""

import argparse
import asyncio
import contextlib
import itertools
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import make_checkpoint, save
from servers import Server, awake, bench_in_turns, load, medians, server

INPUT_LEN, OUTPUT_LEN = 16, 256
INTERVALS = (1, 8)
CPU_SECONDS = re.compile(r"^process_cpu_seconds_total (\S+)$", re.MULTILINE)


def cpu_seconds(one: Server) -> float:
    found = CPU_SECONDS.search(one.metrics())
    if found is None:
        raise RuntimeError(f"{one.url}/metrics does not have the CPU time of its process")
    return float(found[1])


def bench(one: Server, checkpoint: Path, clients: int, seed: int) -> dict[str, float]:
    num_requests = max(8, 2 * clients)
    lengths = {"input_len": INPUT_LEN, "output_len": OUTPUT_LEN}
    with awake(one.group):
        start = cpu_seconds(one)
        seen = asyncio.run(load(one, checkpoint, clients, seed, num_requests=num_requests, keep_alive=True, **lengths))
        spent_s = cpu_seconds(one) - start
    num_tokens = num_requests * OUTPUT_LEN
    return {
        "tokens_per_s": seen["output_tokens_per_s"],
        "us_per_token": 1e6 * spent_s / num_tokens,
        "tokens_per_core_s": num_tokens / spent_s,
        "cores": spent_s * seen["output_tokens_per_s"] / num_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    args = parser.parse_args()
    checkpoint = make_checkpoint(Path("out/checkpoints").absolute(), "tiny")
    flags = ["--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", str(max(args.clients))]
    command = [sys.executable, "-m", "flyball_runtime.cli", "serve", str(checkpoint), *flags]
    by_interval: dict[str, dict[str, Any]] = {str(interval): {} for interval in INTERVALS}
    seeds = itertools.count(1)
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {
            str(interval): stack.enter_context(
                server([*command, f"--stream-interval={interval}"], logs / str(interval), {})
            )
            for interval in INTERVALS
        }
        for clients in args.clients:
            bench_in_turns(servers, checkpoint, seeds, clients, 1, bench)  # warms up
            for name, runs in bench_in_turns(servers, checkpoint, seeds, clients, args.runs, bench).items():
                figures = by_interval[name][str(clients)] = medians(runs)
                shown = ", ".join(f"{key} {value['median']:.4g}" for key, value in figures.items())
                print(f"{clients} clients, tokens sent {name} at a time: {shown}", flush=True)
    lengths = {"input_len": INPUT_LEN, "output_len": OUTPUT_LEN}
    save("api_process", lengths | {"flags": flags, "by_stream_interval": by_interval})


if __name__ == "__main__":
    main()

"""What the token budget of a step (``--max-num-batched-tokens``) does to clients of a server on a CPU.

    python benchmarks/step_tokens.py [--shape small] [--runs 5] [--budgets 128 256 512 2048]

One server for each budget, `flyball bench` in a closed loop at concurrency 8 and 32 against each in turns, with prompts of its
own for each run. The servers that are not measured are stopped (SIGSTOP). Writes results/step_tokens.json.
"""

import argparse
import contextlib
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import make_checkpoint, save
from servers import bench_in_turns, medians, server, warm_up

CONCURRENCIES = (8, 32)
MAX_NUM_SEQS = 64
"""A budget may not be below it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 256, 512, 2048])
    args = parser.parse_args()
    checkpoint = make_checkpoint(Path("out/checkpoints").absolute(), args.shape)
    flags = ["--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", str(MAX_NUM_SEQS)]
    command = [sys.executable, "-m", "flyball_runtime.cli", "serve", str(checkpoint), *flags]
    seeds = itertools.count(1)
    by_concurrency: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {
            str(budget): stack.enter_context(
                server([*command, f"--max-num-batched-tokens={budget}"], logs / str(budget), {})
            )
            for budget in args.budgets
        }
        warm_up(servers, checkpoint, seeds)
        for concurrency in CONCURRENCIES:
            runs = bench_in_turns(servers, checkpoint, seeds, concurrency, args.runs)
            by_concurrency[str(concurrency)] = {budget: medians(figures) for budget, figures in runs.items()}
            for budget, figures in by_concurrency[str(concurrency)].items():
                shown = ", ".join(f"{figure} {value['median']:.1f}" for figure, value in figures.items())
                print(f"{concurrency} clients, {budget} tokens a step: {shown}", flush=True)
    save("step_tokens", {"shape": args.shape, "flags": flags, "by_concurrency": by_concurrency})


if __name__ == "__main__":
    main()

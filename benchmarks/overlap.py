"""What planning ahead is worth: the same engine with it and without, in turns.

    python benchmarks/overlap.py [--way steps] [--shape small --shape tiny] [--load 96x128x64 ...] [--runs 5]

Ways: with ``async`` the next step is planned while one runs (``--async-scheduling``); with ``steps`` several tokens of each
sequence are planned and computed together, as ``LLM`` does unless told (``num_scheduler_steps``).

A load is NUM x INPUT x OUTPUT tokens, all submitted at once, prompts fresh in each run, greedy, without end-of-sequence.
Both answer the same prompts, and their tokens are compared. ``on_over_off`` is the ratio of the medians of output tokens
per second. Writes results/overlap_async.json or results/overlap_steps.json.
"""

import argparse
from pathlib import Path
from typing import Any

from common import SHAPES, make_checkpoint, random_prompts, save
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.llm import LLM
from modes import Requests, on_over_off

LOADS = ("1x32x128", "8x32x128", "64x32x128", "256x32x64", "96x128x64", "16x1024x16")
WAYS: dict[str, dict[str, Any]] = {
    "async": {"off": {"num_scheduler_steps": 1}, "on": {"async_scheduling": True}},
    "steps": {"off": {"num_scheduler_steps": 1}, "on": {}},
}


def measure(llms: dict[str, LLM], load: str, runs: int) -> dict[str, Any]:
    num, input_len, output_len = map(int, load.split("x"))

    def requests(index: int) -> Requests:
        sampling = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        return random_prompts(num, [input_len] * num, seed=1000 * index + num), [sampling] * num

    return on_over_off(load, llms, runs, requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, default="steps")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="default: small and tiny")
    parser.add_argument("--load", action="append", help=f"default: {', '.join(LOADS)}")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--checkpoints", type=Path, default=Path("out/checkpoints"))
    args = parser.parse_args()
    results = {}
    for shape in args.shape or ("small", "tiny"):
        path = make_checkpoint(args.checkpoints, shape, dtype=args.dtype)
        llms = {
            mode: LLM(
                path, dtype=args.dtype, max_model_len=2048, kv_cache_memory_bytes=2**30, enable_prefix_caching=False,
                **settings,
            )
            for mode, settings in WAYS[args.way].items()
        }  # fmt: skip
        results[shape] = {load: measure(llms, load, args.runs) for load in args.load or LOADS}
    save(f"overlap_{args.way}", {"dtype": args.dtype, "runs": args.runs, "shapes": results})


if __name__ == "__main__":
    main()

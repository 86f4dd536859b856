"""What planning the next step while one runs is worth (``--async-scheduling``): the same engine with it and without, in turns.

    python benchmarks/overlap.py [--shape small --shape tiny] [--load 96x128x64 ...] [--runs 5]

A load is NUM x INPUT x OUTPUT tokens, all submitted at once, prompts fresh in each run, greedy, without end-of-sequence.
Both answer the same prompts, and their tokens are compared. ``on_over_off`` is the ratio of the medians of output tokens
per second. Writes results/overlap.json.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from common import SHAPES, make_checkpoint, random_prompts, save
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.llm import LLM
from machine import median_of

LOADS = ("1x32x128", "8x32x128", "64x32x128", "256x32x64", "96x128x64", "16x1024x16")
MODES = {"off": False, "on": True}


def run(llm: LLM, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
    """Return output tokens per second, and the tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    start_s = time.perf_counter()
    outputs = llm.generate(prompts, sampling)
    return len(prompts) * num_tokens / (time.perf_counter() - start_s), [output.token_ids for output in outputs]


def measure(llms: dict[str, LLM], load: str, runs: int) -> dict[str, Any]:
    """Run both modes in turns, the first one first in every other run."""
    num, input_len, output_len = map(int, load.split("x"))
    speeds: dict[str, list[float]] = {mode: [] for mode in llms}
    num_different = 0
    for index in range(runs + 1):
        prompts = random_prompts(num, [input_len] * num, seed=1000 * index + num)
        tokens = {}
        for mode in list(llms)[:: 1 if index % 2 else -1]:
            speed, tokens[mode] = run(llms[mode], prompts, output_len)
            if index:  # the first is a warm-up
                speeds[mode].append(speed)
        num_different += sum(one != other for one, other in zip(tokens["off"], tokens["on"], strict=True))
    figures = {mode: median_of(values) for mode, values in speeds.items()}
    ratio = figures["on"]["median"] / figures["off"]["median"]
    print(f"{load}: on/off {ratio:.3f}, {num_different} outputs differ", flush=True)
    return {"output_tokens_per_s": figures, "on_over_off": ratio, "num_outputs_that_differ": num_different}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
                async_scheduling=on,
            )
            for mode, on in MODES.items()
        }  # fmt: skip
        results[shape] = {load: measure(llms, load, args.runs) for load in args.load or LOADS}
    save("overlap", {"dtype": args.dtype, "runs": args.runs, "shapes": results})


if __name__ == "__main__":
    main()

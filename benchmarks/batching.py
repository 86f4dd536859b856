"""What continuous batching is worth on this engine, and on what it depends.

    python benchmarks/batching.py [--shape small] [--runs 5]

1. Static against continuous batching on this engine, with transformers.generate (static, padded) beside them, as the
   variance of output lengths grows: fixed, uniform, heavy tail. Only requested tokens count. Static batching computes
   until the longest of a batch is done, so its loss is bounded by longest / mean length of a batch. With fixed lengths
   batching gains nothing, so that ratio to transformers.generate is the engine's share; the ratio over it with other
   lengths is what batching alone gives. Each run has prompts and lengths of its own, the same for all systems, and the
   system that goes first changes from run to run.
2. Relative throughput with at most 1, 8, 32 and 64 sequences running.

Writes results/batching.json.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import make_checkpoint, save
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.request import Request
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.engine.engine import Engine
from flyball_runtime.engine.runner import start_engine
from machine import median_of

NUM_REQUESTS, BATCH, INPUT, MEAN_OUTPUT, MAX_OUTPUT = 96, 16, 64, 32, 512
CONCURRENCIES = (1, 8, 32, 64)

Lengths = list[int]


def output_lengths(kind: str, rng: random.Random) -> Lengths:
    """``NUM_REQUESTS`` lengths with a mean near MEAN_OUTPUT."""
    if kind == "fixed":
        return [MEAN_OUTPUT] * NUM_REQUESTS
    if kind == "uniform":
        return [rng.randint(1, 2 * MEAN_OUTPUT - 1) for _ in range(NUM_REQUESTS)]
    # Pareto with a tail index of 1.2: most answers are short, a few are very long.
    drawn = [rng.paretovariate(1.2) for _ in range(NUM_REQUESTS)]
    scale = MEAN_OUTPUT / statistics.mean(drawn)
    return [min(MAX_OUTPUT, max(1, round(scale * value))) for value in drawn]


def prompts(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(10, 8000) for _ in range(INPUT)] for _ in range(NUM_REQUESTS)]


def make_engine(checkpoint: Path) -> Engine:
    return start_engine(
        EngineConfig(
            model=str(checkpoint),
            served_model_name="m",
            dtype="bfloat16",
            max_model_len=INPUT + MAX_OUTPUT,
            max_num_seqs=max(CONCURRENCIES),
            enable_prefix_caching=False,
        )
    )


def run_engine(engine: Engine, inputs: list[list[int]], lengths: Lengths, *, batch: int, continuous: bool) -> float:
    """Return useful tokens per second. At most ``batch`` run; static: the next batch waits for the whole one before."""
    waiting = [
        Request(
            request_id=str(index),
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True),
        )
        for index, (prompt, length) in enumerate(zip(inputs, lengths, strict=True))
    ]
    running = 0
    start_s = time.perf_counter()
    while waiting or running:
        if continuous or not running:
            while waiting and running < batch:
                engine.submit(waiting.pop(0))
                running += 1
        running -= len(engine.step().endings)
    return sum(lengths) / (time.perf_counter() - start_s)


class Transformers:
    """Static batches of ``generate``; each runs until its longest sequence is done."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()

    def run(self, inputs: list[list[int]], lengths: Lengths, batch: int) -> float:
        start_s = time.perf_counter()
        with self._torch.inference_mode():
            for start in range(0, len(inputs), batch):
                rows = self._torch.tensor(inputs[start : start + batch])
                longest = max(lengths[start : start + batch])
                self._model.generate(
                    rows,
                    attention_mask=self._torch.ones_like(rows),
                    max_new_tokens=longest,
                    min_new_tokens=longest,
                    do_sample=False,
                )
        return sum(lengths) / (time.perf_counter() - start_s)


def variance(engine: Engine, reference: Transformers, runs: int) -> dict[str, Any]:
    result = {}
    for kind in ("fixed", "uniform", "heavy tail"):
        speeds: dict[str, list[float]] = {"static": [], "continuous": [], "transformers": []}
        for seed in range(runs):
            rng = random.Random(seed)
            lengths, inputs = output_lengths(kind, rng), prompts(rng)
            systems: dict[str, Callable[[], float]] = {
                "static": lambda i=inputs, n=lengths: run_engine(engine, i, n, batch=BATCH, continuous=False),
                "continuous": lambda i=inputs, n=lengths: run_engine(engine, i, n, batch=BATCH, continuous=True),
                "transformers": lambda i=inputs, n=lengths: reference.run(i, n, BATCH),
            }
            order = list(systems)
            for name in order[seed % len(order) :] + order[: seed % len(order)]:
                speeds[name].append(systems[name]())
        figures: dict[str, Any] = {name: median_of(values) for name, values in speeds.items()}
        continuous = figures["continuous"]["median"]
        figures["continuous_over_static"] = continuous / figures["static"]["median"]
        figures["continuous_over_transformers"] = continuous / figures["transformers"]["median"]
        figures["longest_over_mean"] = longest_over_mean(kind, runs)
        result[kind] = figures
        by_engine = result["fixed"]["continuous_over_transformers"]
        figures["batching_alone_over_transformers"] = figures["continuous_over_transformers"] / by_engine
        print(
            f"{kind}: continuous {continuous:.0f} useful tok/s, {figures['continuous_over_static']:.2f}x static "
            f"(batches' longest / mean: {figures['longest_over_mean']:.2f}), "
            f"{figures['continuous_over_transformers']:.2f}x transformers.generate "
            f"({figures['batching_alone_over_transformers']:.2f}x by batching alone)",
            flush=True,
        )
    return result


def longest_over_mean(kind: str, runs: int) -> float:
    """The bound on static batching's loss: steps that its batches take over steps that the tokens need."""
    ratios = []
    for seed in range(runs):
        lengths = output_lengths(kind, random.Random(seed))
        batches = [lengths[start : start + BATCH] for start in range(0, NUM_REQUESTS, BATCH)]
        ratios.append(sum(max(one) for one in batches) / sum(statistics.mean(one) for one in batches))
    return statistics.median(ratios)


def concurrency(engine: Engine, runs: int) -> dict[str, Any]:
    speeds: dict[int, list[float]] = {batch: [] for batch in CONCURRENCIES}
    for seed in range(runs):
        rng = random.Random(seed)
        inputs = prompts(rng)
        for batch in CONCURRENCIES if seed % 2 == 0 else reversed(CONCURRENCIES):
            num = max(4, min(NUM_REQUESTS, 2 * batch))
            lengths = [MEAN_OUTPUT] * num
            speeds[batch].append(run_engine(engine, inputs[:num], lengths, batch=batch, continuous=True))
    alone = statistics.median(speeds[1])
    result = {
        str(batch): median_of(values) | {"over_batch_1": statistics.median(values) / alone}
        for batch, values in speeds.items()
    }
    for batch, figures in result.items():
        print(f"at most {batch} running: {figures['median']:.0f} tok/s, {figures['over_batch_1']:.2f}x", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    checkpoint = make_checkpoint(Path("out/checkpoints"), args.shape)
    engine, reference = make_engine(checkpoint), Transformers(checkpoint)
    rng = random.Random(99)
    for warm_up in (True, False):
        run_engine(engine, prompts(rng)[:8], [4] * 8, batch=8, continuous=warm_up)
    reference.run(prompts(rng)[:8], [4] * 8, 8)
    save(
        "batching",
        {
            "shape": args.shape,
            "workload": f"{NUM_REQUESTS} requests, {INPUT} tokens in, {MEAN_OUTPUT} out on average, {BATCH} at once, bf16",
            "by_output_length": variance(engine, reference, args.runs),
            "by_concurrency": concurrency(engine, args.runs),
        },
    )


if __name__ == "__main__":
    main()

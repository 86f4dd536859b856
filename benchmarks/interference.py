"""What a 10,000-token prompt does to 50 streams that are decoding, with and without chunked prefill.

    python benchmarks/interference.py [--shape small] [--runs 3]

Per token budget: inter-token latency of the 50 streams while the prompt is computed, and its time to first token.
Writes results/interference.json.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from common import make_checkpoint, save
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.request import Request
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.engine.engine import Engine
from flyball_runtime.engine.runner import start_engine
from machine import median_of

NUM_STREAMS, PROMPT_LEN, MAX_MODEL_LEN = 50, 10_000, 10_240
BUDGETS = (128, 512, 2048)


def make_engine(checkpoint: Path, budget: int | None) -> Engine:
    """``budget`` tokens a step; None computes a prompt whole."""
    return start_engine(
        EngineConfig(
            model=str(checkpoint),
            served_model_name="m",
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=NUM_STREAMS + 1,
            max_num_batched_tokens=budget or MAX_MODEL_LEN,
            enable_chunked_prefill=budget is not None,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=2**30,
        )
    )


def request(name: str, num_tokens: int, max_tokens: int, rng: random.Random) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[rng.randrange(10, 8000) for _ in range(num_tokens)],
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
    )


def measure(engine: Engine, seed: int) -> tuple[list[float], float]:
    """Return the gaps of all streams until the prompt's first token, in seconds, and the time to that token."""
    rng = random.Random(seed)
    streams = [f"stream {index}" for index in range(NUM_STREAMS)]
    for name in streams:
        engine.submit(request(name, 32, 200, rng))
    for _ in range(8):
        engine.step()
    engine.submit(request("long", PROMPT_LEN, 1, rng))
    gaps: list[float] = []
    start_s = last_s = time.perf_counter()
    ended = False
    while not ended:
        output = engine.step()
        now_s = time.perf_counter()
        gaps += [now_s - last_s] * sum(name != "long" for name in output.request_ids)
        ended = any(ending.request_id == "long" for ending in output.endings)
        last_s = now_s
    for name in streams:
        engine.abort(name)
    return gaps, last_s - start_s


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    checkpoint = make_checkpoint(Path("out/checkpoints"), args.shape)
    result: dict[str, Any] = {}
    for budget in (None, *BUDGETS):
        engine = make_engine(checkpoint, budget)
        runs = [measure(engine, seed) for seed in range(args.runs)]
        figures = {
            "itl_p50_s": median_of(percentile(gaps, 50) for gaps, _ in runs),
            "itl_p99_s": median_of(percentile(gaps, 99) for gaps, _ in runs),
            "ttft_of_long_prompt_s": median_of(ttft_s for _, ttft_s in runs),
        }
        name = "whole prompt in one step" if budget is None else f"chunks, {budget} tokens a step"
        result[name] = figures
        print(f"{name}: " + ", ".join(f"{key} {value['median']:.3f}" for key, value in figures.items()), flush=True)
    whole = result["whole prompt in one step"]["itl_p99_s"]["median"]
    for figures in result.values():
        figures["itl_p99_whole_over_this"] = whole / figures["itl_p99_s"]["median"]
    save(
        "interference", {"shape": args.shape, "num_streams": NUM_STREAMS, "prompt_len": PROMPT_LEN, "by_budget": result}
    )


if __name__ == "__main__":
    main()

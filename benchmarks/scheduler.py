"""Time that scheduling takes from a step: ``plan()`` + ``commit()`` at a steady number of decoding sequences.

    python benchmarks/scheduler.py [--num-seqs 256] [--steps 4000]

The load turns over: prompts of 16 to 2000 tokens and outputs of 1 to 400, both uniform, a queue that never runs empty,
tokens that never repeat (so every full block is hashed and registered, and the cache evicts all the time). Timed per
step: plan and commit, hashing and admissions included. The model is free and samples a constant.
"""

import argparse
import gc
import itertools
import platform
import random
import statistics
import subprocess
import time
from pathlib import Path

from flyball_runtime.core.clock import MonotonicClock
from flyball_runtime.core.request import Request
from flyball_runtime.core.sampling import SamplingParams
from flyball_runtime.core.sequence import Sequence
from flyball_runtime.kv_cache import KVCache
from flyball_runtime.scheduler import Scheduler, SchedulerConfig

MAX_MODEL_LEN = 4096
BLOCK_SIZE = 16


def machine() -> str:
    """Name processor, Python and commit, so that a figure says where it comes from."""
    cpu = next((x.split(": ")[1] for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "?")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    return f"{cpu}, Python {platform.python_version()}, commit {commit.strip()}"


def make_sequence(index: int, rng: random.Random, tokens: "itertools.count[int]") -> Sequence:
    prompt = [next(tokens) % 2**31 for _ in range(rng.randint(16, 2000))]
    sampling = SamplingParams(max_tokens=rng.randint(1, 400), ignore_eos=True)
    request = Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling)
    return Sequence(request, max_model_len=MAX_MODEL_LEN, eos_token_ids=frozenset())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4000)
    args = parser.parse_args()

    rng, tokens = random.Random(0), itertools.count()
    num_blocks = args.num_seqs * 2400 // BLOCK_SIZE
    config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=args.num_seqs, max_num_batched_tokens=8192)
    scheduler = Scheduler(config, KVCache(num_blocks, BLOCK_SIZE), MonotonicClock())
    num_submitted = 0
    durations: list[float] = []
    num_decodes: list[int] = []
    num_preempted = 0
    gc.collect()
    gc.freeze()
    for step in range(args.steps + 500):
        while scheduler.num_waiting < 8:
            scheduler.submit(make_sequence(num_submitted, rng, tokens))
            num_submitted += 1
        start_s = time.perf_counter()
        plan = scheduler.plan()
        planned_s = time.perf_counter()
        assert plan is not None
        sampled = [7] * sum(plan.samples)
        ran_s = time.perf_counter()
        scheduler.commit(plan, sampled)
        end_s = time.perf_counter()
        if step >= 500:  # the first ones fill the batch
            durations.append((planned_s - start_s) + (end_s - ran_s))
            num_decodes.append(plan.num_decodes)
            num_preempted += len(plan.preempted)

    quantiles = statistics.quantiles(durations, n=100)
    print(machine())
    print(
        f"{args.steps} steps, {statistics.mean(num_decodes):.0f} decodes a step, "
        f"{num_submitted - scheduler.num_waiting - scheduler.num_running} requests finished, {num_preempted} preempted"
    )
    print(
        f"plan + commit: median {quantiles[49] * 1e6:.0f} us, mean {statistics.mean(durations) * 1e6:.0f} us, "
        f"p99 {quantiles[98] * 1e6:.0f} us"
    )


if __name__ == "__main__":
    main()

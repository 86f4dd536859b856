"""Time that scheduling takes from a step: ``plan()`` + ``commit()`` at a steady number of decoding sequences.

    python benchmarks/scheduler.py [--num-seqs 256] [--steps 4000] [--runs 5] [--hash-in-step]

The load turns over: prompts of 16 to 2000 tokens and outputs of 1 to 400, both uniform, a queue that never runs empty,
tokens that never repeat (so every full block is registered, and the cache evicts all the time). Timed per step: plan and
commit, with admissions and the hashing of outputs. Prompts come hashed, as the API process sends them; --hash-in-step
leaves that to admission, as in a script. The model is free and samples a constant. Each run has a seed of its own; what is
reported is the median of the runs. Writes results/scheduler.json.
"""

import argparse
import gc
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from common import save
from flyball_runtime.core.request import Request, Sequence
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.kv_cache import KVCache, hash_prompt
from flyball_runtime.scheduler import Scheduler, SchedulerConfig

MAX_MODEL_LEN = 4096
BLOCK_SIZE = 16
WARMUP_STEPS = 500


def make_sequences(rng: random.Random, hash_in_step: bool) -> Iterator[Sequence]:
    tokens = itertools.count()
    for number in itertools.count():
        prompt = list(itertools.islice(tokens, rng.randint(16, 2000)))
        sampling = SamplingParams(max_tokens=rng.randint(1, 400), ignore_eos=True)
        hashes = [] if hash_in_step else hash_prompt(prompt, BLOCK_SIZE)
        request = Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling, block_hashes=hashes)
        yield Sequence(request, max_model_len=MAX_MODEL_LEN, eos_token_ids=frozenset())


class TimedStep(NamedTuple):
    """What is kept of a step. Not the plan: thousands of them would be walked by the garbage collector, in later steps."""

    num_decodes: int
    num_prompts: int
    seconds: float


def timed_step(scheduler: Scheduler) -> TimedStep:
    """Take a step; time plan and commit."""
    start_s = time.perf_counter()
    plan = scheduler.plan()
    planned_s = time.perf_counter()
    assert plan is not None
    sampled = [7] * sum(plan.samples)
    ran_s = time.perf_counter()
    scheduler.commit(plan, sampled)
    seconds = (planned_s - start_s) + (time.perf_counter() - ran_s)
    return TimedStep(plan.num_decodes, len(plan.sequences) - plan.num_decodes, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--hash-in-step", action="store_true")
    args = parser.parse_args()

    gc.freeze()
    runs = [run(seed, args.num_seqs, args.steps, args.hash_in_step) for seed in range(args.runs)]
    save(
        "scheduler",
        {
            "num_seqs": args.num_seqs,
            "hash_in_step": args.hash_in_step,
            "all_steps": report("all steps", runs),
            "steps_that_admit_nobody": report(
                "steps that admit nobody", [[step for step in steps if not step.num_prompts] for steps in runs]
            ),
        },
    )


def run(seed: int, num_seqs: int, num_steps: int, hash_in_step: bool) -> list[TimedStep]:
    """The steps of one run, behind its warm-up."""
    config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=num_seqs, max_num_batched_tokens=8192)
    scheduler = Scheduler(config, KVCache(num_seqs * 2400 // BLOCK_SIZE, BLOCK_SIZE))
    sequences = make_sequences(random.Random(seed), hash_in_step)
    steps = []
    for _ in range(WARMUP_STEPS + num_steps):
        while scheduler.num_waiting < 8:
            scheduler.submit(next(sequences))
        steps.append(timed_step(scheduler))
    return steps[WARMUP_STEPS:]


def report(name: str, runs: list[list[TimedStep]]) -> dict[str, Any]:
    """Print and return the quantiles of each run, and the median of each over the runs."""
    quantiles_s = [statistics.quantiles([step.seconds for step in steps], n=100) for steps in runs]
    steps = [step for run in runs for step in run]
    num_decodes = statistics.mean(step.num_decodes for step in steps)
    num_prompts = statistics.mean(step.num_prompts for step in steps)
    seconds = {
        name: _over_runs([of_run[percent - 1] for of_run in quantiles_s])
        for name, percent in (("median", 50), ("p90", 90), ("p99", 99))
    }
    print(
        f"{name}: {len(steps)}, each {num_decodes:.0f} decodes and {num_prompts:.1f} prompts; plan + commit median "
        f"{seconds['median']['median'] * 1e6:.0f} us, p99 {seconds['p99']['median'] * 1e6:.0f} us"
    )
    means = {"mean_decodes": num_decodes, "mean_prompts": num_prompts}
    return {"steps": len(steps), **means, "plan_and_commit_s": seconds}


def _over_runs(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "runs": values}


if __name__ == "__main__":
    main()

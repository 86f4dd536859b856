"""Time that the governor takes from a step: learn from it, and find the chunk of the next one.

    python benchmarks/governor.py [--num-seqs 256] [--steps 20000]

Steps as a full replica has them: all sequences decode, and four steps of ten have a chunk of a prompt, at any context
length. Timed per step: ``observe()`` of the step, ``predict()`` and one ``chunk()`` under a step-time target. The target
of the project is 60 us a step. Writes results/governor.json.
"""

import argparse
import random
import statistics
import time
from types import SimpleNamespace

from common import save
from flyball_protocol import StepModel
from flyball_runtime.governor import Governor, work_of

PLANT = StepModel(base_s=0.011, token_s=6e-5, knee_tokens=160, context_token_s=8e-8, attention_pair_s=3e-9)
WARMUP_STEPS = 500


def make_step(rng: random.Random, num_seqs: int) -> SimpleNamespace:
    chunk = rng.randint(16, 512) if rng.random() < 0.4 else 0
    start = rng.choice((0, 0, 512, 2048, 8000))
    decodes = rng.randint(num_seqs * 3 // 4, num_seqs)
    return SimpleNamespace(
        num_tokens=decodes + chunk,
        num_decodes=decodes,
        num_context_tokens=int(decodes * rng.uniform(600, 1800)),
        prefill_work=chunk * start + chunk * (chunk + 1) // 2,
    )


def timed_step(governor: Governor, rng: random.Random, num_seqs: int) -> float:
    """Return the seconds that the governor took."""
    step, following = make_step(rng, num_seqs), make_step(rng, num_seqs)
    work = (step.num_tokens - step.num_decodes, step.num_decodes, step.num_context_tokens, step.prefill_work)
    seconds = PLANT.predict(*work) * max(0.2, rng.gauss(1.0, 0.05))
    start_s = time.perf_counter()
    governor.observe(work_of(step), seconds)
    governor.predict(work_of(following))
    governor.chunk(following, 1000, 2048)
    return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20000)
    args = parser.parse_args()
    rng, governor = random.Random(0), Governor()
    governor.target_s = 0.05
    times_us = [timed_step(governor, rng, args.num_seqs) * 1e6 for _ in range(args.steps)][WARMUP_STEPS:]
    cuts = statistics.quantiles(times_us, n=100)
    result = {
        "num_seqs": args.num_seqs,
        "mean_us": round(statistics.fmean(times_us), 1),
        "p50_us": round(cuts[49], 1),
        "p95_us": round(cuts[94], 1),
        "p99_us": round(cuts[98], 1),
    }
    print(f"governor at {args.num_seqs} sequences: mean {result['mean_us']} us a step, p99 {result['p99_us']} us")
    save("governor", result)


if __name__ == "__main__":
    main()

"""The best fixed limits, found by trying all of a grid: what no tuner can know beforehand."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context

from msgspec import structs

from flyball_simulation.controllers import Static
from flyball_simulation.result import Result, Tried
from flyball_simulation.workload import Workload
from flyball_simulation.world import Setup, simulate

SEQS = (8, 16, 32, 64, 128, 256, 512)
TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)

Limits = tuple[int, int]
"""Sequences and tokens."""


def grid() -> list[Limits]:
    """Return every pair of the grid that a replica can be started with."""
    return [(seqs, tokens) for seqs in SEQS for tokens in TOKENS if tokens >= seqs]


def best_static(
    setup: Setup, workload: Workload, *, seed: int, duration_s: float, num_processes: int | None = None
) -> Result:
    """Return the run of the best limits, with everything that was tried as its ``sweep``.

    Of equally good limits the smallest token budget is taken, then the fewest sequences.
    """
    tried = sweep(setup, workload, grid(), seed=seed, duration_s=duration_s, num_processes=num_processes)
    seqs, tokens = best(tried)
    result = run_static(setup, workload, (seqs, tokens), seed, duration_s)
    result.controller = "oracle"
    result.sweep = tried
    return result


def best(tried: Sequence[Tried]) -> Limits:
    """Return the limits of the largest share of good requests."""
    top = max(tried, key=lambda one: (one.share_good, -one.max_num_batched_tokens, -one.max_num_seqs))
    return top.max_num_seqs, top.max_num_batched_tokens


def sweep(
    setup: Setup,
    workload: Workload,
    limits: Sequence[Limits],
    *,
    seed: int,
    duration_s: float,
    num_processes: int | None = None,
) -> list[Tried]:
    """Run the workload under each of the limits, on as many cores as there are."""
    num_processes = min(len(limits), num_processes or len(os.sched_getaffinity(0)))
    if num_processes == 1:
        return [_share(setup, workload, one, seed, duration_s) for one in limits]
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        return list(
            pool.map(_share, repeat(setup), repeat(workload), limits, repeat(seed), repeat(duration_s), chunksize=4)
        )


def run_static(setup: Setup, workload: Workload, limits: Limits, seed: int, duration_s: float) -> Result:
    """Run with fixed limits."""
    fixed = structs.replace(setup, max_num_seqs=limits[0], max_num_batched_tokens=limits[1])
    return simulate(fixed, workload, Static(), label="static", seed=seed, duration_s=duration_s)


def _share(setup: Setup, workload: Workload, limits: Limits, seed: int, duration_s: float) -> Tried:
    result = run_static(setup, workload, limits, seed, duration_s)
    return Tried(max_num_seqs=limits[0], max_num_batched_tokens=limits[1], share_good=result.share_good)

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
from flyball_simulation.world import Setup, World, simulate

SEQS = (8, 16, 32, 64, 128, 256, 512)
TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
FIRST_TOKENS = (384, 256, 512, 192)
"""Tried first, with many sequences: where the best limits usually are, so that others can be given up early."""

HANDS = 4

Limits = tuple[int, int]
"""Sequences and tokens."""


def grid(max_tokens: int = TOKENS[-1]) -> list[Limits]:
    """Return every pair of the grid that a replica can be started with, in the order in which they are best tried."""
    pairs = [(seqs, tokens) for seqs in SEQS for tokens in TOKENS if seqs <= tokens <= max_tokens]
    places = {tokens: place for place, tokens in enumerate(FIRST_TOKENS)}
    return sorted(pairs, key=lambda one: (places.get(one[1], len(places)), -one[0], one[1]))


def best_static(
    setup: Setup, workload: Workload, *, seed: int, duration_s: float, num_processes: int | None = None
) -> Result:
    """Return the run of the best limits, with everything that was tried as its ``sweep``.

    Of equally good limits the smallest token budget is taken, then the fewest sequences. A run is given up as soon as it has
    more bad requests than the best one before had in all; its share in ``sweep`` is then that of the requests that ended.
    """
    tried = sweep(setup, workload, grid(), seed=seed, duration_s=duration_s, num_processes=num_processes)
    result = run_static(setup, workload, best(tried), seed, duration_s)
    result.controller = "oracle"
    result.sweep = tried
    return result


def best(tried: Sequence[Tried]) -> Limits:
    """Return the limits of the largest share of good requests, of the runs that were not given up."""
    whole = [one for one in tried if not one.given_up]
    top = max(whole, key=lambda one: (one.share_good, -one.max_num_batched_tokens, -one.max_num_seqs))
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
    """Run the workload under each of the limits, on as many cores as there are.

    The limits are dealt out to HANDS processes, each of which gives runs up by what it has seen itself, so the result depends
    neither on how fast they are nor on how many cores there are.
    """
    num_processes = min(HANDS, num_processes or len(os.sched_getaffinity(0)))
    hands = [list(limits[i::HANDS]) for i in range(HANDS) if limits[i::HANDS]]
    work = (repeat(setup), repeat(workload), hands, repeat(seed), repeat(duration_s))
    if num_processes == 1:
        return [one for hand in map(_sweep, *work) for one in hand]
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        return [one for hand in pool.map(_sweep, *work) for one in hand]


def run_static(
    setup: Setup, workload: Workload, limits: Limits, seed: int, duration_s: float, max_bad: int | None = None
) -> Result:
    """Run with fixed limits."""
    return simulate(
        fixed(setup, limits), workload, Static(), label="static", seed=seed, duration_s=duration_s, max_bad=max_bad
    )


def world_of(setup: Setup, workload: Workload, limits: Limits, seed: int, max_bad: int) -> World:
    """Return a world with fixed limits that is given up at more than ``max_bad`` bad requests."""
    return World(fixed(setup, limits), workload, Static(), seed, max_bad)


def fixed(setup: Setup, limits: Limits) -> Setup:
    """Return a setup that starts with these limits."""
    return structs.replace(setup, max_num_seqs=limits[0], max_num_batched_tokens=limits[1], prior=None)


def _sweep(setup: Setup, workload: Workload, limits: Sequence[Limits], seed: int, duration_s: float) -> list[Tried]:
    fewest, tried = len(workload), []
    for one in limits:
        result = run_static(setup, workload, one, seed, duration_s, fewest)
        given_up = result.num_requests < len(workload)
        if not given_up:
            fewest = min(fewest, result.num_requests - result.num_good)
        tried.append(
            Tried(
                max_num_seqs=one[0],
                max_num_batched_tokens=one[1],
                share_good=result.share_good,
                given_up=given_up,
            )
        )
    return tried

"""Which objectives are feasible, with how many replicas and which limits: from runs under many fixed limits.

A run does not depend on the objectives, so one run per limits and number of replicas answers for all objectives.
"""

import math
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from typing import Any, NamedTuple

from msgspec import structs

from flyball_simulation.chart import GREY, RED, new_figure, save
from flyball_simulation.controllers import Static
from flyball_simulation.oracle import Limits
from flyball_simulation.result import Feasible
from flyball_simulation.workload import Workload
from flyball_simulation.world import Setup, World

SHARE = 0.95
"""Of the requests, that have to be good for an objective to be feasible."""

GRID: tuple[Limits, ...] = tuple(
    (seqs, tokens) for tokens in (128, 256, 384, 512, 1024, 2048) for seqs in (32, 256) if seqs <= tokens or seqs == 32
)

Point = tuple[float, float]
"""TTFT and the request's own ITL p95, in seconds; infinite for a failed request."""


class Explored(NamedTuple):
    """A run under fixed limits."""

    replicas: int
    limits: Limits
    points: list[Point]


class Corner(NamedTuple):
    """The least ITL objective that is feasible beside a TTFT objective, and the limits for it."""

    ttft_s: float
    itl_s: float
    limits: Limits


def explore(setup: Setup, workload: Workload, *, seed: int, num_processes: int | None = None) -> list[Explored]:
    """Run the workload with 1 to ``setup.replicas`` replicas, under all limits of GRID."""
    jobs = [(replicas, limits) for replicas in range(1, setup.replicas + 1) for limits in GRID]
    num_processes = min(len(jobs), num_processes or len(os.sched_getaffinity(0)))
    if num_processes == 1:
        return [_explore(setup, workload, job, seed) for job in jobs]
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_explore, repeat(setup), repeat(workload), jobs, repeat(seed)))


def feasible(explored: Sequence[Explored], setup: Setup) -> list[Feasible]:
    """Return, for each number of replicas, the limits with the most good requests under the setup's objectives."""
    found = []
    for replicas in sorted({one.replicas for one in explored}):
        shares = {one.limits: _share(one.points, setup) for one in explored if one.replicas == replicas}
        limits = max(shares, key=lambda one: shares[one])
        found.append(
            Feasible(
                replicas=replicas,
                max_num_seqs=limits[0],
                max_num_batched_tokens=limits[1],
                share_good=round(shares[limits], 6),
                is_feasible=shares[limits] >= SHARE,
            )
        )
    return found


def frontier(explored: Sequence[Explored], replicas: int, ttft_s: Sequence[float]) -> list[Corner]:
    """Return the least feasible ITL objective for each of the TTFT objectives that some limits allow."""
    corners = []
    for bound_s in ttft_s:
        least = [(_least_itl(one.points, bound_s), one.limits) for one in explored if one.replicas == replicas]
        itl_s, limits = min(least)
        if itl_s < math.inf:
            corners.append(Corner(bound_s, itl_s, limits))
    return corners


def write_chart(explored: Sequence[Explored], setup: Setup, path: str) -> None:
    """Draw the frontier of each number of replicas: what lies above a line is feasible."""
    figure = new_figure(9, 6)
    axes = figure.subplots()
    ttft_s = _range([point[0] for one in explored for point in one.points])
    for replicas in sorted({one.replicas for one in explored}):
        corners = frontier(explored, replicas, ttft_s)
        if corners:
            _draw(axes, corners, f"{replicas} replica{'s' if replicas > 1 else ''}")
    wanted = setup.objectives
    if wanted.ttft_s is not None and wanted.itl_s is not None:
        axes.plot(
            wanted.ttft_s * 1000, wanted.itl_s * 1000, "*", markersize=16, color=RED, label="the manifest's objectives"
        )
    axes.set(
        title=f"Objectives that {SHARE:.0%} of the requests meet on {setup.name}: on and above a line",
        xlabel="TTFT objective, ms",
        ylabel="ITL objective, ms",
        xscale="log",
        ylim=(0, None),
    )
    axes.grid(alpha=0.3, color=GREY)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    save(figure, path)


def _draw(axes: Any, corners: Sequence[Corner], label: str) -> None:
    """Draw a frontier, with its limits where they change."""
    xs, ys = [one.ttft_s * 1000 for one in corners], [one.itl_s * 1000 for one in corners]
    (line,) = axes.step(xs, ys, where="post", label=label)
    shown = None
    for corner, x, y in zip(corners, xs, ys, strict=True):
        if corner.limits != shown:
            text = f"{corner.limits[0]} seqs, {corner.limits[1]} tokens"
            axes.annotate(text, (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7, color=line.get_color())
        shown = corner.limits


def _explore(setup: Setup, workload: Workload, job: tuple[int, Limits], seed: int) -> Explored:
    replicas, limits = job
    fixed = structs.replace(
        setup, replicas=replicas, max_num_seqs=limits[0], max_num_batched_tokens=limits[1], prior=None
    )
    world = World(fixed, workload, Static(), seed)
    world.run()
    points = [(math.inf if one.ttft_s is None else one.ttft_s, one.itl_p95_s or 0.0) for one in world.outcomes()]
    return Explored(replicas, limits, points)


def _share(points: Sequence[Point], setup: Setup) -> float:
    bounds = setup.objectives
    good = sum(bounds.met_by(None if ttft_s == math.inf else ttft_s, itl_s) for ttft_s, itl_s in points)
    return good / len(points) if points else 1.0


def _least_itl(points: Sequence[Point], ttft_s: float) -> float:
    """Return the least bound that, with the one on TTFT, enough requests meet; infinite if none does."""
    gaps = sorted(itl_s for first_s, itl_s in points if first_s <= ttft_s)
    needed = math.ceil(SHARE * len(points))
    return gaps[needed - 1] if 0 < needed <= len(gaps) else math.inf


def _range(values: Sequence[float]) -> list[float]:
    """Return 40 TTFT objectives on a logarithmic scale, up to where all requests of some run would meet them."""
    known = sorted(value for value in values if value < math.inf)
    if not known:
        return []
    low, high = max(0.001, known[len(known) // 20]), max(0.002, known[-1])
    return [low * (high / low) ** (i / 39) for i in range(40)]

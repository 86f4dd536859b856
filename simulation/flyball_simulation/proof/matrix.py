"""Runs all contenders on all cells, on all cores, and keeps what was run."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from msgspec import Struct, structs

from flyball_simulation.oracle import Limits
from flyball_simulation.proof import contenders, search
from flyball_simulation.proof.cells import Cell
from flyball_simulation.proof.contenders import FIXED, Run

CONTENDERS = ("auto", "vllm-default", "rules", "aimd")
ORACLE, SINGLE, PHASE_1 = "oracle", "best single", "tuned on phase 1"


class Plan(NamedTuple):
    """How much is run.

    Attributes:
        seeds: for the tuner and all fixed limits.
        others: seeds for the other tuners.
        processes: None: one for each core.
        cached: run nothing; take what is there.
    """

    seeds: Sequence[int]
    others: Sequence[int]
    folder: Path
    processes: int | None = None
    cached: bool = False


class Job(Struct, frozen=True, kw_only=True):
    """One run, under fixed limits or with a contender that sets them itself."""

    cell: Cell
    contender: str
    seed: int
    limits: Limits | None = None


class Matrix(Struct, kw_only=True):
    """Everything that was run.

    Attributes:
        cells: those with a run of the tuner, the oracle and the best single limits at least.
        missing: names of the others.
        seeds: those that some cell has.
        best: the oracle's limits, by cell and seed.
        single: the best single fixed limits over the cells.
        phase_1: the best limits for the first phase alone, of cells with several.
    """

    cells: list[Cell]
    seeds: list[int]
    missing: list[str] = []
    runs: list[Run] = []
    best: dict[tuple[str, int], Limits] = {}
    single: Limits = (0, 0)
    phase_1: dict[str, Limits] = {}

    def of(self, cell: str, contender: str) -> list[Run]:
        return [one for one in self.runs if one.cell == cell and one.contender == contender]

    def share(self, cell: str, contender: str) -> float:
        return fmean(one.share_good for one in self.of(cell, contender))


def compute(cells: Sequence[Cell], plan: Plan) -> Matrix:
    """Run the matrix; runs that the folder has already are taken from there."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    matrix = Matrix(cells=list(cells), seeds=[])
    if plan.cached:
        _read_all(matrix, plan)
        return matrix
    with processes(plan) as pool:
        _wait([future for cell in sorted(cells, key=_is_plain) for future in _begin(pool, cell, plan)])
        _read_limits(matrix, plan)
        jobs = [*_fixed_jobs(matrix, plan), *_tuner_jobs(matrix.cells, plan)]
        _wait([pool.submit(_run, job, plan.folder) for job in jobs])
    _read_all(matrix, plan)
    return matrix


def compute_tuners(cells: Sequence[Cell], plan: Plan) -> Matrix:
    """Run those that need no search: the tuners, and vLLM's defaults. ``best`` and what else a search finds stays empty."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    jobs = list(_tuner_jobs(cells, plan))
    if not plan.cached:
        with processes(plan) as pool:
            _wait([pool.submit(_run, job, plan.folder) for job in jobs])
    found = [contenders.known(job.cell, job.contender, job.seed, None, plan.folder) for job in jobs]
    runs = [run for run in found if run is not None]
    names = {run.cell for run in runs}
    return Matrix(
        cells=[cell for cell in cells if cell.name in names],
        seeds=sorted({run.seed for run in runs}),
        missing=[cell.name for cell in cells if cell.name not in names],
        runs=runs,
    )


def processes(plan: Plan) -> ProcessPoolExecutor:
    """Return as many processes as the plan asks for."""
    return ProcessPoolExecutor(plan.processes or len(os.sched_getaffinity(0)), get_context("spawn"))


def first_phase(cell: Cell) -> Cell:
    """Return a cell of the first phase alone, as long as it was."""
    phase = cell.phases[0]
    return structs.replace(
        cell,
        name=f"{cell.name}: phase 1",
        phases=(structs.replace(phase, seconds=1.0),),
        minutes=cell.minutes * phase.seconds,
    )


def _is_plain(cell: Cell) -> bool:
    """Return whether no target is about this cell alone: others are run first, if not all get done."""
    return cell.load in (0.7, 1.2) and cell.name.endswith(f"load {cell.load:g}")


def _begin(pool: ProcessPoolExecutor, cell: Cell, plan: Plan) -> Iterator[Future[Any]]:
    """Start what is told of a cell first: the tuner against the best fixed limits."""
    known = search.found(cell, plan.seeds[0], plan.folder)
    near = None if known is None else known.best
    for seed in plan.seeds:
        yield pool.submit(_run, Job(cell=cell, contender="auto", seed=seed), plan.folder)
        yield pool.submit(search.find, cell, seed, plan.folder, near)
    if len(cell.phases) > 1:
        yield pool.submit(search.find, first_phase(cell), plan.seeds[0], plan.folder)


def _tuner_jobs(cells: Sequence[Cell], plan: Plan) -> Iterator[Job]:
    for seed in plan.seeds:
        for cell in cells:
            for name in CONTENDERS if seed in plan.others else CONTENDERS[:2]:
                yield Job(cell=cell, contender=name, seed=seed)


def _fixed_jobs(matrix: Matrix, plan: Plan) -> Iterator[Job]:
    for seed in plan.seeds:
        for cell in matrix.cells:
            for limits in {matrix.best[cell.name, seed], matrix.single}:
                yield Job(cell=cell, contender=FIXED, seed=seed, limits=limits)
            if cell.name in matrix.phase_1 and seed in plan.others:
                yield Job(cell=cell, contender=FIXED, seed=seed, limits=matrix.phase_1[cell.name])


def _wait(futures: Sequence[Future[Any]]) -> None:
    for done, future in enumerate(as_completed(futures), start=1):
        future.result()
        if sys.stderr.isatty() or done % 10 == 0:
            print(f"{done} of {len(futures)} runs", end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr)


def _run(job: Job, folder: Path) -> None:
    contenders.cached(job.cell, job.contender, job.seed, job.limits, folder)


def _read_limits(matrix: Matrix, plan: Plan) -> None:
    """Take in what the searches found; a cell without any is left out."""
    shares: dict[Limits, list[float]] = {limits: [] for limits in search.SINGLES}
    for cell in list(matrix.cells):
        found = {seed: one for seed in plan.seeds if (one := search.found(cell, seed, plan.folder)) is not None}
        if not found:
            _leave_out(matrix, cell)
            continue
        matrix.best |= {(cell.name, seed): one.best for seed, one in found.items()}
        for limits in shares:
            shares[limits].append(fmean(one.shares[limits] for one in found.values()))
        if len(cell.phases) > 1:
            early = search.found(first_phase(cell), plan.seeds[0], plan.folder)
            if early is not None:
                matrix.phase_1[cell.name] = early.best
    if matrix.cells:
        matrix.single = max(shares, key=lambda limits: fmean(shares[limits]))


def _leave_out(matrix: Matrix, cell: Cell) -> None:
    matrix.cells.remove(cell)
    matrix.missing.append(cell.name)


def _read_all(matrix: Matrix, plan: Plan) -> None:
    """Take in all runs there are, of the seeds for which the tuner can be compared."""
    matrix.best, matrix.phase_1 = {}, {}
    _read_limits(matrix, plan)
    for cell in list(matrix.cells):
        runs = [run for seed in plan.seeds for run in _compared(matrix, cell, seed, plan.folder)]
        matrix.runs += runs
        if not runs:
            _leave_out(matrix, cell)
    matrix.seeds = sorted({run.seed for run in matrix.runs})


def _compared(matrix: Matrix, cell: Cell, seed: int, folder: Path) -> list[Run]:
    """Return the runs of a seed; none if one of the three that are compared is missing."""
    if (cell.name, seed) not in matrix.best:
        return []
    limits: Mapping[str, Limits | None] = {
        **dict.fromkeys(CONTENDERS),
        ORACLE: matrix.best[cell.name, seed],
        SINGLE: matrix.single,
        **({PHASE_1: matrix.phase_1[cell.name]} if cell.name in matrix.phase_1 else {}),
    }
    found = {name: contenders.known(cell, FIXED if one else name, seed, one, folder) for name, one in limits.items()}
    if not all(found[name] for name in ("auto", ORACLE, SINGLE)):
        return []
    return [structs.replace(run, contender=name) for name, run in found.items() if run is not None]

"""Runs all contenders on all cells, on all cores, and keeps what was run."""

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import msgspec
from msgspec import Struct, structs

from flyball_simulation.oracle import Limits
from flyball_simulation.proof import contenders
from flyball_simulation.proof.cells import Cell
from flyball_simulation.proof.contenders import SINGLES, Run

CONTENDERS = ("auto", "rules", "aimd", "vllm-default")
ORACLE, SINGLE, PHASE_1 = "oracle", "best single", "tuned on phase 1"


class Job(Struct, frozen=True, kw_only=True):
    """One run, or (``contender`` is None) the search for the best fixed limits."""

    cell: Cell
    contender: str | None
    seed: int
    limits: Limits | None = None


class Matrix(Struct, kw_only=True):
    """Everything that was run.

    Attributes:
        best: the oracle's limits, by cell.
        single: the best single fixed limits over the cells.
        phase_1: the best limits for the first phase alone, of cells with several.
    """

    cells: list[Cell]
    seeds: list[int]
    runs: list[Run] = []
    best: dict[str, Limits] = {}
    single: Limits = (0, 0)
    phase_1: dict[str, Limits] = {}

    def of(self, cell: str, contender: str) -> list[Run]:
        return [one for one in self.runs if one.cell == cell and one.contender == contender]

    def share(self, cell: str, contender: str) -> float:
        return fmean(one.share_good for one in self.of(cell, contender))


def compute(cells: Sequence[Cell], seeds: Sequence[int], folder: Path, num_processes: int | None = None) -> Matrix:
    """Run the matrix; runs that ``folder`` has already are taken from there."""
    matrix = Matrix(cells=list(cells), seeds=list(seeds))
    with ProcessPoolExecutor(num_processes or len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        _find_limits(matrix, pool, folder)
        jobs = [job for cell in cells for seed in seeds for job in _jobs(matrix, cell, seed)]
        found = list(_run_all(pool, jobs, folder))
    order = {job.cell.name: place for place, job in enumerate(jobs)}
    matrix.runs = sorted(
        (one for one in found if isinstance(one, Run)), key=lambda one: (order[one.cell], one.contender, one.seed)
    )
    return matrix


def first_phase(cell: Cell) -> Cell:
    """Return a cell of the first phase alone, as long as it was."""
    phase = cell.phases[0]
    return structs.replace(
        cell,
        name=f"{cell.name}: phase 1",
        phases=(structs.replace(phase, seconds=1.0),),
        minutes=cell.minutes * phase.seconds,
    )


def _find_limits(matrix: Matrix, pool: ProcessPoolExecutor, folder: Path) -> None:
    """Find the limits of the oracle, of phase 1 and of the best single, with the first seed."""
    seed = matrix.seeds[0]
    shifting = [cell for cell in matrix.cells if len(cell.phases) > 1]
    searches = [Job(cell=one, contender=None, seed=seed) for one in (*matrix.cells, *map(first_phase, shifting))]
    singles = [
        Job(cell=cell, contender=SINGLE, seed=seed, limits=limits) for cell in matrix.cells for limits in SINGLES
    ]
    shares: dict[Limits, list[float]] = {limits: [] for limits in SINGLES}
    for found in _run_all(pool, [*searches, *singles], folder):
        if isinstance(found, Run):
            shares[found.limits or (0, 0)].append(found.share_good)
        else:
            matrix.best[found[0]] = found[1]
    matrix.phase_1 = {cell.name: matrix.best.pop(first_phase(cell).name) for cell in shifting}
    matrix.single = max(SINGLES, key=lambda limits: fmean(shares[limits]))


def _jobs(matrix: Matrix, cell: Cell, seed: int) -> Iterator[Job]:
    for name in CONTENDERS:
        if name != "vllm-default" or cell.setup.name in ("a100", "h200", "l4", "cpu"):
            yield Job(cell=cell, contender=name, seed=seed)
    yield Job(cell=cell, contender=ORACLE, seed=seed, limits=matrix.best[cell.name])
    yield Job(cell=cell, contender=SINGLE, seed=seed, limits=matrix.single)
    if cell.name in matrix.phase_1:
        yield Job(cell=cell, contender=PHASE_1, seed=seed, limits=matrix.phase_1[cell.name])


Found = Run | tuple[str, Limits]


def _run_all(pool: ProcessPoolExecutor, jobs: Sequence[Job], folder: Path) -> Iterator[Found]:
    folder.mkdir(parents=True, exist_ok=True)
    futures = [pool.submit(_cached, job, folder) for job in jobs]
    for done, future in enumerate(as_completed(futures), start=1):
        yield future.result()
        if sys.stderr.isatty() or done % 20 == 0:
            print(f"{done} of {len(futures)} runs", end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr)


def _cached(job: Job, folder: Path) -> Found:
    path = folder / f"{contenders.key(job.cell, job.contender or 'search', job.seed, job.limits)}.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Run) if job.contender else _limits(job, path)
    found: Found
    if job.contender is None:
        found = (job.cell.name, contenders.find_best(job.cell, job.seed))
    else:
        found = contenders.run(job.cell, job.contender, job.seed, job.limits)
    half = path.with_suffix(f".{os.getpid()}")
    half.write_bytes(msgspec.json.encode(found))
    half.replace(path)
    return found


def _limits(job: Job, path: Path) -> Found:
    return job.cell.name, msgspec.json.decode(path.read_bytes(), type=tuple[str, Limits])[1]

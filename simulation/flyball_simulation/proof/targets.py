"""The targets of the tuner, each with what was found."""

from collections.abc import Callable, Iterator, Mapping
from statistics import fmean
from typing import NamedTuple

from flyball_simulation.proof.cells import Cell, turns_back
from flyball_simulation.proof.contenders import Run
from flyball_simulation.proof.matrix import ORACLE, SINGLE, Matrix
from flyball_simulation.proof.scenarios import Verdict
from flyball_simulation.result import Bin

AUTO = "auto"
CONVERGED = 0.95
STEADY_BINS = 5
SETTLING_S = 300.0
EQUAL = 0.995
"""Of two shares of good requests that differ by less, none is better."""


class Target(NamedTuple):
    """A demand and what was found; ``met`` is None where nothing was run that could show it."""

    number: int
    demand: str
    found: str
    met: bool | None


def targets(matrix: Matrix, verdicts: Mapping[tuple[str, str], Verdict]) -> list[Target]:
    """Return all targets. ``verdicts`` are those of the scenarios, by scenario and contender."""
    return [check(matrix, verdicts) for check in _CHECKS]


def ratio(matrix: Matrix, cell: Cell, contender: str = AUTO, to: str = ORACLE) -> float:
    """Return the share of good requests as a share of another contender's."""
    base = matrix.share(cell.name, to)
    return matrix.share(cell.name, contender) / base if base else 1.0


def _at(matrix: Matrix, load: float) -> list[Cell]:
    return [cell for cell in matrix.cells if cell.load == load and _plain(cell) and cell.trace is None]


def _plain(cell: Cell) -> bool:
    """Return whether nothing disturbs the cell."""
    setup = cell.setup
    calm = not setup.disturbances.slow_downs and setup.disturbances.noise <= 0.05 and not setup.faults.restarts
    return calm and setup.prior is None and len(cell.phases) <= 1 and cell.bursts is None


def _named(matrix: Matrix, part: str) -> list[Cell]:
    return [cell for cell in matrix.cells if part in cell.name]


def _oracle(matrix: Matrix, verdicts: Mapping[tuple[str, str], Verdict]) -> Target:
    demand = "goodput against the oracle of the cell, at 0.95 of its load: mean >= 97 %, each >= 90 %"
    found = [ratio(matrix, cell) for cell in _at(matrix, 0.95)]
    if not found:
        return Target(1, demand, "not run", None)
    traces = [f"{ratio(matrix, cell):.1%}" for cell in matrix.cells if cell.trace is not None]
    recorded = f"; recorded traffic, whose load is what it was: {', '.join(traces)}" if traces else ""
    met = fmean(found) >= 0.97 and min(found) >= 0.9
    return Target(1, demand, f"mean {fmean(found):.1%}, least {min(found):.1%}{recorded}", met)


def _single(matrix: Matrix, verdicts: Mapping[tuple[str, str], Verdict]) -> Target:
    demand = "goodput over the suite: >= 10 % above the best single fixed limits, >= 40 % above vLLM's defaults"
    names = (AUTO, SINGLE, "vllm-default")
    cells = [cell for cell in matrix.cells if all(matrix.of(cell.name, name) for name in names)]
    if not cells:
        return Target(2, demand, "not run", None)
    auto, single, default = (fmean(matrix.share(cell.name, name) for cell in cells) for name in names)
    found = f"{auto / single - 1:+.1%} and {auto / default - 1:+.1%} over {len(cells)} cells"
    return Target(2, demand, found, auto >= 1.1 * single and auto >= 1.4 * default)


def _convergence(matrix: Matrix, verdicts: Mapping[tuple[str, str], Verdict]) -> Target:
    demand = (
        "minutes until 5 minutes in a row reach 95 % of the oracle: cold <= 3, after a shift <= 2 (30 s with a prior cannot be "
        "told from these minutes)"
    )
    cold = [minutes for cell in _at(matrix, 0.95) for minutes in _minutes_to(matrix, cell, 0.0)]
    shifts = [
        minutes
        for cell in matrix.cells
        if len(cell.phases) > 1 and "overload" not in cell.name
        for start_s in cell.shift_times_s()[1:]
        for minutes in _minutes_to(matrix, cell, start_s)
    ]
    if not cold or not shifts:
        return Target(3, demand, "not run", None)
    late = sum(minutes > 3 for minutes in cold), sum(minutes > 2 for minutes in shifts)
    return Target(
        3,
        demand,
        f"at most {_minutes(max(cold))} and {_minutes(max(shifts))}; later in {late[0]} of {len(cold)} runs and after "
        f"{late[1]} of {len(shifts)} shifts",
        not any(late),
    )


def _minutes(value: float) -> str:
    return "never" if value == float("inf") else f"{value:.0f}"


def _minutes_to(matrix: Matrix, cell: Cell, start_s: float) -> Iterator[float]:
    """Yield, for each seed, how long it took from ``start_s`` until the goodput stayed near the oracle's."""
    later = [at_s for at_s in (*cell.shift_times_s(), cell.seconds) if at_s > start_s]
    oracles = {one.seed: one for one in matrix.of(cell.name, ORACLE)}
    for run in matrix.of(cell.name, AUTO):
        near = [
            _good(mine) >= CONVERGED * _good(theirs) - 0.02
            for mine, theirs in zip(run.timeline, oracles[run.seed].timeline, strict=False)
            if start_s <= mine.start_s < later[0]
        ]
        lasting = (i for i in range(len(near) - STEADY_BINS + 1) if all(near[i : i + STEADY_BINS]))
        yield float(next(lasting, float("inf")))


def _good(one: Bin) -> float:
    return one.num_good / one.num_requests if one.num_requests else 1.0


def _changes(matrix: Matrix, verdicts: Mapping[tuple[str, str], Verdict]) -> Target:
    demand = "changes: <= 6 an hour of steady load after 5 minutes, and none there and back within 10 minutes"
    cells = [cell for cell in matrix.cells if _plain(cell) and cell.minutes >= 15]
    runs = [(run, cell) for cell in cells for run in matrix.of(cell.name, AUTO)]
    if not runs:
        return Target(4, demand, "not run", None)
    late = [len({one.at_s for one in run.changes if one.at_s >= SETTLING_S}) for run, _ in runs]
    per_hour = sum(late) / sum(cell.seconds - SETTLING_S for _, cell in runs) * 3600
    turns = sum(_turns(run) for run, _ in runs)
    hour = next((one for (name, who), one in verdicts.items() if who == AUTO and name.startswith("an hour")), None)
    found = f"{per_hour:.1f} over {len(runs)} runs of 15 minutes; {turns} there and back, trials that were taken back included"
    if hour is not None:
        found += f"; over an hour: {hour.figures}"
    return Target(4, demand, found, per_hour <= 6 and turns == 0 and (hour is None or hour.passed))


def _turns(run: Run) -> int:
    names = sorted({one.replica for one in run.changes})
    found = 0
    for name in names:
        own = [one for one in run.changes if one.replica == name]
        times = [one.at_s for one in own]
        for values in (
            [float(one.limits.max_num_seqs) for one in own],
            [float(one.limits.max_num_batched_tokens) for one in own],
            [one.limits.step_time_target_ms or 0.0 for one in own],
        ):
            found += turns_back(values, times)
    return found


def _first_minutes(matrix: Matrix, verdicts: Mapping[tuple[str, str], Verdict]) -> Target:
    demand = "requests lost to the objectives in the first 15 minutes: <= 0.5 percentage points more than the oracle's"
    extra = []
    for cell in _at(matrix, 0.95):
        oracles = {one.seed: one for one in matrix.of(cell.name, ORACLE)}
        extra += [_early(oracles[run.seed]) - _early(run) for run in matrix.of(cell.name, AUTO)]
    if not extra:
        return Target(5, demand, "not run", None)
    return Target(
        5, demand, f"mean {100 * fmean(extra):+.1f} points, most {100 * max(extra):+.1f}", max(extra) <= 0.005
    )


def _early(run: Run) -> float:
    within = [one for one in run.timeline if one.start_s < 900.0]
    return sum(one.num_good for one in within) / max(1, sum(one.num_requests for one in within))


def _failures(matrix: Matrix, verdicts: Mapping[tuple[str, str], Verdict]) -> Target:
    demand = "failed requests: 0 where no replica dies (wrong tokens and memory are for real replicas to show)"
    calm = [cell for cell in matrix.cells if not cell.setup.faults.restarts]
    failed = sum(run.num_failed for cell in calm for run in matrix.of(cell.name, AUTO))
    return Target(6, demand, f"{failed}", failed == 0)


def _noise(matrix: Matrix, verdicts: Mapping[tuple[str, str], Verdict]) -> Target:
    demand = "noise of 25 % and hiccups: >= 97 % of the best fixed limits, <= 9 changes an hour"
    cells = _named(matrix, "noise 25 %")
    if not cells:
        return Target(7, demand, "not run", None)
    reached = min(ratio(matrix, cell) for cell in cells)
    per_hour = max(60 * run.num_changes / cell.minutes for cell in cells for run in matrix.of(cell.name, AUTO))
    return Target(7, demand, f"{reached:.1%}, most {per_hour:.0f} changes an hour", reached >= 0.97 and per_hour <= 9)


def _outages(matrix: Matrix, verdicts: Mapping[tuple[str, str], Verdict]) -> Target:
    demand = "metrics lost, operator down, evidence that is not a number: no raise, >= 95 % of the goodput before"
    names = ("metrics are lost", "the operator is down", "evidence that is not")
    found = [verdict for (name, who), verdict in verdicts.items() if who == AUTO and name.startswith(names)]
    if not found:
        return Target(8, demand, "not run", None)
    return Target(8, demand, "; ".join(one.figures for one in found), all(one.passed for one in found))


def _adversary(matrix: Matrix, verdicts: Mapping[tuple[str, str], Verdict]) -> Target:
    demand = "12 bursts of 60 long prompts; 1.5x overload for a third: as good as the best fixed limits, >= 85 % good"
    cells = [*_named(matrix, "bursts"), *_named(matrix, "overload")]
    if not cells:
        return Target(9, demand, "not run", None)
    shares = [matrix.share(cell.name, AUTO) for cell in cells]
    met = all(ratio(matrix, cell) >= EQUAL for cell in cells) and min(shares) >= 0.85
    ratios = ", ".join(
        f"{share:.1%} good ({ratio(matrix, cell):.2f})" for share, cell in zip(shares, cells, strict=True)
    )
    return Target(9, demand, f"{ratios} times the oracle's", met)


def _priors(matrix: Matrix, verdicts: Mapping[tuple[str, str], Verdict]) -> Target:
    demand = "a prior off by 0.5x and 2x, a co-tenant of 1.6x: >= 95 % of the oracle"
    cells = [*_named(matrix, "prior off"), *_named(matrix, "co-tenant")]
    if not cells:
        return Target(10, demand, "not run", None)
    found = [ratio(matrix, cell) for cell in cells]
    return Target(10, demand, ", ".join(f"{one:.1%}" for one in found), min(found) >= 0.95)


def _replay(matrix: Matrix, verdicts: Mapping[tuple[str, str], Verdict]) -> Target:
    demand = "every decision on record gives the same when it is replayed"
    runs = [run for run in matrix.runs if run.contender == AUTO]
    made, same = sum(run.num_decisions for run in runs), sum(run.num_replayed for run in runs)
    return Target(11, demand, f"{same} of {made}", same == made)


_CHECKS: tuple[Callable[[Matrix, Mapping[tuple[str, str], Verdict]], Target], ...] = (
    _oracle,
    _single,
    _convergence,
    _changes,
    _first_minutes,
    _failures,
    _noise,
    _outages,
    _adversary,
    _priors,
    _replay,
)

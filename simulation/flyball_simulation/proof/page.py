"""Writes the page of the proof: tables and charts of what was run, and nothing of what was not."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from flyball_simulation.chart import BLUE, GREEN, GREY, ORANGE, RED, new_figure, save
from flyball_simulation.oracle import grid
from flyball_simulation.proof.cells import Cell
from flyball_simulation.proof.contenders import Run
from flyball_simulation.proof.matrix import CONTENDERS, ORACLE, PHASE_1, SINGLE, Matrix
from flyball_simulation.proof.scenarios import Scenario, Verdict
from flyball_simulation.proof.search import SINGLES
from flyball_simulation.proof.targets import ratio, targets

COLUMNS = (ORACLE, "auto", "vllm-default", SINGLE, PHASE_1, "rules", "aimd")
OTHERS = "*rules*: Flyball's first tuner; *aimd*: additive increase, multiplicative decrease; *vllm-default*: vLLM's defaults"
COLOURS = {ORACLE: GREY, "auto": BLUE, SINGLE: GREEN, "rules": RED, "vllm-default": ORANGE}
NEAR = 0.95
EVEN = 0.005
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Student's t, two-sided 95 %, by number of values."""


class Source(NamedTuple):
    """Where a page comes from.

    Attributes:
        command: that gives the same page.
        commit: of the repository; "" if unknown.
        version: digest of the code.
    """

    command: str
    commit: str
    version: str


def write(
    folder: Path,
    matrix: Matrix,
    scenarios: Sequence[Scenario],
    verdicts: Mapping[tuple[str, str], Verdict],
    source: Source,
) -> Path:
    """Write tuning-proof.md and its charts into ``folder``; returns the page's path."""
    _draw_matrix(matrix, folder / "tuning-proof-matrix.svg")
    shifting = [cell for cell in matrix.cells if len(cell.phases) > 1]
    for cell in shifting[:1]:
        _draw_over_time(matrix, cell, folder / "tuning-proof-shift.svg")
    page = folder / "tuning-proof.md"
    page.write_text(
        "\n".join(
            [
                *_head(matrix, source),
                *_reading(matrix),
                *_targets(matrix, verdicts),
                *_matrix(matrix),
                *(["![The shift over time](tuning-proof-shift.svg)", ""] if shifting else []),
                *_changes(matrix),
                *_scenarios(scenarios, verdicts),
            ]
        )
    )
    return page


def write_tuners(folder: Path, matrix: Matrix, source: Source) -> Path:
    """Write tuning-proof-tuners.md into ``folder``; returns its path."""
    page = folder / "tuning-proof-tuners.md"
    page.write_text(
        "\n".join(
            [
                "# The tuner against other tuners, in simulation",
                "",
                *_origin(matrix, source),
                "The cells and seeds of [the tuner against an oracle](tuning-proof.md), and all seeds for everybody. A share",
                "is that of all requests that met both objectives. Intervals are 95 % over the seeds.",
                "",
                f"*auto*: the tuner of this commit; {OTHERS}.",
                "",
                *_against(matrix),
                "## Share of good requests",
                "",
                *_shares(matrix, CONTENDERS),
                *_changes(matrix),
            ]
        )
    )
    return page


def _against(matrix: Matrix) -> list[str]:
    """Compare the tuner with each of the others, seed by seed."""
    lines = []
    for name in CONTENDERS[1:]:
        gains = {cell.name: found for cell in matrix.cells if (found := _gains(matrix, cell.name, name))}
        better = sum(fmean(values) - interval(values) > 0.0 for values in gains.values())
        worse = [cell for cell, values in gains.items() if fmean(values) + interval(values) < 0.0]
        mean = fmean(fmean(values) for values in gains.values())
        lines.append(
            f"- Against *{name}*: {100 * mean:+.1f} percentage points of good requests, as a mean over the cells. By more than "
            f"the interval of the difference, it is better in {better} of {len(gains)} cells, and worse in: "
            f"{', '.join(worse) or 'none'}."
        )
    return [*lines, ""]


def _gains(matrix: Matrix, cell: str, over: str) -> list[float]:
    """Return by how much the tuner's share of good requests is above another one's, for each seed that both have."""
    theirs = {run.seed: run.share_good for run in matrix.of(cell, over)}
    return [run.share_good - theirs[run.seed] for run in matrix.of(cell, "auto") if run.seed in theirs]


def interval(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of the mean; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    return T_95.get(len(values), 2.0) * stdev(values) / math.sqrt(len(values))


def _head(matrix: Matrix, source: Source) -> list[str]:
    seqs, tokens = matrix.single
    return [
        "# The tuner against an oracle, in simulation",
        "",
        *_origin(matrix, source, beside=", beside the oracle's search"),
        "[Simulating](simulation.md) says what is simulated and what is not. A share is that of all requests that met both",
        "objectives: TTFT, and the request's own ITL p95. Intervals are 95 % over the seeds; without one there was one seed.",
        "Seeds and recorded traces were named before, in `simulation/flyball_simulation/proof/cells.py`. Contenders:",
        "",
        f"- *oracle*: the best fixed limits of a grid of {len(grid())}, chosen with hindsight for each cell and each seed",
        "  (shown are those of the first seed). All are tried; a run is given up once it cannot become the best",
        f"- *best single*: the fixed limits that are best over all cells, of {len(SINGLES)} candidates: "
        f"{seqs} sequences, {tokens} tokens",
        "- *tuned on phase 1*: the best fixed limits for the first phase of a load that shifts",
        f"- {OTHERS}",
        "",
        "In the overload all of them run `--scheduling-policy edf`. Only the tuner posts objectives, which are the deadlines",
        "there, so for the others that is the order of arrival.",
        "",
    ]


def _origin(matrix: Matrix, source: Source, beside: str = "") -> list[str]:
    return [
        f"Written by `{source.command}`; do not edit. Commit {source.commit or 'unknown'}, code {source.version}, seeds "
        f"{_seeds(matrix)}, {len(matrix.cells)} cells, {len(matrix.runs)} runs of {_size(matrix)}{beside}.",
        "",
        *([f"Not run: {'; '.join(matrix.missing)}.", ""] if matrix.missing else []),
    ]


def _seeds(matrix: Matrix) -> str:
    """Return the seeds, and how many cells have each if not all do."""
    nums = {
        seed: len({run.cell for run in matrix.runs if run.seed == seed and run.contender == "auto"})
        for seed in matrix.seeds
    }
    same = len(set(nums.values())) == 1
    return ", ".join(str(seed) if same else f"{seed} ({num} cells)" for seed, num in nums.items())


def _size(matrix: Matrix) -> str:
    steps, minutes = sum(one.num_steps for one in matrix.runs), sum(one.cpu_s for one in matrix.runs) / 60
    return f"{steps / 1e6:.1f} million steps in {minutes:.0f} minutes of one core"


def _targets(matrix: Matrix, verdicts: Mapping[tuple[str, str], Verdict]) -> list[str]:
    words = {True: "met", False: "**missed**", None: "not run"}
    rows = [f"| {one.number} | {one.demand} | {one.found} | {words[one.met]} |" for one in targets(matrix, verdicts)]
    return ["## Targets", "", "| | target | found | |", "| --- | --- | --- | --- |", *rows, ""]


def _reading(matrix: Matrix) -> list[str]:
    """Say what the figures amount to, the unwelcome part too."""
    behind = [cell for cell in matrix.cells if ratio(matrix, cell) < NEAR]
    even = [cell for cell in matrix.cells if ratio(matrix, cell, to=SINGLE) <= 1.0 + EVEN]
    beaten = ", ".join(f"{one.name} ({ratio(matrix, one):.1%} of it)" for one in behind)
    return [
        "## What it amounts to",
        "",
        f"- The tuner knows neither device nor load and reaches {_ratio(matrix, ORACLE):.1%} of the oracle's good requests "
        f"over all cells. It falls below {NEAR:.0%} of the oracle in: {beaten or 'none'}.",
        f"- In {len(even)} of {len(matrix.cells)} cells, the best single fixed limits are as good as the tuner or better "
        f"(they were chosen with knowledge of all cells). The tuner is better in the other {len(matrix.cells) - len(even)}.",
        "",
    ]


def _ratio(matrix: Matrix, to: str) -> float:
    mine, theirs = (fmean(matrix.share(cell.name, name) for cell in matrix.cells) for name in ("auto", to))
    return mine / theirs


def _matrix(matrix: Matrix) -> list[str]:
    return [
        "## Share of good requests",
        "",
        "![Share of good requests by cell and contender](tuning-proof-matrix.svg)",
        "",
        *_shares(matrix, COLUMNS),
    ]


def _shares(matrix: Matrix, columns: Sequence[str]) -> list[str]:
    rows = [
        f"| {cell.name} | " + " | ".join(_share(matrix, cell, name) for name in columns) + " |" for cell in matrix.cells
    ]
    return [
        "| cell | " + " | ".join(columns) + " |",
        "| --- |" + " --- |" * len(columns),
        *rows,
        "| mean | " + " | ".join(_mean(matrix, name) for name in columns) + " |",
        "",
    ]


def _share(matrix: Matrix, cell: Cell, contender: str) -> str:
    runs = matrix.of(cell.name, contender)
    if not runs:
        return ""
    values = [one.share_good for one in runs]
    limits = runs[0].limits
    at = f" ({limits[0]}, {limits[1]})" if contender == ORACLE and limits else ""
    about = f" ± {interval(values):.3f}" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{about}{at}"


def _mean(matrix: Matrix, contender: str) -> str:
    cells = [cell for cell in matrix.cells if matrix.of(cell.name, contender)]
    if len(cells) < len(matrix.cells):
        return ""
    return f"{fmean(matrix.share(cell.name, contender) for cell in cells):.3f}"


def _changes(matrix: Matrix) -> list[str]:
    tuners = [name for name in CONTENDERS if name != "vllm-default"]
    rows = [
        f"| {cell.name} | " + " | ".join(_rate(matrix.of(cell.name, name), cell) for name in tuners) + " |"
        for cell in matrix.cells
    ]
    return [
        "## Changes an hour",
        "",
        "| cell | " + " | ".join(tuners) + " |",
        "| --- |" + " --- |" * len(tuners),
        *rows,
        "",
    ]


def _rate(runs: Sequence[Run], cell: Cell) -> str:
    return f"{fmean(60 * one.num_changes / cell.minutes for one in runs):.0f}" if runs else ""


def _scenarios(scenarios: Sequence[Scenario], verdicts: Mapping[tuple[str, str], Verdict]) -> list[str]:
    rows = []
    for one in scenarios:
        found = [_verdict(verdicts.get((one.name, who))) for who in ("auto", "rules")]
        rows.append(f"| {one.name} | {one.demand} | {found[0]} | {found[1]} |")
    if not rows:
        return []
    return [
        "## Scenarios",
        "",
        "Situations in which the first tuner did the wrong thing.",
        "",
        "| scenario | what has to come of it | auto | rules |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
    ]


def _verdict(verdict: Verdict | None) -> str:
    if verdict is None:
        return "not run"
    return f"{'passed' if verdict.passed else '**failed**'}: {verdict.figures}"


def _draw_matrix(matrix: Matrix, path: Path) -> None:
    figure = new_figure(10, 1.5 + 0.35 * len(matrix.cells))
    axes = figure.subplots()
    for name, colour in COLOURS.items():
        points = [(place, matrix.of(cell.name, name)) for place, cell in enumerate(matrix.cells)]
        known = [(place, [one.share_good for one in runs]) for place, runs in points if runs]
        axes.errorbar(
            [fmean(values) for _, values in known],
            [place for place, _ in known],
            xerr=[interval(values) for _, values in known],
            fmt="|" if name == ORACLE else "o",
            markersize=14 if name == ORACLE else 6,
            color=colour,
            label=name,
        )
    axes.set_yticks(range(len(matrix.cells)), [cell.name for cell in matrix.cells])
    axes.invert_yaxis()
    axes.set(xlabel="share of good requests", xlim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=len(COLOURS))
    save(figure, str(path))


def _draw_over_time(matrix: Matrix, cell: Cell, path: Path) -> None:
    """Draw the share of good requests by minute, of the first seed."""
    figure = new_figure(10, 4)
    axes = figure.subplots()
    for name, colour in COLOURS.items():
        runs = matrix.of(cell.name, name)
        if runs:
            bins = runs[0].timeline
            shares = [one.num_good / one.num_requests if one.num_requests else math.nan for one in bins]
            axes.step([one.start_s / 60 for one in bins], shares, where="post", color=colour, label=name)
    for start_s in cell.shift_times_s()[1:]:
        axes.axvline(start_s / 60, color=GREY, linestyle=":")
    axes.set(title=cell.name, xlabel="minutes", ylabel="share of good requests", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=len(COLOURS))
    save(figure, str(path))

"""What closed_loop.py makes of its outcomes: figures, the comparison slice by slice, a chart."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from contender import Answer, Ask, Outcome, quantile
from flyball_operator.spec import Objectives

AUTO = "auto"
SIGNIFICANT = 0.05
MOST_POINTS = 30


def summary(load: Sequence[Ask], outcome: Outcome, objectives: Objectives) -> dict[str, Any]:
    answers = outcome.answers
    problems = Counter(one.problem for one in answers if one.problem)
    told = {}
    if outcome.num_decisions:
        told = {
            "changes": Counter(
                one.action for one in outcome.decisions if one.action not in ("hold", "commit", "killed")
            ),
            "decisions": msgspec.to_builtins(outcome.decisions),
            "decisions_made_again": f"{outcome.num_replayed} of {outcome.num_decisions} the same",
            "status": outcome.status,
        }
    return {
        "requests": len(answers),
        "failed": sum(problems.values()),
        "problems": problems,
        "share_good": share_good(answers, objectives),
        "goodput_per_s": round(sum(one.is_good(objectives) for one in answers) / load[-1].at_s, 3),
        "ttft_p95_s": p95(one.ttft_s for one in answers),
        "itl_p95_s": p95(one.itl_p95_s for one in answers),
        "share_good_by_phase": {
            phase: share_good([one for ask, one in zip(load, answers, strict=True) if ask.phase == phase], objectives)
            for phase in dict.fromkeys(ask.phase for ask in load)
        },
        "final_limits": msgspec.to_builtins(outcome.final_limits),
        "resident_bytes_before": outcome.resident_bytes_before,
        "resident_bytes_after": outcome.resident_bytes_after,
        **told,
    }


def share_good(answers: Sequence[Answer], objectives: Objectives) -> float | None:
    return round(sum(one.is_good(objectives) for one in answers) / len(answers), 4) if answers else None


def p95(values: Iterator[float | None]) -> float | None:
    found = quantile([value for value in values if value is not None], 0.95)
    return None if found is None else round(found, 4)


def slices(
    load: Sequence[Ask],
    outcomes: Mapping[str, Outcome],
    objectives: Objectives,
    work_s: Sequence[Mapping[str, float]],
    slice_s: float,
) -> list[dict[str, Any]]:
    """Return the share of good requests of each slice, by the time at which they were sent.

    Args:
        work_s: how long the fixed work took before each slice, by contender.
    """
    numbers = [int(ask.at_s / slice_s) for ask in load]
    phase_of = {number: ask.phase for number, ask in zip(numbers, load, strict=True)}

    def good(number: int, answers: Sequence[Answer]) -> float | None:
        return share_good([one for own, one in zip(numbers, answers, strict=True) if own == number], objectives)

    return [
        {
            "phase": phase_of.get(number),
            "requests": numbers.count(number),
            "share_good": {name: good(number, one.answers) for name, one in outcomes.items()},
            "fixed_work_s": work,
        }
        for number, work in enumerate(work_s)
    ]


def verdicts(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Compare `auto` with each of the others, slice by slice (sign test)."""
    if AUTO not in result["contenders"]:
        return {}
    by_slice = [one["share_good"] for one in result["slices"] if one["requests"]]
    return {
        name: verdict([(one[AUTO], one[name]) for one in by_slice]) for name in result["contenders"] if name != AUTO
    }


def verdict(shares: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return how the first of each pair compares with the second, and the two-sided probability of that by chance alone."""
    differences = [ours - theirs for ours, theirs in shares]
    better, worse = sum(one > 0 for one in differences), sum(one < 0 for one in differences)
    num = better + worse
    chance = min(1.0, 2 * sum(math.comb(num, k) for k in range(min(better, worse) + 1)) / 2**num)
    found = "not told apart" if chance >= SIGNIFICANT else "ahead" if better > worse else "behind"
    return {
        "auto_is": found,
        "slices_better": better,
        "slices_worse": worse,
        "slices_equal": len(differences) - num,
        "median_difference": round(statistics.median(differences), 4),
        "mean_difference": round(statistics.fmean(differences), 4),
        "chance": float(f"{chance:.2g}"),
    }


def show(result: Mapping[str, Any]) -> None:
    shown = ("share_good", "failed", "ttft_p95_s", "itl_p95_s", "share_good_by_phase")
    for name, one in result["contenders"].items():
        print(name, one["start_limits"], {key: one[key] for key in shown})
    print(result["outputs"])
    ours = result["contenders"].get(AUTO, {})
    for name, one in result["verdicts"].items():
        theirs = result["contenders"][name]["share_good"]
        print(
            f"auto is {one['auto_is']} ({name}): {ours['share_good']:.1%} good against {theirs:.1%}; better in "
            f"{one['slices_better']} slices, worse in {one['slices_worse']}, equal in {one['slices_equal']}"
        )


def draw(result: Mapping[str, Any], path: str) -> None:
    """Draw each contender's share of good requests over time, and the tuner's target. Needs matplotlib (the `bench` extra)."""
    from flyball_simulation.chart import BLUE, GREEN, GREY, ORANGE, RED, new_figure
    from flyball_simulation.chart import save as save_figure

    figure = new_figure(9, 5.5)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(4, 1.3, 1.3))
    slice_min, rows = result["settings"]["slice_s"] / 60, result["slices"]
    phases = list(dict.fromkeys(one["phase"] for one in rows))
    others = iter((RED, BLUE, GREY, ORANGE))
    for name, one in result["contenders"].items():
        points = pooled(rows, name, max(1, math.ceil(len(rows) / MOST_POINTS)))
        top.plot(
            *zip(*((at * slice_min, 100 * share) for at, share in points), strict=True),
            color=GREEN if name == AUTO else next(others),
            label=f"{name}: {one['share_good']:.0%}",
            linewidth=2.5 if name == AUTO else 1,
        )
    top.set(ylabel="good requests, %", ylim=(0, 102), title=" | ".join(phases))
    top.legend(loc="lower left", fontsize="small")
    draw_target(middle, result, BLUE)
    minutes = [number * slice_min for number in range(len(rows))]
    speeds = [1 / statistics.fmean(one["fixed_work_s"].values()) for one in rows]
    bottom.step(minutes, [100 * one / max(speeds) for one in speeds], where="post", color=GREY)
    bottom.set(xlabel="minutes of load for each contender", ylabel="machine's\nspeed, %", ylim=(0, 105))
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
        for boundary in range(1, len(phases)):
            axes.axvline(boundary * len(rows) * slice_min / len(phases), color=GREY, linestyle=":")
    save_figure(figure, path)


def draw_target(axes: Any, result: Mapping[str, Any], color: str) -> None:
    """Draw the step-time target of `auto`, and when the operator was killed."""
    told = result["contenders"].get(AUTO, {}).get("decisions", [])
    targets = [(one["at_s"] / 60, one["limits"]["step_time_target_ms"]) for one in told if one["limits"] is not None]
    known = [(max(0.0, at), target) for at, target in targets if target is not None]
    if known:
        end = len(result["slices"]) * result["settings"]["slice_s"] / 60
        axes.step(*zip(*known, (end, known[-1][1]), strict=True), where="post", color=color)
    for one in told:
        if one["action"] == "killed":
            axes.axvline(one["at_s"] / 60, color="black")
            axes.annotate(" operator killed", (one["at_s"] / 60, 0), va="bottom", fontsize="small")
    axes.set(ylabel="step target\nof auto, ms", ylim=(0, None))


def pooled(rows: Sequence[Mapping[str, Any]], name: str, num: int) -> list[tuple[float, float]]:
    """Return the share of good requests of ``num`` slices together, with the middle of their time, in slices."""
    found = []
    for start in range(0, len(rows), num):
        some = [one for one in rows[start : start + num] if one["requests"]]
        if some:
            good = sum(one["requests"] * one["share_good"][name] for one in some)
            found.append((start + len(rows[start : start + num]) / 2, good / sum(one["requests"] for one in some)))
    return found

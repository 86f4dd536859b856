"""How an objective is doing: the share of samples over it, with the confidence that their number allows.

A share over the objective, not a quantile: shares of several replicas add up, and their uncertainty is known.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from flyball_protocol import LatencyWindow
from flyball_simulation.baselines.rules.spec import Tuning

BUDGET = 0.05
"""Share of samples that may be over a p95 objective."""

ITL_SAMPLES_PER_REQUEST = 20
"""An inter-token objective needs so many times the samples that a first-token objective needs."""

_Z = 1.96  # of the normal distribution: 95 % two-sided


class Standing(StrEnum):
    """Where an objective stands."""

    UNSET = "unset"
    """There is no such objective."""
    UNKNOWN = "unknown"
    """Too few samples."""
    OVER = "over"
    """Missed: even the lower bound is over the budget."""
    NEAR = "near"
    """Too close to the budget to say."""
    MET = "met"
    """Even the upper bound is inside the budget."""
    CLEAR = "clear"
    """Even the upper bound is inside half the budget: there is room."""


@dataclass(frozen=True)
class Signal:
    """One objective's evidence.

    Attributes:
        what: for people, e.g. ``inter-token gaps``.
        objective_s: the objective in seconds, or None.
        num_over, num_samples: samples over it (interpolated inside a bucket, so not whole), and all of them.
        lower, upper: Wilson score interval of the share over the objective.
    """

    what: str
    objective_s: float | None
    num_over: float
    num_samples: int
    min_samples: int

    @property
    def share(self) -> float:
        return self.num_over / self.num_samples if self.num_samples else 0.0

    @property
    def lower(self) -> float:
        return wilson(self.num_over, self.num_samples)[0]

    @property
    def upper(self) -> float:
        return wilson(self.num_over, self.num_samples)[1]

    @property
    def standing(self) -> Standing:
        if self.objective_s is None:
            return Standing.UNSET
        if self.num_samples < self.min_samples:
            return Standing.UNKNOWN
        if self.lower > BUDGET:
            return Standing.OVER
        if self.upper < BUDGET / 2:
            return Standing.CLEAR
        return Standing.MET if self.upper < BUDGET else Standing.NEAR

    def __str__(self) -> str:
        if self.objective_s is None:
            return f"{self.what}: no objective"
        return (
            f"{self.share:.1%} of {self.num_samples} {self.what} took longer than {self.objective_s * 1000:.0f} ms "
            f"({self.lower:.1%} to {self.upper:.1%}; budget {BUDGET:.0%})"
        )


def signals(
    tuning: Tuning, ttft: Sequence[LatencyWindow], itl: Sequence[LatencyWindow], *, one_of: int = 1
) -> tuple[Signal, Signal]:
    """Return how first tokens and inter-token gaps do against ``tuning``.

    Args:
        one_of: the windows are of one replica of so many, so that a fair part of the samples is enough.
    """
    objectives, samples = tuning.objectives, math.ceil(tuning.min_samples / one_of)
    return (
        signal("first tokens", ttft, objectives.ttft_p95_milliseconds, samples),
        signal(
            "inter-token gaps", itl, objectives.inter_token_latency_p95_milliseconds, samples * ITL_SAMPLES_PER_REQUEST
        ),
    )


def signal(what: str, windows: Sequence[LatencyWindow], objective_ms: int | None, min_samples: int) -> Signal:
    """Pool the windows of several replicas against one objective."""
    objective_s = None if objective_ms is None else objective_ms / 1000
    num_over = 0.0 if objective_s is None else sum(samples_over(window, objective_s) for window in windows)
    return Signal(what, objective_s, num_over, sum(sum(window.counts) for window in windows), min_samples)


def samples_over(window: LatencyWindow, objective_s: float) -> float:
    """Return how many samples are over ``objective_s``; exact at a bucket edge, linear inside a bucket.

    The last bucket has no upper edge: its samples count as over unless the window's p99 says that (nearly) none are.
    """
    edges = (0.0, *window.edges_s)
    over = 0.0
    for low, high, count in zip(edges, window.edges_s, window.counts, strict=False):
        over += count * min(1.0, max(0.0, (high - objective_s) / (high - low)))
    beyond = window.counts[-1]
    met_by_nearly_all = window.p99_s is not None and window.p99_s <= objective_s and objective_s > edges[-1]
    return over if met_by_nearly_all else over + beyond


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """Return the Wilson score interval (95 %) of a share; (0, 1) without trials.

    Follows E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).
    """
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    scale = 1 + _Z**2 / trials
    centre = (share + _Z**2 / (2 * trials)) / scale
    half = _Z * math.sqrt(share * (1 - share) / trials + _Z**2 / (4 * trials**2)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)

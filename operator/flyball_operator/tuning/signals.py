"""How an objective is doing: the share of samples over it, with the confidence that their number allows.

A share over the objective, not a quantile: shares of several replicas add up, and their uncertainty is known. The counts are
exact, since the replicas count against the objectives that were posted to them. Samples that are close in time are alike, so
the confidence is that of fewer, independent ones.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from flyball_operator.spec import Tuning
from flyball_operator.tuning.words import duration
from flyball_protocol import ObjectiveCounts, Objectives, Share

BUDGET = 0.05
"""Share of samples that may be over a p95 objective."""

STEPS_PER_SAMPLE = 4
"""So many steps in a row share a prefill, and are long together."""

REQUESTS_PER_SAMPLE = 2
"""Requests that run or wait together share their fate."""

STEPS_PER_REQUEST = 5
"""An inter-token objective needs so many steps for each request that a first-token objective needs."""

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


class Counts(Struct, frozen=True):
    """Exact counts of one or several replicas: first tokens, requests by their own p95 gap, and steps."""

    ttft: Share = Share(num=0, num_over=0)
    itl: Share = Share(num=0, num_over=0)
    steps: Share = Share(num=0, num_over=0)

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(_added(getattr(self, name), getattr(other, name)) for name in ("ttft", "itl", "steps")))


NOTHING = Counts()


def counts_of(counts: ObjectiveCounts) -> Counts:
    return Counts(counts.ttft, counts.itl, counts.steps)


def total(counts: Iterable[Counts]) -> Counts:
    return sum(counts, NOTHING)


def _added(one: Share, other: Share) -> Share:
    return Share(num=one.num + other.num, num_over=one.num_over + other.num_over)


@dataclass(frozen=True)
class Signal:
    """One objective's evidence.

    Attributes:
        what: of the samples, for people.
        objective_s: the objective in seconds, or None.
        counted: all samples, and those over the objective.
        per_sample: so many of them weigh as one independent sample.
        min_samples: with fewer than this the standing is unknown.
    """

    what: str
    objective_s: float | None
    counted: Share
    per_sample: int
    min_samples: int

    @property
    def share(self) -> float:
        return self.counted.num_over / self.counted.num if self.counted.num else 0.0

    @property
    def effective(self) -> tuple[float, float]:
        """Return independent samples over the objective, and all of them."""
        return self.counted.num_over / self.per_sample, self.counted.num / self.per_sample

    @property
    def lower(self) -> float:
        return wilson(*self.effective)[0]

    @property
    def upper(self) -> float:
        return wilson(*self.effective)[1]

    @property
    def standing(self) -> Standing:
        if self.objective_s is None:
            return Standing.UNSET
        if self.counted.num < self.min_samples:
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
            f"{self.share:.1%} of {self.counted.num} {self.what} took longer than {duration(self.objective_s)} "
            f"({self.lower:.1%} to {self.upper:.1%}; budget {BUDGET:.0%})"
        )


def objectives_of(tuning: Tuning) -> Objectives:
    """Return the objectives as they are posted. Raises nothing: find_infeasible() has told of those that are not above 0."""
    ttft_ms, itl_ms = tuning.objectives.ttft_p95_milliseconds, tuning.objectives.inter_token_latency_p95_milliseconds
    return Objectives(ttft_s=_seconds(ttft_ms), itl_s=_seconds(itl_ms))


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def signals(tuning: Tuning, counts: Counts, *, one_of: int = 1) -> tuple[Signal, Signal]:
    """Return how first tokens and inter-token latency do against ``tuning``.

    Inter-token latency is counted twice: by request, which is what a client sees, and by step, which is known sooner. The
    count that is worse off speaks for it.

    Args:
        one_of: the counts are of one replica of so many, so that a fair part of the samples is enough.
    """
    objectives, samples = objectives_of(tuning), math.ceil(tuning.min_samples / one_of)
    ttft = Signal("first tokens", objectives.ttft_s, counts.ttft, REQUESTS_PER_SAMPLE, samples)
    by_step = Signal(
        "steps with decodes", objectives.itl_s, counts.steps, STEPS_PER_SAMPLE, samples * STEPS_PER_REQUEST
    )
    by_request = Signal("requests by their p95 gap", objectives.itl_s, counts.itl, REQUESTS_PER_SAMPLE, samples)
    return ttft, _worse_off(by_step, by_request)


_BY_URGENCY = (Standing.OVER, Standing.NEAR, Standing.MET, Standing.CLEAR, Standing.UNKNOWN, Standing.UNSET)


def _worse_off(by_step: Signal, by_request: Signal) -> Signal:
    return min((by_request, by_step), key=lambda one: (_BY_URGENCY.index(one.standing), -one.share))


def wilson(successes: float, trials: float) -> tuple[float, float]:
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

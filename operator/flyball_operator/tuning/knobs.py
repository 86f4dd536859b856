"""The limits that the slow loop moves, and how far one decision may move them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from msgspec import structs

from flyball_operator.spec import Bounds, Range
from flyball_operator.tuning.plan import LEAST_SHARE, Plan
from flyball_operator.tuning.words import duration
from flyball_protocol import Envelope, Limits, LimitsChange, Objectives

CUT_FACTOR = 0.7
"""The most that one cut takes without a plan: 30 %. Cuts are larger than raises: an objective is being missed while we wait."""

DEAD_BAND = 0.10
"""A move of less than this share of the value is not worth a change; the knob counts as at its limit."""


class Knob(StrEnum):
    """A limit, named as in Limits."""

    STEP_TIME = "step_time_target_ms"
    MAX_NUM_SEQS = "max_num_seqs"
    MAX_NUM_BATCHED_TOKENS = "max_num_batched_tokens"
    KV_CACHE_FRACTION = "kv_cache_fraction"

    def waited_for(self, blocked_by: Mapping[str, float]) -> float:
        """Return the share of steps in which this limit held the head of the queue back."""
        return sum(blocked_by.get(reason, 0.0) for reason in _BLOCKED_BY[self])

    def of(self, limits: Limits) -> float:
        """Return the value; inf for a step-time target that there is not."""
        value: float | None = getattr(limits, self)
        return math.inf if value is None else value


_BLOCKED_BY = {
    Knob.STEP_TIME: ("step_time",),
    Knob.MAX_NUM_SEQS: ("seqs",),
    Knob.MAX_NUM_BATCHED_TOKENS: ("budget",),
    Knob.KV_CACHE_FRACTION: ("kv", "reserve"),
}


@dataclass(frozen=True)
class Span:
    """Where a knob may be, ends included."""

    low: float
    high: float

    def clamp(self, value: float) -> float:
        return min(max(value, self.low), self.high)


def spans(bounds: Bounds, envelope: Envelope, objectives: Objectives, plan: Plan | None = None) -> dict[Knob, Span]:
    """Return where each knob may be: inside the spec's bounds and the envelope.

    Where bounds and envelope contradict each other the envelope holds; ``contradictions()`` names them.

    Args:
        plan: if there is one, it knows which step-time targets are of use: longer ones than an objective that nothing can meet.
    """
    seqs = _span(bounds.max_num_seqs, 1, envelope.max_num_seqs)
    tokens = _span(bounds.max_num_batched_tokens, envelope.min_num_batched_tokens, envelope.max_num_batched_tokens)
    percent = _span(bounds.kv_cache_percent, *_percents(envelope))
    itl_ms = math.inf if objectives.itl_s is None else 1000 * objectives.itl_s
    least_ms = 1.0 if math.isinf(itl_ms) else LEAST_SHARE * itl_ms
    planned = (0.0, 0.0) if plan is None else (plan.least_step_s, plan.step_s)
    step_time = Span(max(least_ms, 1000 * planned[0]), max(itl_ms, 1000 * planned[1]))
    return {
        Knob.STEP_TIME: step_time,
        Knob.MAX_NUM_SEQS: seqs,
        Knob.MAX_NUM_BATCHED_TOKENS: tokens,
        Knob.KV_CACHE_FRACTION: Span(percent.low / 100, percent.high / 100),
    }


def contradictions(bounds: Bounds, envelope: Envelope) -> list[str]:
    """Return a sentence for each bound of the spec that no value of the envelope satisfies."""
    ranges = (
        ("maxNumSeqs", bounds.max_num_seqs, 1, envelope.max_num_seqs),
        (
            "maxNumBatchedTokens",
            bounds.max_num_batched_tokens,
            envelope.min_num_batched_tokens,
            envelope.max_num_batched_tokens,
        ),
        ("kvCachePercent", bounds.kv_cache_percent, *_percents(envelope)),
    )
    return [
        f"tuning.bounds.{name} is {_words(bound)}, and the replicas take {low} to {high}"
        for name, bound, low, high in ranges
        if (bound.min is not None and bound.min > high)
        or (bound.max is not None and bound.max < low)
        or (bound.min is not None and bound.max is not None and bound.min > bound.max)
    ]


def _percents(envelope: Envelope) -> tuple[int, int]:
    return math.ceil(100 * envelope.min_kv_cache_fraction), 100


def _words(bound: Range) -> str:
    if bound.min is None or bound.max is None:
        return f"at least {bound.min}" if bound.max is None else f"at most {bound.max}"
    return f"{bound.min} to {bound.max}"


def _span(bounds: Range, low: int, high: int) -> Span:
    wanted_low = low if bounds.min is None else bounds.min
    wanted_high = high if bounds.max is None else bounds.max
    top = max(low, min(high, wanted_high))
    return Span(min(top, max(low, wanted_low)), top)


def towards(knob: Knob, value: float, aim: float, span: Span, *, dead_band: float = DEAD_BAND) -> float | None:
    """Return ``aim`` inside ``span``, rounded down; None when that is no more than the dead band away from ``value``."""
    wanted = span.clamp(rounded(knob, span.clamp(aim)))
    if wanted == value or abs(wanted - value) < dead_band * min(value, wanted):
        return None
    return wanted


def changed(limits: Limits, values: Mapping[Knob, float]) -> Limits:
    """Return ``limits`` with the values of some knobs replaced."""
    return structs.replace(limits, **{str(knob): _typed(knob, value) for knob, value in values.items()})


def as_change(limits: Limits) -> LimitsChange:
    """Return the change that sets every limit, so that a replica that missed earlier changes ends up the same."""
    return LimitsChange(
        max_num_seqs=limits.max_num_seqs,
        kv_cache_fraction=limits.kv_cache_fraction,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        step_time_target_ms=limits.step_time_target_ms or 0.0,  # 0 takes a target away
    )


def same(one: Limits, other: Limits) -> bool:
    """Return whether two sets of limits ask for the same."""
    return all(knob.of(one) == knob.of(other) for knob in Knob)


def in_words(knob: str, value: float | None) -> str:
    """Return a limit's value with its unit; None and inf are no step-time target."""
    if value is None or math.isinf(value):
        return "none"
    if knob == Knob.STEP_TIME:
        return duration(value / 1000)
    return f"{value:.0%}" if knob == Knob.KV_CACHE_FRACTION else f"{value:.0f}"


def moved_in_words(knob: str, before: float | None, after: float | None) -> str:
    """Return ``max_num_seqs 64 -> 8``."""
    return f"{knob} {in_words(knob, before)} -> {in_words(knob, after)}"


def rounded(knob: Knob, value: float) -> float:
    """Return ``value`` rounded down to a unit of its knob."""
    if math.isinf(value):
        return value
    unit = {Knob.KV_CACHE_FRACTION: 0.01, Knob.STEP_TIME: 0.01}.get(knob, 1)
    # The small addend keeps 0.7 * 100 % at 70 %: floor(100 * 0.7) is 69 in binary floating point.
    return math.floor(value / unit + 1e-9) * unit


def _typed(knob: Knob, value: float) -> float | None:
    match knob:
        case Knob.STEP_TIME:
            return None if math.isinf(value) else round(value, 3)
        case Knob.KV_CACHE_FRACTION:
            return round(value, 4)
        case _:
            return int(value)

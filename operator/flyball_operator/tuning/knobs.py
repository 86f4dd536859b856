"""The limits that the slow loop moves, and how far one decision may move them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from msgspec import structs

from flyball_operator.spec import Bounds, Range
from flyball_protocol import Envelope, Limits, LimitsChange

CUT_FACTOR = 0.7
"""What a cut leaves of a value. Cuts are larger than raises: an objective is being missed while we wait."""

DEAD_BAND = 0.10
"""A move that bounds shorten below this share of the value is not worth a change; the knob counts as at its limit."""


class Knob(StrEnum):
    """A limit, named as in Limits."""

    MAX_NUM_SEQS = "max_num_seqs"
    MAX_NUM_BATCHED_TOKENS = "max_num_batched_tokens"
    KV_CACHE_FRACTION = "kv_cache_fraction"

    @property
    def blocked_by(self) -> str:
        """The reason under which the runtime reports that this limit held the head of the queue back."""
        return {"max_num_seqs": "seqs", "max_num_batched_tokens": "budget", "kv_cache_fraction": "kv"}[self]

    def of(self, limits: Limits) -> float:
        value: float = getattr(limits, self)
        return value


@dataclass(frozen=True)
class Span:
    """Where a knob may be, ends included."""

    low: float
    high: float

    def clamp(self, value: float) -> float:
        return min(max(value, self.low), self.high)


def spans(bounds: Bounds, envelope: Envelope, limits: Limits) -> dict[Knob, Span]:
    """Return where each knob may be: inside the spec's bounds, the envelope, and what the other limits make sensible.

    A step computes one token for each decoding sequence, so ``max_num_seqs`` is not raised above the token budget, nor the
    budget cut below ``max_num_seqs``. Where bounds and envelope contradict each other the envelope holds.
    """
    seqs = _span(bounds.max_num_seqs, 1, envelope.max_num_seqs)
    tokens = _span(bounds.max_num_batched_tokens, envelope.min_num_batched_tokens, envelope.max_num_batched_tokens)
    percent = _span(bounds.kv_cache_percent, math.ceil(100 * envelope.min_kv_cache_fraction), 100)
    num_seqs = seqs.clamp(limits.max_num_seqs)
    return {
        Knob.MAX_NUM_SEQS: Span(seqs.low, min(seqs.high, max(num_seqs, limits.max_num_batched_tokens))),
        Knob.MAX_NUM_BATCHED_TOKENS: Span(min(tokens.high, max(tokens.low, num_seqs)), tokens.high),
        Knob.KV_CACHE_FRACTION: Span(percent.low / 100, percent.high / 100),
    }


def _span(bounds: Range, low: int, high: int) -> Span:
    wanted_low = low if bounds.min is None else bounds.min
    wanted_high = high if bounds.max is None else bounds.max
    top = max(low, min(high, wanted_high))
    return Span(min(top, max(low, wanted_low)), top)


def raised(knob: Knob, value: float, span: Span, max_step: float) -> float | None:
    """Return ``value`` one step up (``max_step`` is a share, e.g. 0.25; at least one unit), or None at the upper limit."""
    if span.high - value < min(DEAD_BAND, max_step) * value or value >= span.high:
        return None
    return min(span.high, max(value + _unit(knob), _rounded_down(knob, value * (1 + max_step))))


def cut(knob: Knob, value: float, span: Span) -> float | None:
    """Return ``value`` one step down, or None at the lower limit."""
    if value - span.low < DEAD_BAND * value or value <= span.low:
        return None
    return max(span.low, _rounded_down(knob, value * CUT_FACTOR))


def changed(limits: Limits, values: Mapping[Knob, float]) -> Limits:
    """Return ``limits`` with the values of some knobs replaced."""
    return structs.replace(limits, **{str(knob): _typed(knob, value) for knob, value in values.items()})


def as_change(limits: Limits) -> LimitsChange:
    """Return the change that sets every limit, so that a replica that missed earlier changes ends up the same."""
    return LimitsChange(
        max_num_seqs=limits.max_num_seqs,
        kv_cache_fraction=limits.kv_cache_fraction,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        step_time_target_ms=limits.step_time_target_ms or 0.0,  # none is to be none there too
    )


def _unit(knob: Knob) -> float:
    return 0.01 if knob is Knob.KV_CACHE_FRACTION else 1


def _rounded_down(knob: Knob, value: float) -> float:
    # The small addend keeps 0.7 * 100 % at 70 %: floor(100 * 0.7) is 69 in binary floating point.
    return math.floor(value / _unit(knob) + 1e-9) * _unit(knob)


def _typed(knob: Knob, value: float) -> float:
    return round(value, 4) if knob is Knob.KV_CACHE_FRACTION else int(value)

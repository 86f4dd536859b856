"""Distributions of token counts."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from flyball_runtime.core.errors import ConfigError

if TYPE_CHECKING:  # numpy is slow to import, and flags are checked by every command
    import numpy as np

Lengths = Callable[["np.random.Generator", int], list[int]]
"""Draws ``n`` token counts, each at least 1."""

MAX_LENGTH = 10_000_000

_FORMS = "128, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA, lognormal:MEDIAN:SIGMA:MAX or zipf:ALPHA:LOW:HIGH"


def parse_lengths(text: str) -> Lengths:
    """A distribution by name.

    ``128`` or ``fixed:128``; ``uniform:LOW:HIGH``, both ends included; ``lognormal:MEDIAN:SIGMA[:MAX]``, where SIGMA is the
    standard deviation of the logarithm; ``zipf:ALPHA:LOW:HIGH``, where k is drawn with probability proportional to k^-ALPHA.

    Raises:
        ConfigError: no such form, or numbers out of range.
    """
    name, *rest = text.split(":") if ":" in text else ("fixed", text)
    try:
        return _BUILDERS[name](*map(float, rest))
    except (KeyError, TypeError, ValueError) as exc:
        reason = f" ({exc})" if isinstance(exc, ValueError) else ""
        raise ConfigError(f"{text!r} is not a distribution of lengths{reason}; write {_FORMS}.") from exc


def _fixed(length: float) -> Lengths:
    value = _count(length)
    return lambda rng, n: [value] * n


def _uniform(low: float, high: float) -> Lengths:
    first, last = _range(low, high)
    return lambda rng, n: rng.integers(first, last, n, endpoint=True).tolist()


def _lognormal(median: float, sigma: float, largest: float = MAX_LENGTH) -> Lengths:
    first, last = _range(median, largest)
    if not 0 <= sigma <= 10:
        raise ValueError(f"sigma {sigma:g} is not from 0 to 10")
    return lambda rng, n: rng.lognormal(math.log(first), sigma, n).clip(1, last).round().astype(int).tolist()


def _zipf(alpha: float, low: float, high: float) -> Lengths:
    first, last = _range(low, high)
    if not 0 <= alpha <= 20:
        raise ValueError(f"alpha {alpha:g} is not from 0 to 20")

    def draw(rng: "np.random.Generator", n: int) -> list[int]:
        weights = [(value / first) ** -alpha for value in range(first, last + 1)]
        total = math.fsum(weights)
        steps = rng.choice(len(weights), n, p=[weight / total for weight in weights])
        return [first + int(step) for step in steps]

    return draw


def _range(low: float, high: float) -> tuple[int, int]:
    first, last = _count(low), _count(high)
    if first > last:
        raise ValueError(f"{first} is above {last}")
    return first, last


def _count(value: float) -> int:
    if not (1 <= value <= MAX_LENGTH and value == int(value)):
        raise ValueError(f"{value:g} is not a whole number from 1 to {MAX_LENGTH}")
    return int(value)


_BUILDERS: dict[str, Callable[..., Lengths]] = {
    "fixed": _fixed,
    "uniform": _uniform,
    "lognormal": _lognormal,
    "zipf": _zipf,
}

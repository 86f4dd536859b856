"""When open-loop requests arrive."""

import numpy as np
from numpy.typing import NDArray

from flyball_runtime.bench.settings import BenchSettings
from flyball_runtime.core.errors import ConfigError


def arrival_offsets(settings: BenchSettings, num_requests: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Seconds from the start for each of ``num_requests``; the first is 0, and gaps have mean ``1 / request_rate``.

    Gamma gaps have shape ``burstiness`` (below 1 is burstier than Poisson), as in BurstGPT (Wang et al. 2024).
    """
    if settings.request_rate is None:
        raise ConfigError("arrivals need a request rate; give --request-rate.")
    gaps = _gaps(settings, max(num_requests - 1, 0), rng) / settings.request_rate
    return np.concatenate(([0.0], np.cumsum(gaps)))[:num_requests]


def _gaps(settings: BenchSettings, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Gaps of mean 1."""
    if settings.arrival == "poisson":
        return rng.exponential(1.0, count)
    if settings.arrival == "gamma":
        return rng.gamma(settings.burstiness, 1.0 / settings.burstiness, count)
    return np.ones(count)


def spread_equal_times(times: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Spread requests that share one recorded time evenly at random over the clock tick that rounded them together.

    The tick is the smallest gap between different times (3 s in Mooncake's traces). A trace without equal times comes
    back as it was; order is kept.

    Args:
        times: seconds, ascending.
    """
    distinct = np.unique(times)
    if len(distinct) == len(times) or len(distinct) < 2:
        return times
    tick = float(np.diff(distinct).min())
    return np.sort(times + rng.uniform(0.0, tick, len(times)))

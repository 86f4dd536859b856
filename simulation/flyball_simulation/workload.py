"""What is asked of the replicas: when, how long the prompt, how long the answer.

Recorded traces are read as ``flyball bench --trace`` reads them. Others are drawn from quantile tables of recorded traffic,
because no family of distributions fits it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from flyball_runtime.core.errors import ConfigError


class Arrival(NamedTuple):
    """One request.

    Attributes:
        hash_ids: of the prompt's blocks of 512 tokens; equal ids are equal text. Empty where none is shared.
    """

    at_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


HASHED_TOKENS = 512
"""Tokens that one hash id of a Mooncake trace stands for."""

Workload = Sequence[Arrival]
"""In order of arrival."""

# fmt: off
QUANTILES = (
    0.0, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95,
    0.99, 0.999, 1.0,
)
# fmt: on


class Mix(Struct, frozen=True, kw_only=True):
    """One kind of traffic.

    Attributes:
        input_len, output_len: tokens at QUANTILES; both are drawn on their own, since recorded ones are not correlated.
        gap_shape: of the gamma distribution of the gaps between arrivals; below 1 is burstier than Poisson.
    """

    input_len: tuple[int, ...]
    output_len: tuple[int, ...]
    gap_shape: float


# fmt: off
MIXES: dict[str, Mix] = {
    # Azure 2023, conversation (CC-BY 4.0, Azure Public Dataset)
    "chat": Mix(
        input_len=(
            2, 29, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130, 1189, 1315, 1877, 2735,
            4083, 4142, 6212, 14050,
        ),
        output_len=(
            7, 16, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 424, 451, 601, 954, 1000,
        ),
        gap_shape=0.87,
    ),
    # Azure 2023, code (CC-BY 4.0, Azure Public Dataset)
    "code": Mix(
        input_len=(
            3, 17, 75, 147, 232, 385, 578, 770, 938, 1075, 1261, 1469, 1690, 1909, 2164, 2433, 2745, 3193, 3923, 5194,
            7315, 7436, 7437, 7437,
        ),
        output_len=(6, 6, 6, 7, 7, 8, 9, 9, 10, 11, 12, 13, 14, 16, 18, 20, 24, 29, 39, 55, 90, 252, 831, 1899),
        gap_shape=0.35,
    ),
    # Mooncake, conversation, of at most 16,384 tokens (Apache-2.0)
    "long": Mix(
        input_len=(
            891, 894, 898, 914, 1038, 1282, 1565, 1999, 2638, 3406, 4156, 4728, 5288, 6053, 6856, 7809, 8826, 9919, 11246,
            12617, 14321, 15656, 16115, 16321,
        ),
        output_len=(
            1, 3, 11, 25, 47, 97, 149, 205, 245, 283, 315, 342, 368, 394, 416, 441, 466, 498, 537, 588, 681, 1004, 1978,
            2000,
        ),
        gap_shape=1.0,
    ),
}
# fmt: on
"""By the name that ``--workload`` takes."""


class Phase(Struct, frozen=True, kw_only=True):
    """A stretch of traffic.

    Attributes:
        mix: a name of MIXES.
        rate: mean arrivals a second.
        swing: the rate rises and falls by this share, one period a phase; 0 is even.
        num_clients: independent senders, among whom the rate is split unevenly.
    """

    mix: str
    rate: float
    seconds: float
    swing: float = 0.0
    num_clients: int = 1


def from_trace(path: str, *, speed: float = 1.0, limit: int | None = None, seed: int = 0) -> list[Arrival]:
    """Return the requests of a trace. Raises ConfigError for whatever ``flyball bench`` refuses."""
    from flyball_clients.bench.settings import BenchSettings  # here: they load aiohttp, and drawn workloads need none
    from flyball_clients.bench.workload import plan_requests

    settings = BenchSettings(trace=path, trace_speed=speed, trace_limit=limit, seed=seed)
    return [
        Arrival(plan.offset_s or 0.0, plan.input_len, plan.output_len, plan.hash_ids)
        for plan in plan_requests(settings)
    ]


def generate(phases: Sequence[Phase], seed: int) -> list[Arrival]:
    """Draw the phases' traffic, one phase after the other. Raises ConfigError for a mix that is not there."""
    rng, start_s = np.random.default_rng(seed), 0.0
    drawn: list[Arrival] = []
    for phase in phases:
        drawn += _draw(phase, start_s, rng)
        start_s += phase.seconds
    return sorted(drawn)


def burst(at_s: float, count: int, seconds: float, input_len: int, output_len: int) -> list[Arrival]:
    """Return ``count`` equal requests that come evenly within ``seconds``."""
    return [Arrival(at_s + seconds * i / count, input_len, output_len) for i in range(count)]


def until(workload: Workload, seconds: float) -> list[Arrival]:
    """Return the requests that arrive before ``seconds``."""
    return [one for one in workload if one.at_s < seconds]


def _draw(phase: Phase, start_s: float, rng: np.random.Generator) -> list[Arrival]:
    if phase.mix not in MIXES:
        raise ConfigError(f"there is no workload {phase.mix!r}; there are {', '.join(MIXES)}.")
    mix = MIXES[phase.mix]
    times = np.concatenate([_times(phase, rate, mix.gap_shape, rng) for rate in _client_rates(phase)])
    inputs, outputs = _lengths(mix.input_len, len(times), rng), _lengths(mix.output_len, len(times), rng)
    return [
        Arrival(start_s + float(at_s), int(num_in), int(num_out))
        for at_s, num_in, num_out in zip(np.sort(times), inputs, outputs, strict=True)
    ]


def _client_rates(phase: Phase) -> list[float]:
    """Split the rate by Zipf's law: a few clients send most."""
    weights = [1 / (i + 1) for i in range(phase.num_clients)]
    return [phase.rate * weight / sum(weights) for weight in weights]


def _times(phase: Phase, rate: float, shape: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return arrivals of one client from 0 to the end of the phase."""
    count = int(phase.seconds * rate * 1.5 + 10 * (1 + 1 / shape) ** 0.5 * (phase.seconds * rate) ** 0.5 + 20)
    even: NDArray[np.float64] = np.cumsum(rng.gamma(shape, 1 / shape, count)) / rate
    even = even[even < phase.seconds]
    if not phase.swing:
        return even
    # time is stretched where the rate is low: the inverse of the rate's integral, by a table
    clock = np.linspace(0.0, phase.seconds, 512)
    turns = 2 * np.pi / phase.seconds
    load = clock - phase.swing / turns * np.sin(turns * clock)
    warped: NDArray[np.float64] = np.interp(even, load, clock)
    return warped


def _lengths(table: tuple[int, ...], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    drawn: NDArray[np.int64] = np.maximum(1, np.interp(rng.random(count), QUANTILES, table)).astype(np.int64)
    return drawn


def block_names(hash_ids: tuple[int, ...], input_len: int, block_size: int) -> list[bytes]:
    """Return a name for each full KV block of a prompt; equal beginnings have equal names."""
    per_id = HASHED_TOKENS // block_size
    count = input_len // block_size
    return [b"%d:%d" % (hash_ids[i // per_id], i) for i in range(count)]

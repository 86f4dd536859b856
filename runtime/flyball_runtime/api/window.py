"""Sliding windows over the last minute: samples with exact quantiles, and counts, in bounded memory."""

import random
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from flyball_protocol import LatencyWindow

T = TypeVar("T")

SLICES = 60
MAX_KEPT_PER_SLICE = 256
"""Samples kept per slice. A slice that sees more keeps a uniform random subset (Vitter 1985, algorithm R)."""

QUANTILES = (0.5, 0.95, 0.99)


class Slices(Generic[T]):
    """The window as SLICES equal slices of time, each a ``T``. A slice leaves as a whole, so the window's length is
    exact to one slice (1 s of 60)."""

    def __init__(self, make: Callable[[], T], window_s: float) -> None:
        self._make = make
        self._slice_s = window_s / SLICES
        self._slices: deque[tuple[int, T]] = deque()

    def current(self, now: float) -> T:
        """The slice that ``now`` belongs to."""
        tick = int(now // self._slice_s)
        if not self._slices or self._slices[-1][0] != tick:
            self._prune(tick)
            self._slices.append((tick, self._make()))
        return self._slices[-1][1]

    def live(self, now: float) -> list[T]:
        """The slices inside the window, oldest first."""
        self._prune(int(now // self._slice_s))
        return [value for _, value in self._slices]

    def _prune(self, tick: int) -> None:
        while self._slices and self._slices[0][0] <= tick - SLICES:
            self._slices.popleft()


class SlidingCounts:
    """Counts by key over the window."""

    def __init__(self, window_s: float) -> None:
        self._slices: Slices[Counter[Hashable]] = Slices(Counter, window_s)

    def add(self, now: float, key: Hashable, count: int) -> None:
        self._slices.current(now)[key] += count

    def totals(self, now: float) -> Counter[Hashable]:
        return sum(self._slices.live(now), start=Counter())


class BucketCounts:
    """Samples by bucket, not cumulative; a sample equal to an edge belongs below it. The last bucket has no upper edge."""

    __slots__ = ("counts", "edges", "sum")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += count
        self.sum += value * count


class _Samples:
    """One slice: buckets of all its samples, and a bounded uniform choice of their values."""

    __slots__ = ("buckets", "count", "kept")

    def __init__(self, edges: Sequence[float]) -> None:
        self.buckets = BucketCounts(edges)
        self.count = 0
        self.kept: list[float] = []

    def add(self, value: float, count: int, rng: random.Random) -> None:
        self.buckets.add(value, count)
        for _ in range(count):
            self.count += 1
            if len(self.kept) < MAX_KEPT_PER_SLICE:
                self.kept.append(value)
            elif (place := int(rng.random() * self.count)) < MAX_KEPT_PER_SLICE:
                self.kept[place] = value

    @property
    def weight(self) -> float:
        """How many samples each kept one stands for."""
        return self.count / len(self.kept)


class SlidingSamples:
    """Latency samples, in seconds, over the window.

    Quantiles are those of the samples kept (nearest rank): exact up to MAX_KEPT_PER_SLICE samples a slice, beyond that
    an estimate from a uniform choice, each kept sample weighted by how many it stands for. Counts and buckets are always
    of all samples.
    """

    def __init__(self, edges: Sequence[float], window_s: float) -> None:
        self._edges = edges
        self._slices: Slices[_Samples] = Slices(lambda: _Samples(edges), window_s)
        self._rng = random.Random(0)

    def add(self, now: float, value: float, count: int = 1) -> None:
        """Add ``count`` samples of the same ``value``."""
        self._slices.current(now).add(value, count, self._rng)

    def summary(self, now: float) -> LatencyWindow:
        slices = [one for one in self._slices.live(now) if one.count]
        p50, p95, p99 = _quantiles(slices)
        buckets = np.sum([one.buckets.counts for one in slices], axis=0, dtype=int) if slices else None
        return LatencyWindow(
            count=sum(one.count for one in slices),
            p50_s=p50,
            p95_s=p95,
            p99_s=p99,
            edges_s=tuple(self._edges),
            counts=(0,) * (len(self._edges) + 1) if buckets is None else tuple(buckets.tolist()),
        )


def _quantiles(slices: list[_Samples]) -> list[float | None]:
    """QUANTILES by nearest rank over the weighted samples, None without samples."""
    if not slices:
        return [None] * len(QUANTILES)
    values = np.concatenate([one.kept for one in slices])
    weights = np.concatenate([np.full(len(one.kept), one.weight) for one in slices])
    order = np.argsort(values, kind="stable")
    ranks: NDArray[np.float64] = np.cumsum(weights[order])
    # Weights are ratios of integers; the slack keeps their rounding from moving a quantile by one sample.
    places = np.searchsorted(ranks, np.asarray(QUANTILES) * ranks[-1] - 1e-6)
    return [float(value) for value in values[order][places]]

"""Counts and samples, since the start and over a sliding window of time, in bounded memory."""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from math import inf
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from flyball_protocol import LatencyWindow

T = TypeVar("T")

SLICES = 60
MAX_KEPT_PER_SLICE = 256
"""Samples kept per slice. A slice with more keeps a uniform random subset (Vitter 1985, algorithm R)."""

MAX_PENDING = 1024
"""Samples that are put into their buckets in one go."""

QUANTILES = (0.5, 0.95, 0.99)


class Slices(Generic[T]):
    """The window as SLICES equal slices of time, each a ``T``.

    A slice leaves the window as a whole, so the window's length is exact to one slice (1 s of 60).

    Attributes:
        from_s, to_s: bounds of the current slice, that of the last sample.
    """

    def __init__(self, make: Callable[[], T], window_s: float) -> None:
        self._make = make
        self._slice_s = window_s / SLICES
        self._slices: deque[tuple[int, T]] = deque()
        self.from_s, self.to_s = inf, -inf
        self._tick, self._current = -1, make()

    def current(self, now: float) -> T:
        """Return the slice that ``now`` belongs to."""
        if not self.from_s <= now < self.to_s and (tick := int(now // self._slice_s)) != self._tick:
            self.from_s, self.to_s = tick * self._slice_s, (tick + 1) * self._slice_s
            self._tick, self._current = tick, self._make()
            self._prune(tick)
            self._slices.append((tick, self._current))
        return self._current

    def live(self, now: float) -> list[T]:
        """Return the slices inside the window, oldest first."""
        self._prune(int(now // self._slice_s))
        return [value for _, value in self._slices]

    def _prune(self, tick: int) -> None:
        while self._slices and self._slices[0][0] <= tick - SLICES:
            self._slices.popleft()


class Counts:
    """Counts by key."""

    def __init__(self, window_s: float) -> None:
        self.totals: Counter[Hashable] = Counter()
        self._recent: Slices[Counter[Hashable]] = Slices(Counter, window_s)

    def add(self, now: float, key: Hashable, count: int = 1) -> None:
        if count:
            self.totals[key] += count
            self._recent.current(now)[key] += count

    def recent(self, now: float) -> Counter[Hashable]:
        """Return the counts over the window."""
        return sum(self._recent.live(now), start=Counter())


class _Slice:
    """One slice of samples: how many are in each bucket, and some or all of their values."""

    __slots__ = ("_weighted", "buckets", "count", "kept")

    def __init__(self, num_buckets: int) -> None:
        self.buckets = np.zeros(num_buckets, dtype=np.int64)
        self.count = 0
        self.kept: list[float] = []
        self._weighted: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    def keep(self, values: list[float], rng: np.random.Generator) -> None:
        self._weighted = None
        room = MAX_KEPT_PER_SLICE - len(self.kept)
        self.kept += values[:room]
        self.count += min(room, len(values))
        if more := values[room:]:
            counts = np.arange(self.count + 1, self.count + len(more) + 1)
            places = (rng.random(len(more)) * counts).astype(np.int64)
            for at in np.flatnonzero(places < MAX_KEPT_PER_SLICE).tolist():
                self.kept[places[at]] = more[at]
            self.count += len(more)

    @property
    def weighted(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The samples kept, and how many each of them stands for."""
        if self._weighted is None:
            num = len(self.kept)
            self._weighted = np.array(self.kept, dtype=np.float64), np.full(num, self.count / num)
        return self._weighted


class Series:
    """Samples of one quantity.

    Adding is cheap: samples wait in a list, and are put into buckets by the thousand, at the end of a slice, or when
    somebody reads. Buckets count all samples; a sample equal to an edge belongs below it, and the last bucket has no
    upper edge. Quantiles of the window are those of the samples kept (nearest rank). They are exact up to
    MAX_KEPT_PER_SLICE samples a slice. Beyond that they are estimates: each kept sample is weighted by how many it
    stands for.
    """

    def __init__(self, edges: Sequence[float], window_s: float) -> None:
        self.edges = edges
        self._edges = np.array(edges)
        self._buckets = np.zeros(len(edges) + 1, dtype=np.int64)
        self._sum = 0.0
        self._slices: Slices[_Slice] = Slices(lambda: _Slice(len(edges) + 1), window_s)
        self._pending: list[float] = []
        self._pending_slice = _Slice(len(edges) + 1)
        self._rng = np.random.default_rng(0)

    def add(self, now: float, values: Sequence[float]) -> None:
        """Add any number of samples of this moment."""
        if not values:
            return
        if not self._slices.from_s <= now < self._slices.to_s or len(self._pending) >= MAX_PENDING:
            self._turn_to(now)
        self._pending.extend(values)

    def add_one(self, now: float, value: float) -> None:
        """Add a sample of this moment."""
        if not self._slices.from_s <= now < self._slices.to_s or len(self._pending) >= MAX_PENDING:
            self._turn_to(now)
        self._pending.append(value)

    def totals(self) -> tuple[list[int], float]:
        """Return the samples by bucket since the start, not cumulative, and their sum."""
        self._settle()
        counts: list[int] = self._buckets.tolist()
        return counts, self._sum

    def window(self, now: float) -> LatencyWindow:
        """Return the samples of the window; they are seconds."""
        self._settle()
        slices = [one for one in self._slices.live(now) if one.count]
        p50, p95, p99 = _quantiles(slices)
        buckets = sum((one.buckets for one in slices), start=np.zeros_like(self._buckets))
        return LatencyWindow(
            count=sum(one.count for one in slices),
            p50_s=p50,
            p95_s=p95,
            p99_s=p99,
            edges_s=tuple(self.edges),
            counts=tuple(buckets.tolist()),
        )

    def _turn_to(self, now: float) -> None:
        """Have samples of this moment wait."""
        self._settle()
        self._pending_slice = self._slices.current(now)

    def _settle(self) -> None:
        """Put the waiting samples into the buckets of the slice that they came in."""
        values, self._pending = self._pending, []
        if values:
            buckets = np.bincount(self._edges.searchsorted(values), minlength=len(self._buckets))
            self._buckets += buckets
            self._sum += sum(values)
            self._pending_slice.buckets += buckets
            self._pending_slice.keep(values, self._rng)


def _quantiles(slices: list[_Slice]) -> list[float | None]:
    """Return QUANTILES by nearest rank over the weighted samples, None without samples."""
    if not slices:
        return [None] * len(QUANTILES)
    values, weights = (np.concatenate(parts) for parts in zip(*(one.weighted for one in slices), strict=True))
    order = np.argsort(values, kind="stable")
    ranks: NDArray[np.float64] = np.cumsum(weights[order])
    # Weights are ratios of integers; the slack keeps their rounding from moving a quantile by one sample.
    places = np.searchsorted(ranks, np.asarray(QUANTILES) * ranks[-1] - 1e-6)
    return [float(value) for value in values[order][places]]

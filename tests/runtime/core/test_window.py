"""Sliding windows against the plain definition over all samples."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball_runtime.core.window import MAX_KEPT_PER_SLICE, Counts, Series

EDGES = (0.1, 0.2, 0.5)


def nearest_rank(values: list[float], quantile: float) -> float:
    return sorted(values)[math.ceil(quantile * len(values)) - 1]


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 1), st.integers(1, 5)), max_size=40))
def test_quantiles_and_buckets_are_exact_while_all_samples_are_kept(samples: list[tuple[float, float, int]]) -> None:
    window, now, seen = Series(EDGES, 60), 1000.0, []
    for gap_s, value, count in samples:
        now += gap_s
        window.add(now, [value] * count)
        seen += [(now, value)] * count
    summary = window.window(now)
    values = [value for when, value in seen if int(when) > int(now) - 60]
    assert summary.count == len(values) == sum(summary.counts)
    low = [0.0, *EDGES]
    for index, edge in enumerate(EDGES):
        assert summary.counts[index] == sum(
            low[index] < value <= edge or (index == 0 and value <= edge) for value in values
        )
    got = (summary.p50_s, summary.p95_s, summary.p99_s)
    assert got == (tuple(nearest_rank(values, q) for q in (0.5, 0.95, 0.99)) if values else (None, None, None))


def test_a_flood_is_sampled_fairly_in_bounded_memory() -> None:
    window, rng = Series(EDGES, 60), random.Random(1)
    for _ in range(20_000):
        window.add(0.0, [rng.random()])
    for _ in range(20_000):
        window.add(1.0, [1 + rng.random()])
    window.add(2.0, [5.0])  # one sample beside two floods is still one sample
    summary = window.window(2.0)
    kept = [one.kept for one in window._slices.live(2.0)]
    assert [len(values) for values in kept] == [MAX_KEPT_PER_SLICE, MAX_KEPT_PER_SLICE, 1]
    assert summary.count == 40_001
    assert summary.p50_s == pytest.approx(1.0, abs=0.05) and summary.p95_s == pytest.approx(1.9, abs=0.06)
    assert summary.p99_s < 2.0


def test_counts_leave_after_the_window() -> None:
    counts = Counts(60)
    counts.add(0.0, "a", 2)
    counts.add(30.0, "a", 3)
    counts.add(30.5, ("b", "x"), 1)
    assert counts.recent(59.9) == {"a": 5, ("b", "x"): 1}
    assert counts.recent(60.0) == {"a": 3, ("b", "x"): 1}
    assert counts.recent(1000.0) == {}

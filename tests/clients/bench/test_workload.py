import numpy as np
import pytest

from flyball_clients.bench.settings import BenchSettings
from flyball_clients.bench.workload import arrival_offsets, spread_equal_times


def gaps(settings: BenchSettings, count: int = 20_000) -> np.ndarray:
    return np.diff(arrival_offsets(settings, count, np.random.default_rng(3)))


def variation(values: np.ndarray) -> float:
    return float(values.std() / values.mean())


def test_poisson_gaps_have_the_rate_and_variation_one() -> None:
    found = gaps(BenchSettings(request_rate=5.0))
    assert found.mean() == pytest.approx(0.2, rel=0.03)
    assert variation(found) == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("shape", [0.25, 4.0])
def test_gamma_gaps_vary_as_the_shape_says(shape: float) -> None:
    found = gaps(BenchSettings(request_rate=5.0, arrival="gamma", burstiness=shape))
    assert found.mean() == pytest.approx(0.2, rel=0.05)
    assert variation(found) == pytest.approx(shape**-0.5, rel=0.05)


def test_constant_gaps_are_all_alike() -> None:
    assert gaps(BenchSettings(request_rate=4.0, arrival="constant"), 5).tolist() == [0.25] * 4


def test_an_infinite_rate_sends_all_at_once() -> None:
    offsets = arrival_offsets(BenchSettings(request_rate=float("inf")), 5, np.random.default_rng(0))
    assert offsets.tolist() == [0.0] * 5


@pytest.mark.parametrize("count", [1, 2, 9])
def test_the_first_comes_at_zero_and_there_are_as_many_as_asked(count: int) -> None:
    offsets = arrival_offsets(BenchSettings(request_rate=1.0), count, np.random.default_rng(0))
    assert len(offsets) == count
    assert offsets[0] == 0.0


def test_equal_times_spread_over_their_tick_and_stay_in_order() -> None:
    times = np.repeat([0.0, 3.0, 6.0, 12.0], 100)
    spread = spread_equal_times(times, np.random.default_rng(0))
    assert np.all(np.diff(spread) >= 0)
    assert np.all(spread // 3.0 == times // 3.0)
    assert len(np.unique(spread)) == len(times)
    assert spread[:100].mean() == pytest.approx(1.5, abs=0.3)


@pytest.mark.parametrize("times", [[0.0, 1.0, 5.0], [2.0, 2.0], [1.0]])
def test_times_without_a_tick_stay_as_they_are(times: list[float]) -> None:
    assert spread_equal_times(np.array(times), np.random.default_rng(0)).tolist() == times

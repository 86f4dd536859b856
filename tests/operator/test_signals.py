"""Shares over an objective and their confidence."""

import pytest

from flyball_operator.tuning.signals import Standing, samples_over, signal, wilson
from flyball_protocol import LatencyWindow


def window(counts: tuple[int, ...], *, p99_s: float | None = 9.0) -> LatencyWindow:
    return LatencyWindow(count=sum(counts), p50_s=None, p95_s=None, p99_s=p99_s, edges_s=(0.1, 0.2, 0.4), counts=counts)


@pytest.mark.parametrize(
    ("objective_s", "over"),
    [(0.2, 40), (0.1, 90), (0.15, 65), (0.3, 25), (0.4, 10), (0.05, 95), (5.0, 10)],
)
def test_samples_over_are_exact_at_edges_and_linear_between(objective_s: float, over: float) -> None:
    assert samples_over(window((10, 50, 30, 10)), objective_s) == pytest.approx(over)


def test_the_open_bucket_counts_as_met_when_nearly_all_samples_meet_the_objective() -> None:
    assert samples_over(window((10, 50, 30, 10), p99_s=0.9), 1.0) == 0
    assert samples_over(window((10, 50, 30, 10), p99_s=1.1), 1.0) == 10


def test_wilson_matches_published_values() -> None:
    # 10 of 100: the 95 % Wilson interval is 5.5 % to 17.4 % (e.g. Brown, Cai, DasGupta 2001, worked examples).
    assert wilson(10, 100) == pytest.approx((0.0552, 0.1744), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 50)[0] == 0.0
    assert wilson(50, 50)[1] == 1.0


@pytest.mark.parametrize(
    ("over", "within", "standing"),
    [
        (0, 99, Standing.UNKNOWN),
        (0, 1000, Standing.CLEAR),
        (12, 988, Standing.CLEAR),
        (18, 982, Standing.MET),
        (25, 975, Standing.MET),
        (45, 955, Standing.NEAR),
        (60, 940, Standing.NEAR),
        (80, 920, Standing.OVER),
        (8, 92, Standing.NEAR),  # 8 %, but of 100 samples only
    ],
)
def test_standing_needs_confidence(over: int, within: int, standing: Standing) -> None:
    assert signal("gaps", [window((0, within, over, 0))], 200, min_samples=100).standing is standing


def test_an_objective_that_is_not_set_is_never_missed() -> None:
    found = signal("gaps", [window((0, 0, 0, 1000))], None, min_samples=1)
    assert (found.standing, found.num_over, str(found)) == (Standing.UNSET, 0, "gaps: no objective")


def test_without_samples_no_share_is_over() -> None:
    assert signal("gaps", [window((0, 0, 0, 0))], 200, min_samples=1).share == 0.0


def test_a_signal_in_words_names_the_objective_in_milliseconds() -> None:
    found = str(signal("gaps", [window((0, 940, 60, 0))], 2500, min_samples=1))
    assert found == "0.0% of 1000 gaps took longer than 2500 ms (0.0% to 0.4%; budget 5%)"


def test_wilson_is_wide_for_one_sample() -> None:
    assert wilson(0, 1)[1] == pytest.approx(0.7935, abs=1e-4)


def test_replicas_add_up() -> None:
    both = signal("gaps", [window((0, 60, 0, 0)), window((0, 20, 20, 0))], 200, min_samples=100)
    assert (both.num_over, both.num_samples) == (20, 100)

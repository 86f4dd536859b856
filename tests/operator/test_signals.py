"""Shares over an objective, and how sure they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flyball_operator.spec import Objectives
from flyball_operator.tuning.signals import BUDGET, NOTHING, Counts, Standing, objectives_of, signals, total, wilson
from flyball_protocol import Objectives as PostedObjectives
from flyball_protocol import Share
from operator_kit.evidence import TUNING


def counts(
    ttft: tuple[int, int] = (0, 1000), itl: tuple[int, int] = (0, 1000), steps: tuple[int, int] = (0, 2000)
) -> Counts:
    return Counts(*(Share(num=num, num_over=over) for over, num in (ttft, itl, steps)))


def standings(found: Counts) -> tuple[Standing, Standing]:
    ttft, itl = signals(TUNING, found)
    return ttft.standing, itl.standing


@pytest.mark.parametrize(
    ("over", "standing"),
    [(0, Standing.CLEAR), (10, Standing.CLEAR), (25, Standing.MET), (50, Standing.NEAR), (75, Standing.OVER)],
)
def test_where_an_objective_stands(over: int, standing: Standing) -> None:
    assert standings(counts(ttft=(over, 1000)))[0] is standing


def test_the_worse_count_speaks_for_inter_token_latency() -> None:
    assert standings(counts(itl=(200, 1000)))[1] is Standing.OVER
    assert standings(counts(steps=(400, 2000)))[1] is Standing.OVER
    assert standings(counts(itl=(1, 1), steps=(0, 2000)))[1] is Standing.CLEAR, "one request says nothing"
    assert standings(counts(itl=(1, 1), steps=(0, 99)))[1] is Standing.UNKNOWN


def test_too_few_samples_say_nothing() -> None:
    assert standings(counts(ttft=(99, 99)))[0] is Standing.UNKNOWN
    assert standings(NOTHING) == (Standing.UNKNOWN, Standing.UNKNOWN)


def test_without_an_objective_nothing_is_asked() -> None:
    ttft, itl = signals(structs.replace(TUNING, objectives=Objectives()), counts())
    assert (ttft.standing, itl.standing) == (Standing.UNSET, Standing.UNSET)
    assert str(ttft) == "first tokens: no objective"


def test_steps_in_a_row_weigh_less_than_independent_samples() -> None:
    """Six in a hundred of 1000 steps are no proof: a few prefills made them."""
    assert standings(counts(steps=(65, 1000)))[1] is Standing.NEAR
    assert wilson(65, 1000)[0] > BUDGET, "as independent samples they would be one"


def test_the_counts_of_windows_and_replicas_add_up() -> None:
    assert total([counts((1, 10)), counts((2, 20))]) == counts((3, 30), (0, 2000), (0, 4000))


def test_one_replica_of_several_needs_its_part_of_the_samples() -> None:
    assert signals(TUNING, counts(ttft=(0, 25)), one_of=4)[0].standing is not Standing.UNKNOWN


def test_objectives_are_posted_in_seconds() -> None:
    assert objectives_of(TUNING) == PostedObjectives(ttft_s=1.0, itl_s=0.04)


def test_it_is_told_with_its_numbers() -> None:
    assert str(signals(TUNING, counts(ttft=(100, 1000)))[0]) == (
        "10.0% of 1000 first tokens took longer than 1 s (7.7% to 12.9%; budget 5%)"
    )


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_interval_holds_the_share(a: int, b: int) -> None:
    over, num = sorted((a, b))
    low, high = wilson(over, num)
    assert 0 <= low <= high <= 1
    if num:
        assert low - 1e-12 <= over / num <= high + 1e-12


def test_the_interval_by_hand() -> None:
    assert wilson(5, 100) == pytest.approx((0.0215, 0.1118), abs=1e-4)

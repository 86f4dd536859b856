"""How numbers stand in sentences, Events and status."""

import math

import pytest

from flyball_operator.status.tuning import ShownLimits, ShownMove
from flyball_operator.tuning.knobs import in_words, moved_in_words
from flyball_operator.tuning.moved import Moved
from flyball_operator.tuning.words import duration, short, three_digits
from flyball_protocol import Limits


@pytest.mark.parametrize(
    ("value", "text"), [(51_000, "51000"), (99.96, "100"), (5.954, "5.95"), (100, "100"), (0, "0")]
)
def test_numbers_are_short_and_without_exponents(value: float, text: str) -> None:
    assert short(value) == text
    assert three_digits(value) == float(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0007, "0.7 ms"),
        (0.000_04, "0.04 ms"),
        (0.012, "12 ms"),
        (0.0123, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (51.0, "51 s"),
        (90_000.0, "90000 s"),
    ],
)
def test_times_have_the_unit_that_is_easiest_to_read(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("limit", "value", "text"),
    [
        ("step_time_target_ms", 0.7, "0.7 ms"),
        ("step_time_target_ms", 51_000.0, "51 s"),
        ("step_time_target_ms", math.inf, "none"),
        ("step_time_target_ms", None, "none"),
        ("kv_cache_fraction", 0.8, "80%"),
        ("max_num_seqs", 64.0, "64"),
    ],
)
def test_limits_have_their_units(limit: str, value: float | None, text: str) -> None:
    assert in_words(limit, value) == text
    assert moved_in_words(limit, value, value) == f"{limit} {text} -> {text}"
    assert str(Moved(knob=limit, before=value, after=value)) == f"{limit} {text} -> {text}"


def test_the_status_has_step_times_of_less_than_a_millisecond() -> None:
    limits = Limits(max_num_seqs=8, kv_cache_fraction=0.5, max_num_batched_tokens=64, step_time_target_ms=0.7123)
    assert ShownLimits.of(limits).step_time_target_milliseconds == 0.712
    move = ShownMove.of(Moved(knob="step_time_target_ms", before=1.0, after=0.7))
    assert (move.limit, move.before, move.after) == ("stepTimeTargetMilliseconds", 1, 0.7)
    share = ShownMove.of(Moved(knob="kv_cache_fraction", before=0.8, after=0.55))
    assert (share.before, share.after) == (80, 55)

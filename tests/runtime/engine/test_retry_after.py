import pytest

from flyball_runtime.engine.retry_after import RetryAfter


@pytest.mark.parametrize(
    ("ended_at_s", "num_waiting", "now_s", "expected_s"),
    [
        ([], 100, 5.0, 1),
        ([0.0], 3, 0.0, 1),
        ([0.0, 1.0, 2.0, 3.0], 10, 4.0, 10),
        ([0.0, 1.0, 2.0, 3.0], 10, 5.0, 13),
        ([0.0, 1.0], 1000, 2.0, 60),
    ],
    ids=["nothing known", "just now", "one a second", "slowing down", "at most a minute"],
)
def test_estimate(ended_at_s: list[float], num_waiting: int, now_s: float, expected_s: int):
    retry_after = RetryAfter()
    for at_s in ended_at_s:
        retry_after.record_ending(at_s)
    assert retry_after.estimate_s(num_waiting, now_s) == expected_s


def test_only_recent_endings_count():
    retry_after = RetryAfter()
    for i in range(64):
        retry_after.record_ending(float(i))
    for i in range(64):
        retry_after.record_ending(1000 + i / 8)
    assert retry_after.estimate_s(80, 1008.0) == 10


def test_time_before_the_requests_does_not_count():
    retry_after = RetryAfter()
    retry_after.record_ending(0.0)
    retry_after.forget()
    assert retry_after.estimate_s(10, 3600.0) == 1
    for at_s in (3600.0, 3601.0, 3602.0):
        retry_after.record_ending(at_s)
    assert retry_after.estimate_s(10, 3603.0) == 10

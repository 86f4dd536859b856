import pytest

from flyball_clients.bench.load import RequestRecord
from flyball_clients.bench.settings import Slo
from flyball_clients.bench.statistics import goodput, missed_bounds, peak_in_flight, summarise


def record(arrival_s: float = 0.0, **fields: object) -> RequestRecord:
    values: dict[str, object] = {"index": 0, "arrival_s": arrival_s, "sent_s": arrival_s, **fields}
    return RequestRecord(**values)  # type: ignore[arg-type]


def answered(ttft_s: float, gaps_s: list[float], output_tokens: int | None = None) -> RequestRecord:
    tokens = len(gaps_s) + 1 if output_tokens is None else output_tokens
    last_token_s = ttft_s + sum(gaps_s)
    return record(
        first_token_s=ttft_s, last_token_s=last_token_s, gaps_s=gaps_s, output_tokens=tokens, end_s=last_token_s
    )


def test_percentiles_of_known_values() -> None:
    summary = summarise(float(value) for value in range(101))
    assert summary is not None
    assert (summary.p50, summary.p90, summary.p95, summary.p99) == (50, 90, 95, 99)
    assert (summary.count, summary.mean, summary.min, summary.max) == (101, 50, 0, 100)
    assert summary.std == pytest.approx(29.15476)


def test_percentiles_interpolate() -> None:
    summary = summarise([1.0, 2.0])
    assert summary is not None
    assert (summary.p50, summary.p90) == (1.5, pytest.approx(1.9))


def test_missing_values_are_left_out_and_nothing_has_no_summary() -> None:
    summary = summarise([None, 3.0, None])
    assert summary is not None
    assert (summary.count, summary.p99) == (1, 3.0)
    assert summarise([None]) is None


def test_times_of_a_request() -> None:
    late = record(1.0, sent_s=1.5, first_token_s=2.0, last_token_s=4.0, output_tokens=5)
    assert (late.ttft_s, late.ttft_from_arrival_s) == (0.5, 1.0)
    assert (late.e2e_s, late.e2e_from_arrival_s) == (2.5, 3.0)
    assert late.tpot_s == 0.5


def test_one_token_has_no_time_per_output_token() -> None:
    assert answered(0.1, []).tpot_s is None
    assert record().ttft_s is record().e2e_s is record().tpot_s is None


def test_tpot_divides_by_tokens_and_not_by_chunks() -> None:
    assert answered(0.1, [0.4], output_tokens=5).tpot_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("slo", "missed"),
    [
        (Slo(ttft_s=0.5, tpot_s=0.2, itl_s=0.5, e2e_s=2.0), []),
        (Slo(ttft_s=0.1), ["ttft"]),
        (Slo(tpot_s=0.04), ["tpot"]),
        (Slo(tpot_s=0.06, itl_s=0.06), ["itl"]),  # one stall: the mean hides it, the 99th percentile does not
        (Slo(e2e_s=0.6, ttft_s=0.1), ["ttft", "e2e"]),
    ],
)
def test_which_bounds_a_request_misses(slo: Slo, missed: list[str]) -> None:
    assert missed_bounds(answered(0.2, [0.01] * 9 + [0.41]), slo) == missed


def test_lateness_of_the_generator_counts_against_ttft() -> None:
    late = record(1.0, sent_s=1.4, first_token_s=1.6, last_token_s=1.6, output_tokens=1)
    assert missed_bounds(late, Slo(ttft_s=0.5)) == ["ttft"]


def test_goodput_counts_failures_in_the_share() -> None:
    records = [answered(0.1, [0.01]), answered(0.9, [0.01]), answered(0.9, [0.5]), record(error="timeout")]
    found = goodput(records, Slo(ttft_s=0.5, itl_s=0.1), duration_s=4.0)
    assert (found.good, found.share, found.requests_per_s) == (1, 0.25, 0.25)
    assert found.missed == {"ttft": 2, "itl": 1}


def test_peak_in_flight_counts_an_ending_before_a_start_at_the_same_time() -> None:
    spans = [(0, 2), (1, 3), (2, 4), (5, 6)]
    assert peak_in_flight([record(float(start), end_s=float(end)) for start, end in spans]) == 2
    assert peak_in_flight([]) == 0

"""Numbers over many requests. Pure functions."""

from collections.abc import Iterable

import numpy as np
from msgspec import Struct

from flyball_runtime.bench.record import RequestRecord
from flyball_runtime.bench.slo import Slo


class Summary(Struct, frozen=True, kw_only=True):
    """Seconds. Percentiles interpolate linearly between the two nearest values, as numpy's default does."""

    count: int
    mean: float
    std: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def summarise(values: Iterable[float | None]) -> Summary | None:
    """Summary of the values that are there; None when there are none."""
    data = np.array([value for value in values if value is not None])
    if not len(data):
        return None
    p50, p90, p95, p99 = np.percentile(data, (50, 90, 95, 99)).tolist()
    return Summary(
        count=len(data),
        mean=float(data.mean()),
        std=float(data.std()),
        min=float(data.min()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=float(data.max()),
    )


class Goodput(Struct, frozen=True, kw_only=True):
    """Requests that met the whole objective.

    Attributes:
        share: of all requests, failed ones included.
        missed: bound to how many successful requests missed it; one request may miss several.
    """

    slo: Slo
    good: int
    share: float
    requests_per_s: float
    missed: dict[str, int]


def goodput(records: list[RequestRecord], slo: Slo, duration_s: float) -> Goodput:
    """A failed request is never good. A bound on what a request has not (a gap between tokens, of one token) is met."""
    misses = [missed_bounds(record, slo) for record in records if record.ok]
    good = sum(not names for names in misses)
    return Goodput(
        slo=slo,
        good=good,
        share=good / len(records) if records else 0.0,
        requests_per_s=good / duration_s if duration_s > 0 else 0.0,
        missed={name: sum(name in names for names in misses) for name in slo.bounds},
    )


def missed_bounds(record: RequestRecord, slo: Slo) -> list[str]:
    """Names of the bounds that a successful request did not meet. TTFT and E2E count from the scheduled arrival."""
    seen = {
        "ttft": record.ttft_from_arrival_s,
        "tpot": record.tpot_s,
        "itl": float(np.percentile(record.gaps_s, 99)) if record.gaps_s else None,
        "e2e": record.e2e_from_arrival_s,
    }
    return [name for name, bound in slo.bounds.items() if (value := seen[name]) is not None and value > bound]


def peak_in_flight(records: list[RequestRecord]) -> int:
    """Most requests that were open at one moment."""
    if not records:
        return 0
    events = sorted([(record.sent_s, 1) for record in records] + [(record.end_s, -1) for record in records])
    return int(np.cumsum([step for _, step in events]).max())

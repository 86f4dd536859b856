"""Statistics over many requests, and checks of the load generator itself."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from types import TracebackType

import numpy as np
from msgspec import Struct

from flyball_clients.bench.load import RequestRecord
from flyball_clients.bench.settings import Slo


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
    """Return a summary of the values that are not None; None if there are none."""
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
    """Requests that met all bounds of the objective.

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
    """Count good requests. A failed request is never good.

    A bound on a value that a request does not have is met, such as on the gap between tokens if there is one token.
    """
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
    """Return the names of the bounds that a successful request missed. TTFT and E2E count from the scheduled arrival."""
    seen = {
        "ttft": record.ttft_from_arrival_s,
        "tpot": record.tpot_s,
        "itl": float(np.percentile(record.gaps_s, 99)) if record.gaps_s else None,
        "e2e": record.e2e_from_arrival_s,
    }
    return [name for name, bound in slo.bounds.items() if (value := seen[name]) is not None and value > bound]


def peak_in_flight(records: list[RequestRecord]) -> int:
    """Return the largest number of requests in flight at one moment."""
    if not records:
        return 0
    events = sorted([(record.sent_s, 1) for record in records] + [(record.end_s, -1) for record in records])
    return int(np.cumsum([step for _, step in events]).max())


SAMPLE_EVERY_S = 0.01
MAX_LAG_S = 0.01
MAX_CPU_SHARE = 0.9
MIN_SAMPLES = 100  # about a second; a shorter run is mostly start-up


class ClientHealth(Struct, frozen=True, kw_only=True):
    """Lateness and CPU share of the load generator.

    Attributes:
        send_lag_s: how much later than scheduled requests were sent; None in a closed loop.
        loop_lag_s: how late the event loop woke a sleeper, so how stale a timestamp may be; None for very short runs.
        cpu_share: CPU seconds a second; 1 is all that this single-threaded client can use.
    """

    send_lag_s: Summary | None
    loop_lag_s: Summary | None
    cpu_share: float

    def caveats(self) -> Iterator[str]:
        """Yield warnings if the client influenced the figures."""
        send_lag_s = self.send_lag_s.p99 if self.send_lag_s else 0.0
        loop_lag_s = self.loop_lag_s.p99 if self.loop_lag_s else 0.0
        long_enough = self.loop_lag_s is not None and self.loop_lag_s.count >= MIN_SAMPLES
        if send_lag_s > MAX_LAG_S:
            yield (
                f"requests were sent {send_lag_s * 1000:.0f} ms late at p99, so the load differs from the requested one: "
                "use the figures that count from arrival."
            )
        if long_enough and (loop_lag_s > MAX_LAG_S or self.cpu_share > MAX_CPU_SHARE):
            yield (
                f"this client was a bottleneck (event loop {loop_lag_s * 1000:.0f} ms late at p99, CPU {self.cpu_share:.0%}): "
                "latencies are overstated. Give the client a CPU core for itself, or use several clients."
            )


class ClientMonitor:
    """Async context that watches the event loop and the CPU while a load runs."""

    async def __aenter__(self) -> "ClientMonitor":
        self._lags_s: list[float] = []
        self._wall_s, self._cpu_s = -time.perf_counter(), -time.process_time()
        self._sampler = asyncio.create_task(self._sample())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._sampler.cancel()
        self._wall_s += time.perf_counter()
        self._cpu_s += time.process_time()

    def health(self, send_lag_s: Summary | None) -> ClientHealth:
        """Return what was measured between entering and leaving."""
        cpu_share = self._cpu_s / self._wall_s if self._wall_s > 0 else 0.0
        return ClientHealth(send_lag_s=send_lag_s, loop_lag_s=summarise(self._lags_s), cpu_share=cpu_share)

    async def _sample(self) -> None:
        while True:
            due = time.perf_counter() + SAMPLE_EVERY_S
            await asyncio.sleep(SAMPLE_EVERY_S)
            self._lags_s.append(max(0.0, time.perf_counter() - due))

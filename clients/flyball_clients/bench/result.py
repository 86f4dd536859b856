"""The result of a run, as it is written to JSON."""

import math
import os
import platform
from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from flyball_clients.bench.load import RequestRecord
from flyball_clients.bench.settings import BenchSettings
from flyball_clients.bench.statistics import (
    ClientHealth,
    ClientMonitor,
    Goodput,
    Summary,
    goodput,
    peak_in_flight,
    summarise,
)
from flyball_protocol import installed_version

SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or is removed; not raised for new fields."""


class ErrorCount(Struct, frozen=True, kw_only=True):
    """Number of errors of one kind, and the first message."""

    count: int
    example: str


class Requests(Struct, frozen=True, kw_only=True):
    """Counts of requests. ``planned`` is more than ``sent`` when --max-duration cut the run."""

    planned: int
    sent: int
    succeeded: int
    failed: int
    peak_in_flight: int
    errors: dict[str, ErrorCount]


class Throughput(Struct, frozen=True, kw_only=True):
    """Totals of successful requests, and rates over the time from the first request sent to the last one ended."""

    input_tokens: int
    output_tokens: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float


class Latency(Struct, frozen=True, kw_only=True):
    """Seconds, over successful requests; None where no request had one.

    Attributes:
        ttft_s, e2e_s: from sending to the first and last token.
        ttft_from_arrival_s, e2e_from_arrival_s: from the scheduled arrival, so that a late generator hides nothing.
        itl_s: gaps between consecutive chunks, of all requests together.
        tpot_s: each request's (last - first token) / (output tokens - 1).
    """

    ttft_s: Summary | None
    ttft_from_arrival_s: Summary | None
    itl_s: Summary | None
    tpot_s: Summary | None
    e2e_s: Summary | None
    e2e_from_arrival_s: Summary | None


class Environment(Struct, frozen=True, kw_only=True):
    """The machine that ran the client."""

    flyball: str = installed_version()
    python: str = platform.python_version()
    aiohttp: str = aiohttp.__version__
    platform: str = platform.platform()
    num_cpus: int = os.cpu_count() or 0


class ServerFacts(Struct, frozen=True, kw_only=True):
    """The server. ``max_model_len``: context length in tokens, if the server reports it."""

    base_url: str
    model: str
    max_model_len: int | None = None


class BenchResult(Struct, frozen=True, kw_only=True):
    """The whole result of a run. ``records`` are in order of their index."""

    schema_version: int
    started_at: str
    settings: BenchSettings
    environment: Environment
    server: ServerFacts
    duration_s: float
    requests: Requests
    throughput: Throughput
    latency: Latency
    goodput: Goodput | None
    client: ClientHealth
    warnings: list[str]
    records: list[RequestRecord]

    def to_json(self, *, save_requests: bool = False) -> bytes:
        """Return indented JSON. The records of requests are left out by default, because they contain every gap."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        if not save_requests:
            del plain["records"]
        if self.settings.request_rate == math.inf:
            plain["settings"]["request_rate"] = "inf"  # JSON has no infinity
        return msgspec.json.format(msgspec.json.encode(plain), indent=2) + b"\n"


def build_result(
    settings: BenchSettings,
    server: ServerFacts,
    records: list[RequestRecord],
    *,
    started_at: str,
    num_planned: int,
    asked_output_tokens: int,
    monitor: ClientMonitor,
    warnings: list[str],
) -> BenchResult:
    """Return the result of a run.

    Args:
        asked_output_tokens: sum of ``max_tokens`` over the successful requests, 0 where a shorter answer is as good.
        warnings: what was noticed before the run; what the records tell is added.
    """
    good = [record for record in records if record.ok]
    duration_s = max(r.end_s for r in records) - min(r.sent_s for r in records) if records else 0.0
    send_lag_s = None if settings.closed_loop else summarise(r.sent_s - r.arrival_s for r in records)
    client = monitor.health(send_lag_s)
    return BenchResult(
        schema_version=SCHEMA_VERSION,
        started_at=started_at,
        settings=settings,
        environment=Environment(),
        server=server,
        duration_s=duration_s,
        requests=_count_requests(records, num_planned),
        throughput=_throughput(good, duration_s),
        latency=_latency(good),
        goodput=None if settings.slo is None else goodput(records, settings.slo, duration_s),
        client=client,
        warnings=[*warnings, *_record_caveats(good, len(records), num_planned, asked_output_tokens), *client.caveats()],
        records=sorted(records, key=lambda record: record.index),
    )


def _count_requests(records: list[RequestRecord], num_planned: int) -> Requests:
    failed = [record for record in records if not record.ok]
    errors: dict[str, ErrorCount] = {}
    for record in failed:
        kind = record.error or ""
        seen = errors.get(kind)
        example = seen.example if seen else record.error_message or ""
        errors[kind] = ErrorCount(count=1 + (seen.count if seen else 0), example=example)
    return Requests(
        planned=num_planned,
        sent=len(records),
        succeeded=len(records) - len(failed),
        failed=len(failed),
        peak_in_flight=peak_in_flight(records),
        errors=errors,
    )


def _throughput(good: list[RequestRecord], duration_s: float) -> Throughput:
    num_in = sum(record.input_tokens or 0 for record in good)
    num_out = sum(record.output_tokens for record in good)

    def rate(count: int) -> float:
        return count / duration_s if duration_s > 0 else 0.0

    return Throughput(
        input_tokens=num_in,
        output_tokens=num_out,
        requests_per_s=rate(len(good)),
        input_tokens_per_s=rate(num_in),
        output_tokens_per_s=rate(num_out),
        total_tokens_per_s=rate(num_in + num_out),
    )


def _latency(good: list[RequestRecord]) -> Latency:
    return Latency(
        ttft_s=summarise(record.ttft_s for record in good),
        ttft_from_arrival_s=summarise(record.ttft_from_arrival_s for record in good),
        itl_s=summarise(gap for record in good for gap in record.gaps_s),
        tpot_s=summarise(record.tpot_s for record in good),
        e2e_s=summarise(record.e2e_s for record in good),
        e2e_from_arrival_s=summarise(record.e2e_from_arrival_s for record in good),
    )


def _record_caveats(
    good: list[RequestRecord], num_sent: int, num_planned: int, asked_output_tokens: int
) -> Iterator[str]:
    """Yield warnings that follow from the records."""
    if num_sent < num_planned:
        yield f"--max-duration stopped the run after {num_sent} of {num_planned} requests."
    if not all(record.tokens_from_usage for record in good):
        yield "the server sent no usage for some requests, so their output tokens are the number of chunks."
    num_out = sum(record.output_tokens for record in good)
    if num_out < 0.95 * asked_output_tokens:
        yield (
            f"answers ended early: {num_out} of {asked_output_tokens} requested output tokens. "
            "For fixed lengths add --ignore-eos, if the server accepts it."
        )

"""A result as a table for people."""

from collections.abc import Iterator

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from flyball_runtime.bench.result import BenchResult
from flyball_runtime.bench.settings import BenchSettings
from flyball_runtime.bench.statistics import Goodput, Summary

_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def print_report(result: BenchResult, console: Console) -> None:
    """Print title, counts, latencies, failures and warnings; fits in 80 columns."""
    console.print(Group(*_parts(result)))


def _parts(result: BenchResult) -> Iterator[RenderableType]:
    yield ""
    yield Text(f"{result.server.model} at {result.server.base_url}, {result.settings.endpoint} API", style="bold")
    yield Text(f"{describe_load(result.settings)}, {result.duration_s:.1f} s", style="dim")
    yield _counts(result)
    if result.goodput is not None:
        yield Text(_goodput_caption(result.goodput), style="dim")
    if result.requests.succeeded:
        yield _latencies(result)
    for kind, error in result.requests.errors.items():
        yield Text(f"{error.count} failed, {kind}: {error.example}", style="red")
    for warning in result.warnings:
        yield Text(f"Warning: {warning}", style="yellow")


def describe_load(settings: BenchSettings) -> str:
    """The load in a few words."""
    if settings.trace is not None:
        return f"open loop, trace {settings.trace} at {settings.trace_speed:g}x speed"
    if settings.request_rate is None:
        return f"closed loop, {settings.max_in_flight} in flight"
    shape = f" (shape {settings.burstiness:g})" if settings.arrival == "gamma" else ""
    return f"open loop, {settings.request_rate:g} requests/s, {settings.arrival}{shape} arrivals"


def _counts(result: BenchResult) -> Table:
    requests, throughput = result.requests, result.throughput
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "total", "a second", "a request"):
        table.add_column(name, justify="left" if name == "" else "right")
    table.add_row("Requests answered", f"{requests.succeeded:,}", f"{throughput.requests_per_s:,.2f}", "")
    for name, count, rate in (
        ("Input tokens", throughput.input_tokens, throughput.input_tokens_per_s),
        ("Output tokens", throughput.output_tokens, throughput.output_tokens_per_s),
    ):
        table.add_row(name, f"{count:,}", f"{rate:,.1f}", f"{count / max(requests.succeeded, 1):,.1f}")
    if requests.failed:
        table.add_row("Requests failed", f"{requests.failed:,}", "", "", style="red")
    if result.goodput is not None:
        table.add_row(*_goodput_row(result.goodput))
    return table


def _goodput_row(goodput: Goodput) -> tuple[str, str, str, str]:
    return "Good requests", f"{goodput.good:,}", f"{goodput.requests_per_s:,.2f}", f"{goodput.share:.1%}"


def _goodput_caption(goodput: Goodput) -> str:
    missed = ", ".join(f"{name} {count}" for name, count in goodput.missed.items() if count)
    return f"good: {goodput.slo}" + (f"; missed by {missed}" if missed else "")


def _latencies(result: BenchResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("ms")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for name, summary in _latency_rows(result):
        if summary is not None:
            table.add_row(name, *(_milliseconds(getattr(summary, column)) for column in _COLUMNS))
    return table


def _latency_rows(result: BenchResult) -> Iterator[tuple[str, Summary | None]]:
    latency, open_loop = result.latency, not result.settings.closed_loop
    yield "TTFT", latency.ttft_s
    if open_loop:
        yield "TTFT from arrival", latency.ttft_from_arrival_s
    yield "ITL", latency.itl_s
    yield "TPOT", latency.tpot_s
    yield "E2E", latency.e2e_s
    if open_loop:
        yield "E2E from arrival", latency.e2e_from_arrival_s
        yield "Sent late by", result.client.send_lag_s


def _milliseconds(seconds: float) -> str:
    milliseconds = seconds * 1000
    return f"{milliseconds:,.0f}" if milliseconds >= 1000 else f"{milliseconds:.1f}"

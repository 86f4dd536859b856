"""A result for people: progress while it runs, then a table and a chart."""

import importlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from flyball_clients.bench.load import LoadObserver, RequestRecord
from flyball_clients.bench.result import BenchResult
from flyball_clients.bench.settings import BenchSettings
from flyball_clients.bench.statistics import Goodput, Summary
from flyball_clients.errors import ConfigError


class ProgressBar(LoadObserver):
    """Context manager; draws only when ``console`` is a terminal."""

    def __init__(self, console: Console) -> None:
        columns: list[ProgressColumn | str] = [
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[cyan]{task.fields[in_flight]}[/] in flight"),
            TextColumn("[cyan]{task.fields[rate]:,.0f}[/] tok/s"),
            TextColumn("[red]{task.fields[failed]}"),
        ]
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._progress.add_task("", total=None, in_flight=0, rate=0.0, failed="")
        self._started: float | None = None
        self._in_flight = self._failed = self._tokens = 0

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._progress.disable:  # rich before 14.3 prints a newline even if it has drawn nothing
            self._progress.stop()

    def planned(self, total: int) -> None:
        self._progress.update(self._task, total=total)

    def sent(self) -> None:
        if self._started is None:
            self._started = time.perf_counter()
        self._in_flight += 1
        self._progress.update(self._task, in_flight=self._in_flight)

    def ended(self, record: RequestRecord) -> None:
        self._in_flight -= 1
        self._failed += not record.ok
        self._tokens += record.output_tokens
        elapsed_s = time.perf_counter() - (self._started or 0.0)
        self._progress.update(
            self._task,
            advance=1,
            in_flight=self._in_flight,
            rate=self._tokens / elapsed_s,
            failed=f"{self._failed} failed" if self._failed else "",
        )


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
    """Return the load in a few words."""
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


CHART_SUFFIXES = (".png", ".svg")

_BLUE, _ORANGE, _RED = (
    "#0072b2",
    "#e69f00",
    "#d55e00",
)  # Okabe and Ito's colours, which colour-blind readers can distinguish


def check_chart_path(path: str) -> None:
    """Raise ConfigError if a chart cannot be drawn to ``path``. Called before the run, which may be long."""
    if Path(path).suffix not in CHART_SUFFIXES:
        raise ConfigError(f"--chart is {path}; it must end in {' or '.join(CHART_SUFFIXES)}.")
    _figure_class()


def write_chart(result: BenchResult, path: str) -> None:
    """Draw to a PNG or SVG file. Raises ConfigError without matplotlib."""
    figure = _figure_class()(figsize=(11, 7), layout="constrained")
    figure.suptitle(f"{result.server.model}, {describe_load(result.settings)}")
    top, bottom = figure.subplots(2, 2)
    bounds = {} if result.goodput is None else result.goodput.slo.bounds
    good = [record for record in result.records if record.ok]
    _draw_cdf(top[0], "TTFT (from arrival)", [record.ttft_from_arrival_s for record in good], bounds.get("ttft"))
    _draw_cdf(top[1], "ITL", [gap for record in good for gap in record.gaps_s], bounds.get("itl"))
    _draw_token_rate(bottom[0], good)
    _draw_in_flight(bottom[1], result.records)
    figure.savefig(path)


def _figure_class() -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure  # optional: the `bench` extra
    except ImportError as exc:
        raise ConfigError("--chart needs matplotlib, which is not installed: pip install 'flyball[bench]'.") from exc


def _draw_cdf(axes: Any, name: str, values_s: list[Any], bound_s: float | None) -> None:
    data = np.sort(np.array([value for value in values_s if value is not None]) * 1000).clip(
        min=0.01
    )  # for the logarithmic axis
    axes.step(data, np.arange(1, len(data) + 1) / max(len(data), 1), where="post", color=_BLUE)
    for quantile in (50, 99) if len(data) else ():
        value = float(np.percentile(data, quantile))
        axes.plot(value, quantile / 100, "o", color=_BLUE)
        axes.annotate(f"p{quantile} {value:.1f} ms ", (value, quantile / 100), ha="right", va="bottom")
    if bound_s is not None:
        axes.axvline(bound_s * 1000, color=_RED, linestyle="--", label="objective")
        axes.legend()
    axes.set(title=name, xscale="log", xlabel="ms", ylabel="share at most", ylim=(0, 1.08))
    axes.grid(alpha=0.3)


def _draw_token_rate(axes: Any, good: list[RequestRecord]) -> None:
    """Draw output tokens per second, in equal bins of a quarter second or more. A chunk counts with its share of the tokens."""
    chunks = [_chunk_times(record) for record in good if record.first_token_s is not None]
    times = np.concatenate(chunks) if chunks else np.zeros(0)
    if len(times):
        weights = np.concatenate(
            [np.full(len(c), r.output_tokens / len(c)) for c, r in zip(chunks, good, strict=False)]
        )
        counts, edges = np.histogram(
            times, bins=min(120, max(1, int(4 * times.max()))), range=(0, times.max()), weights=weights
        )
        axes.stairs(counts / np.diff(edges), edges, fill=True, color=_BLUE, alpha=0.7)
    axes.set(title="Output tokens a second", xlabel="s")
    axes.grid(alpha=0.3)


def _chunk_times(record: RequestRecord) -> Any:
    return (record.first_token_s or 0.0) + np.concatenate(([0.0], np.cumsum(record.gaps_s)))


def _draw_in_flight(axes: Any, records: list[RequestRecord]) -> None:
    events = sorted([(record.sent_s, 1) for record in records] + [(record.end_s, -1) for record in records])
    if events:
        times, steps = zip(*events, strict=True)
        axes.step(times, np.cumsum(steps), where="post", color=_ORANGE)
    failures = [record.end_s for record in records if not record.ok]
    axes.plot(failures, [0] * len(failures), "x", color=_RED, label=f"{len(failures)} failed" if failures else None)
    if failures:
        axes.legend()
    axes.set(title="Requests in flight", xlabel="s")
    axes.grid(alpha=0.3)

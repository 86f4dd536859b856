"""A result as a picture: latency distributions above, the run over time below."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from flyball_runtime.bench.record import RequestRecord
from flyball_runtime.bench.report import describe_load
from flyball_runtime.bench.result import BenchResult
from flyball_runtime.core.errors import ConfigError

CHART_SUFFIXES = (".png", ".svg")

_BLUE, _ORANGE, _RED = "#0072b2", "#e69f00", "#d55e00"  # Okabe and Ito: told apart by everybody


def check_chart_path(path: str) -> None:
    """Raise ConfigError, before a long run and not after, when a chart cannot be drawn to ``path``."""
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
    )  # the axis is a log
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
    """Output chunks in equal bins of a quarter second or more, scaled to the tokens that they held."""
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

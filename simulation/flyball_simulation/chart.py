"""A run as a picture: latencies against the objectives, good requests, and the limits, over time."""

import importlib
from typing import Any

from flyball_runtime.core.errors import ConfigError
from flyball_simulation.result import Result

BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#999999"  # Okabe and Ito


def write_chart(result: Result, path: str) -> None:
    """Draw a run to a PNG or SVG file. Raises ConfigError without matplotlib."""
    figure = new_figure(11, 9)
    figure.suptitle(
        f"{result.controller} on {result.plant}, {result.replicas} replicas of {result.kv_tokens} KV tokens: "
        f"{result.share_good:.1%} of {result.num_requests} requests good"
    )
    axes = figure.subplots(4, 1, sharex=True)
    minutes = [one.start_s / 60 for one in result.timeline]
    bounds = result.objectives
    _draw_latency(axes[0], "TTFT p95", minutes, [one.ttft_p95_s for one in result.timeline], bounds.ttft_s)
    _draw_latency(axes[1], "ITL p95 of a request", minutes, [one.itl_p95_s for one in result.timeline], bounds.itl_s)
    axes[2].step(minutes, [one.num_requests / 60 for one in result.timeline], where="post", color=GREY, label="arrived")
    axes[2].step(minutes, [one.num_good / 60 for one in result.timeline], where="post", color=GREEN, label="good")
    axes[2].set(ylabel="requests a second", ylim=(0, None))
    axes[2].legend()
    _draw_limits(axes[3], result, minutes[-1] + 1 if minutes else 1)
    axes[3].set(xlabel="minutes")
    for one in axes:
        one.grid(alpha=0.3)
    save(figure, path)


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure, in inches. Raises ConfigError without matplotlib."""
    try:
        kind = importlib.import_module("matplotlib.figure").Figure  # optional: the `bench` extra
    except ImportError as exc:
        raise ConfigError("--chart needs matplotlib, which is not installed: pip install 'flyball[bench]'.") from exc
    return kind(figsize=(width, height), layout="constrained")


def save(figure: Any, path: str) -> None:
    """Write a figure; the same figure gives the same SVG."""
    matplotlib = importlib.import_module("matplotlib")
    with matplotlib.rc_context({"svg.hashsalt": "flyball"}):
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def _draw_latency(
    axes: Any, name: str, minutes: list[float], values_s: list[float | None], bound_s: float | None
) -> None:
    known = [(at, value * 1000) for at, value in zip(minutes, values_s, strict=True) if value is not None]
    if known:
        axes.step(*zip(*known, strict=True), where="post", color=BLUE)
    if bound_s is not None:
        axes.axhline(bound_s * 1000, color=RED, linestyle="--", label="objective")
        axes.legend()
    axes.set(ylabel=f"{name}, ms", ylim=(0, None))


def _draw_limits(axes: Any, result: Result, end: float) -> None:
    """Of the first replica that was changed."""
    changes = [one for one in result.changes if one.replica == result.changes[0].replica]
    times = [one.at_s / 60 for one in changes]
    seqs = [one.limits.max_num_seqs for one in changes]
    tokens = [one.limits.max_num_batched_tokens for one in changes]
    if not changes:
        limits = next(iter(result.final_limits.values()))
        times, seqs, tokens = [0.0], [limits.max_num_seqs], [limits.max_num_batched_tokens]
    axes.step([*times, end], [*seqs, seqs[-1]], where="post", color=ORANGE, label="max_num_seqs")
    axes.step([*times, end], [*tokens, tokens[-1]], where="post", color=BLUE, label="max_num_batched_tokens")
    axes.set(yscale="log", ylabel="limits")
    axes.legend()

"""Servers of which one runs at a time, and what a client sees of them: Flyball beside another one."""

import asyncio
import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import median_of

OURS = "flyball"
CONCURRENCIES = (1, 8, 32)
INPUT_LEN, OUTPUT_LEN = 128, 64
OUTPUT_LENS = "uniform:16:112"
"""Of requests that arrive by themselves: what ends at different times does not begin together again."""
ARRIVALS_S = 20
START_S = 300.0
PREFIX_HITS = re.compile(
    r"^(?:flyball_prefix_cache_hit_tokens|vllm:prefix_cache_hits)_total(?:{.*})? (\S+)$", re.MULTILINE
)
MAX_WARNINGS, MAX_WARNING_CHARS = 20, 200

Engines = Mapping[str, Any]
Bench = Callable[["Server", Path, int, int], dict[str, float]]
"""The figures of a load: server, checkpoint, clients or requests a second, seed."""


def in_turns(engines: Engines, runs: int) -> Iterator[tuple[str, Any]]:
    """Yield every engine once a run, the first of one run last in the next."""
    for run in range(runs):
        yield from engines.items() if run % 2 == 0 else reversed(engines.items())


@contextlib.contextmanager
def awake(group: int) -> Iterator[None]:
    """Let a stopped group of processes run."""
    os.killpg(group, signal.SIGCONT)
    yield
    os.killpg(group, signal.SIGSTOP)


@dataclass(frozen=True)
class Server:
    """``group`` is the process group, stopped unless it is measured; ``log`` is what it prints."""

    url: str
    group: int
    log: Path

    def metrics(self) -> str:
        """Return the metrics of a server that is awake."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            return str(response.read().decode())

    def num_prefix_hits(self) -> int:
        """Return how many prompt tokens the server has found in its prefix cache."""
        with awake(self.group):
            found = PREFIX_HITS.findall(self.metrics())
        if not found:
            raise RuntimeError(f"{self.url}/metrics has no count of prefix cache hits")
        return round(sum(map(float, found)))

    def warnings(self) -> list[str]:
        """Return the different warnings that the server has printed, cut to a readable length."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if "WARNING" in line]
        # vLLM has a time and a source line between the level and the text
        messages = (re.split(r"WARNING.*?[\]:] ", line, maxsplit=1)[-1].strip()[:MAX_WARNING_CHARS] for line in lines)
        return list(dict.fromkeys(messages))[:MAX_WARNINGS]


@contextlib.contextmanager
def server(command: list[str], log: Path, variables: Mapping[str, str]) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env=os.environ | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + START_S
        while not answers(url):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"did not become healthy: {' '.join(command)}")
            time.sleep(0.5)
        os.killpg(process.pid, signal.SIGSTOP)
        yield Server(url, process.pid, log)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def warm_up(servers: Mapping[str, Server], checkpoint: Path, seeds: Iterator[int]) -> None:
    """Send one load of each size that is measured: the first run of a shape is slower."""
    for concurrency in CONCURRENCIES:
        seed = next(seeds)
        for one in servers.values():
            bench_closed(one, checkpoint, concurrency, seed)


def bench_closed(server: Server, checkpoint: Path, concurrency: int, seed: int) -> dict[str, float]:
    with awake(server.group):
        return asyncio.run(load(server, checkpoint, concurrency, seed, num_requests=max(12, 4 * concurrency)))


def bench_arrivals(server: Server, checkpoint: Path, requests_per_s: int, seed: int) -> dict[str, float]:
    """Send requests that do not wait for each other, with outputs of different lengths, and return what clients wait for."""
    arrivals = {"num_requests": requests_per_s * ARRIVALS_S, "request_rate": requests_per_s}
    with awake(server.group):
        figures = asyncio.run(
            send(server, checkpoint, seed, input_len=str(INPUT_LEN), output_len=OUTPUT_LENS, **arrivals)
        )
    del figures["output_tokens_per_s"]  # as many as arrive
    return figures


async def load(
    server: Server,
    checkpoint: Path,
    concurrency: int,
    seed: int,
    *,
    num_requests: int,
    input_len: int = INPUT_LEN,
    output_len: int = OUTPUT_LEN,
    keep_alive: bool = False,
) -> dict[str, float]:
    """Send requests in a closed loop to a server that is awake, and return what its clients see.

    Args:
        keep_alive: not for llama.cpp's server, which closes its connections without saying so.
    Raises:
        RuntimeError: a request failed or ended early.
    """
    return await send(
        server,
        checkpoint,
        seed,
        num_requests=num_requests,
        concurrency=concurrency,
        input_len=str(input_len),
        output_len=str(output_len),
        keep_alive=keep_alive,
    )


async def send(server: Server, checkpoint: Path, seed: int, **load: Any) -> dict[str, float]:
    """Send a load to a server that is awake, and return what its clients see.

    Args:
        load: further settings of ``flyball bench``.
    Raises:
        RuntimeError: a request failed or ended early.
    """
    from flyball_clients.bench.benchmark import run_benchmark
    from flyball_clients.bench.settings import BenchSettings
    from flyball_clients.bench.workload import plan_requests

    settings = BenchSettings(base_url=server.url, tokenizer=str(checkpoint), ignore_eos=True, seed=seed, **load)
    result = await run_benchmark(settings)
    if result.requests.failed:
        raise RuntimeError(f"{server.url}: {result.requests.errors}")
    asked, given = sum(plan.output_len for plan in plan_requests(settings)), result.throughput.output_tokens
    if given != asked:
        raise RuntimeError(f"{server.url}: {given} of {asked} tokens, so some streams ended early")
    return {
        "output_tokens_per_s": result.throughput.output_tokens_per_s,
        "ttft_p50_ms": 1000 * result.latency.ttft_s.p50,
        "ttft_p95_ms": 1000 * result.latency.ttft_s.p95,
        "itl_p50_ms": 1000 * result.latency.itl_s.p50,
        "itl_p95_ms": 1000 * result.latency.itl_s.p95,
        "itl_p99_ms": 1000 * result.latency.itl_s.p99,
    }


def bench_in_turns(
    servers: Mapping[str, Server],
    checkpoint: Path,
    seeds: Iterator[int],
    size: int,
    runs: int,
    bench: Bench = bench_closed,
) -> dict[str, list[dict[str, float]]]:
    """Return the figures of each server in ``runs`` loads, each with a seed of its own and sent to all of them.

    Args:
        size: of a load, for ``bench``: how many clients, or requests a second.
        bench: gives the figures of one load.
    """
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    seed_of_run = [next(seeds) for _ in range(runs)]
    for name, one in in_turns(servers, runs):
        seen[name].append(bench(one, checkpoint, size, seed_of_run[len(seen[name])]))
    return seen


def measure_all(
    name: str,
    servers: Mapping[str, Server],
    checkpoint: Path,
    runs: int,
    sizes: Sequence[int] = CONCURRENCIES,
    bench: Bench = bench_closed,
) -> dict[str, Any]:
    """Print and return each figure's summary by the size of a load, after a warm-up; each run has prompts of its own.

    Args:
        name: what a size is, in front of it.
        sizes: see ``bench_in_turns``.
    """
    seeds = itertools.count(1)
    warm_up(servers, checkpoint, seeds)
    by_size: dict[str, Any] = {}
    for size in sizes:
        runs_of = bench_in_turns(servers, checkpoint, seeds, size, runs, bench)
        by_size[str(size)] = {
            figure: summary(
                {side: [run[figure] for run in all_runs] for side, all_runs in runs_of.items()},
                higher_is_better=figure == "output_tokens_per_s",
            )
            for figure in runs_of[OURS][0]
        }
        for figure, values in by_size[str(size)].items():
            print(f"{name} {size} {figure}: {show(values)}", flush=True)
    return by_size


def medians(runs: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    return {figure: median_of(run[figure] for run in runs) for figure in runs[0]}


def summary(values: dict[str, list[float]], *, higher_is_better: bool) -> dict[str, Any]:
    """Return the median of each side, and how much better ours is."""
    figures: dict[str, Any] = {name: median_of(of_engine) for name, of_engine in values.items()}
    (other,) = figures.keys() - {OURS}
    ratio = figures[OURS]["median"] / figures[other]["median"]
    return figures | {f"{OURS}_over_{other}": ratio if higher_is_better else 1 / ratio}


def show(result: dict[str, Any]) -> str:
    *sides, ratio = result
    medians = ", ".join(f"{name} {result[name]['median']:.1f}" for name in sides)
    return f"{medians}; {result[ratio]:.2f}x (above 1: {OURS} is better)"

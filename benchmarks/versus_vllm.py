"""Flyball against vLLM on one machine, both loaded and measured in turns, so that noise hits both.

    python benchmarks/versus_vllm.py --vllm /path/to/vllm-venv/bin/python [--runs 5] [--vllm-env NAME=VALUE ...]

Offline: output tokens per second on three loads. Online: `flyball bench` in a closed loop at concurrency 1, 8 and 32
against both servers. Each run has a seed of its own, the same for both sides, so that no prompt is sent twice; the tokens
that each server found in its prefix cache are in the result, and the run fails if there are any. The side that goes first
changes from run to run. The side that is not measured is stopped (SIGSTOP), so that an idle engine that polls takes nothing
from the other.

Beside it, a profile of this engine's time while it decodes and while it computes prompts. Writes results/versus_vllm.json,
with vLLM's versions, settings and warnings. For a CPU build of vLLM set VLLM_CPU_KVCACHE_SPACE (GiB), and give it the libraries
that it recommends: --vllm-env LD_PRELOAD=/path/libtcmalloc_minimal.so.4:/path/libiomp5.so. Figures of different runs do not
compare: machines and neighbours differ.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import make_checkpoint, save
from machine import median_of

LOADS = ("96x128x64", "64x32x128", "16x1024x16")
CONCURRENCIES = (1, 8, 32)
OFFLINE = Path(__file__).with_name("offline.py")
START_S = 300.0
VLLM_PACKAGES = ("vllm", "torch", "transformers", "triton")
PREFIX_HITS = re.compile(
    r"^(?:flyball_prefix_cache_hit_tokens|vllm:prefix_cache_hits)_total(?:{.*})? (\S+)$", re.MULTILINE
)
MAX_WARNINGS, MAX_WARNING_CHARS = 20, 200

Engines = Mapping[str, Any]


@dataclass(frozen=True)
class Vllm:
    """``python`` of its environment; ``variables`` that its processes get beside this process's."""

    python: str
    variables: Mapping[str, str]


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


class OfflineEngine:
    """`offline.py --serve` in a process; ``script`` is another checkout's."""

    def __init__(
        self, python: str, engine: str, checkpoint: Path, variables: Mapping[str, str], script: Path = OFFLINE
    ) -> None:
        command = [python, str(script), engine, "--serve"]
        self._process = subprocess.Popen(
            [*command, "--checkpoint", str(checkpoint)],
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._read("READY")
        os.killpg(self._process.pid, signal.SIGSTOP)

    def measure(self, load: str) -> float:
        assert self._process.stdin is not None
        with awake(self._process.pid):
            self._process.stdin.write(load + "\n")
            self._process.stdin.flush()
            return float(json.loads(self._read("RESULT"))["tokens_per_s"])

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self, prefix: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(prefix):
                return line.removeprefix(prefix)
        raise RuntimeError(f"the engine ended: {self._process.args}")


def offline(vllm: Vllm, checkpoint: Path, runs: int) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(contextlib.closing(OfflineEngine(python, name, checkpoint, variables)))
            for name, python, variables in (("vllm", vllm.python, vllm.variables), ("flyball", sys.executable, {}))
        }
        result = {}
        for load, speeds in offline_speeds(engines, runs):
            result[load] = summary(speeds, higher_is_better=True)
            print(f"offline {load} output tok/s: {show(result[load])}", flush=True)
    return result


def offline_speeds(engines: Mapping[str, OfflineEngine], runs: int) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Yield each load with the output tokens a second of each run of each engine, run in turns."""
    for engine in engines.values():  # the first run of a shape is slower
        for load in LOADS:
            engine.measure(load)
    for load in LOADS:
        speeds: dict[str, list[float]] = {name: [] for name in engines}
        for name, engine in in_turns(engines, runs):
            speeds[name].append(engine.measure(load))
        yield load, speeds


@dataclass(frozen=True)
class Server:
    """``group`` is the process group, stopped unless it is measured; ``log`` is what it prints."""

    url: str
    group: int
    log: Path

    def num_prefix_hits(self) -> int:
        """Return how many prompt tokens the server has found in its prefix cache."""
        with awake(self.group), urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            found = PREFIX_HITS.findall(response.read().decode())
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


def online(vllm: Vllm, checkpoint: Path, runs: int) -> dict[str, Any]:
    flags = [str(checkpoint), "--dtype", "bfloat16", "--max-model-len", "4096", "--served-model-name", "m"]
    theirs = [str(Path(vllm.python).with_name("vllm")), "serve", *flags]
    ours = [sys.executable, "-m", "flyball_runtime.cli", "serve", *flags]
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {
            "vllm": stack.enter_context(server(theirs, logs / "vllm", vllm.variables)),
            "flyball": stack.enter_context(server(ours, logs / "flyball", {})),
        }
        seeds = itertools.count(1)
        warm_up(servers, checkpoint, seeds)
        result: dict[str, Any] = {"flags": flags[1:], "by_concurrency": {}}
        for concurrency in CONCURRENCIES:
            figures = result["by_concurrency"][str(concurrency)] = measure(
                servers, checkpoint, seeds, concurrency, runs
            )
            for figure, values in figures.items():
                print(f"online concurrency {concurrency} {figure}: {show(values)}", flush=True)
        result["prefix_cache_hit_tokens"] = {name: one.num_prefix_hits() for name, one in servers.items()}
        result["warnings"] = {name: one.warnings() for name, one in servers.items()}
    if any(result["prefix_cache_hit_tokens"].values()):
        raise RuntimeError(f"some prompts were in a prefix cache: {result['prefix_cache_hit_tokens']}")
    return result


def warm_up(servers: Mapping[str, Server], checkpoint: Path, seeds: Iterator[int]) -> None:
    """Send one load of each size that is measured: the first run of a shape is slower."""
    for concurrency in CONCURRENCIES:
        seed = next(seeds)
        for one in servers.values():
            bench(one, checkpoint, concurrency, seed)


def measure(
    servers: Mapping[str, Server], checkpoint: Path, seeds: Iterator[int], concurrency: int, runs: int
) -> dict[str, Any]:
    """Return each figure's summary over ``runs`` loads, each sent to both servers."""
    runs_of: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    seed_of_run = [next(seeds) for _ in range(runs)]
    for name, one in in_turns(servers, runs):
        runs_of[name].append(bench(one, checkpoint, concurrency, seed_of_run[len(runs_of[name])]))
    return {
        figure: summary(
            {name: [run[figure] for run in all_runs] for name, all_runs in runs_of.items()},
            higher_is_better=figure == "output_tokens_per_s",
        )
        for figure in runs_of["vllm"][0]
    }


def bench(server: Server, checkpoint: Path, concurrency: int, seed: int) -> dict[str, float]:
    from flyball_clients.bench.benchmark import run_benchmark
    from flyball_clients.bench.settings import BenchSettings

    settings = BenchSettings(
        base_url=server.url,
        tokenizer=str(checkpoint),
        num_requests=max(12, 4 * concurrency),
        concurrency=concurrency,
        input_len="128",
        output_len="64",
        ignore_eos=True,
        seed=seed,
    )
    with awake(server.group):
        result = asyncio.run(run_benchmark(settings))
    if result.requests.failed:
        raise RuntimeError(f"{server.url}: {result.requests.errors}")
    return {
        "output_tokens_per_s": result.throughput.output_tokens_per_s,
        "ttft_p50_ms": 1000 * result.latency.ttft_s.p50,
        "itl_p50_ms": 1000 * result.latency.itl_s.p50,
    }


PROFILES = {"64_decodes": (64, 32, 32), "prefill_16_x_128": (16, 128, 1), "prefill_16_x_1024": (16, 1024, 1)}
"""Name to sequences, input and output tokens."""


def profile(checkpoint: Path) -> dict[str, dict[str, float]]:
    """Return the share of self CPU time by op, for each load of PROFILES, and its tokens per second."""
    import random

    import torch
    from torch.profiler import ProfilerActivity

    from flyball_runtime.core.sampling_params import SamplingParams
    from flyball_runtime.llm import LLM

    llm = LLM(checkpoint, dtype="bfloat16", max_model_len=4096, enable_prefix_caching=False)
    rng = random.Random(0)
    result = {}
    for name, (num, num_input, num_output) in PROFILES.items():
        prompts = [[rng.randrange(10, 8000) for _ in range(num_input)] for _ in range(num)]
        sampling = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
        llm.generate(prompts, sampling)
        start_s = time.perf_counter()
        llm.generate(prompts, sampling)
        wall_s = time.perf_counter() - start_s
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as recorded:
            start_s = time.perf_counter()
            llm.generate(prompts, sampling)
            profiled_us = (time.perf_counter() - start_s) * 1e6
        ops = {event.key: event.self_cpu_time_total / profiled_us for event in recorded.key_averages()}
        largest = dict(sorted(ops.items(), key=lambda item: -item[1])[:8])
        outside = {"outside any op (scheduling, inputs, Python)": 1 - sum(ops.values())}
        result[name] = largest | outside | {"tokens_per_s": num * (num_input + num_output) / wall_s}
    return result


def vllm_environment(vllm: Vllm) -> dict[str, Any]:
    """Return the versions in vLLM's environment, and the variables that configure it."""
    script = (
        "import importlib.metadata as m, json, sys\n"
        "found = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        "print(json.dumps({name: found.get(name, 'none') for name in sys.argv[1:]}))"
    )
    done = subprocess.run([vllm.python, "-c", script, *VLLM_PACKAGES], check=True, capture_output=True, text=True)
    variables = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")} | vllm.variables
    if "LD_PRELOAD" in variables:  # where the libraries lie says nothing
        variables["LD_PRELOAD"] = ":".join(Path(library).name for library in variables["LD_PRELOAD"].split(":"))
    return json.loads(done.stdout) | {"variables": variables}


def summary(values: dict[str, list[float]], *, higher_is_better: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {name: median_of(of_engine) for name, of_engine in values.items()}
    ratio = figures["flyball"]["median"] / figures["vllm"]["median"]
    return figures | {"flyball_over_vllm": ratio if higher_is_better else 1 / ratio}


def show(result: dict[str, Any]) -> str:
    ours, theirs = result["flyball"]["median"], result["vllm"]["median"]
    return f"flyball {ours:.1f}, vllm {theirs:.1f}; {result['flyball_over_vllm']:.2f}x (above 1: flyball is better)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="Python of an environment with vLLM")
    parser.add_argument(
        "--vllm-env", metavar="NAME=VALUE", action="append", default=[], help="for vLLM's processes alone"
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shape", default="small")
    parser.add_argument("--part", choices=("offline", "online", "profile"), action="append", help="default: all three")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    # Left alone, vLLM's CPU build may keep a core back for its front end; both engines get all of them.
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    checkpoint = make_checkpoint(Path("out/checkpoints").absolute(), args.shape)
    parts = args.part or ["offline", "online", "profile"]
    vllm = Vllm(args.vllm, dict(variable.split("=", 1) for variable in args.vllm_env))
    result: dict[str, Any] = {"shape": args.shape, "vllm": vllm_environment(vllm)}
    if "offline" in parts:
        result["offline_output_tokens_per_s"] = offline(vllm, checkpoint, args.runs)
    if "online" in parts:
        result["online_128_in_64_out"] = online(vllm, checkpoint, args.runs)
    if "profile" in parts:
        result["share_of_time"] = profile(checkpoint)
    save("versus_vllm", result)


if __name__ == "__main__":
    main()

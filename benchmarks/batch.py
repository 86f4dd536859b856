"""Throughput of `flyball batch` beside the server's: the same kind of requests at a server and with an engine of its own.

    python benchmarks/batch.py [--shape small] [--num-requests 512] [--runs 3]

In turns: `flyball bench` at a server, with as many streams as `flyball batch` has requests in flight; `flyball batch` at that
server; `flyball batch --model` in the order of arrival (fcfs) and in the one for batches (dpr). Each turn has requests of its
own. They come in groups with a common prefix, shuffled, with outputs of 16 to 128 tokens. Loading the model does not count.
Writes results/batch.json.
"""

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import SHAPES, make_checkpoint, save
from flyball_clients.batch.command import run_command
from flyball_clients.batch.settings import BatchSettings
from flyball_clients.bench.benchmark import run_benchmark
from flyball_clients.bench.settings import BenchSettings
from flyball_protocol.endpoints import READYZ_PATH
from machine import median_of

START_S = 180.0
NUM_PREFIXES, PREFIX_CHARS, TAIL_CHARS = 16, 512, 64

Requests = list[dict[str, Any]]
Contender = Callable[[Requests, Path], float]
"""Answers requests, with a folder for files; returns output tokens per second."""


def draw(num: int, seed: int) -> Requests:
    """Return bodies of completions. The tokenizer of these checkpoints has a token for each character."""
    rng = random.Random(seed)

    def text(length: int) -> str:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=length))

    prefixes = [text(PREFIX_CHARS) for _ in range(NUM_PREFIXES)]
    prompts = [rng.choice(prefixes) + text(TAIL_CHARS) for _ in range(num)]
    return [{"prompt": prompt, "max_tokens": rng.randint(16, 128), "ignore_eos": True} for prompt in prompts]


def write_lines(path: Path, lines: Requests) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def bench(url: str, concurrency: int) -> Contender:
    def run(requests: Requests, folder: Path) -> float:
        rows = [{"prompt": body["prompt"], "max_tokens": body["max_tokens"]} for body in requests]
        dataset = str(write_lines(folder / "dataset.jsonl", rows))
        settings = BenchSettings(base_url=url, dataset=dataset, concurrency=concurrency, ignore_eos=True)
        return asyncio.run(run_benchmark(settings)).throughput.output_tokens_per_s

    return run


def batch(**settings: Any) -> Contender:
    def run(requests: Requests, folder: Path) -> float:
        lines = [
            {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            for number, body in enumerate(requests)
        ]
        source = write_lines(folder / "in.jsonl", lines)
        counts = run_command(BatchSettings(source=source, target=folder / "out.jsonl", **settings))
        if counts.num_failed or counts.num_left:
            raise SystemExit(counts.summary())
        return counts.completion_tokens / counts.elapsed_s

    return run


@contextlib.contextmanager
def server(model: Path, port: int, *flags: str) -> Iterator[str]:
    """Run `flyball serve`; yields its address when it is ready."""
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "flyball_runtime.cli", "serve", str(model), "--host=127.0.0.1", f"--port={port}"]
    process = subprocess.Popen([*command, "--log-level=warning", *flags])
    try:
        deadline_s = time.monotonic() + START_S
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit("the server did not become ready")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + READYZ_PATH, timeout=10) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def measure(contenders: dict[str, Contender], num_requests: int, runs: int) -> dict[str, list[float]]:
    """Run all in turns, another one first in each round; the first round is a warm-up."""
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for index in range(runs + 1):
        for turn, name in enumerate(names[index % len(names) :] + names[: index % len(names)]):
            with tempfile.TemporaryDirectory() as folder:
                speed = contenders[name](draw(num_requests, seed=100 * index + turn), Path(folder))
            print(f"round {index}, {name}: {speed:.0f} output tokens/s", flush=True)
            if index:
                speeds[name].append(speed)
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small", choices=SHAPES)
    parser.add_argument("--num-requests", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=256, help="requests in flight at the server")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--port", type=int, default=18000)
    parser.add_argument("--checkpoints", type=Path, default=Path("out/checkpoints"))
    parser.add_argument("--no-save", action="store_true", help="print the figures only")
    args = parser.parse_args()
    model = make_checkpoint(args.checkpoints, args.shape)
    flags = ("--max-model-len=1024", f"--max-num-seqs={args.max_num_seqs}", "--kv-cache-memory-bytes=1GiB")
    quiet = (*flags, "--log-level=warning")
    with server(model, args.port, *flags) as url:
        contenders = {
            "bench at a server": bench(url, args.concurrency),
            "batch at a server": batch(base_url=url, concurrency=args.concurrency),
            "batch, own engine, fcfs": batch(model=str(model), engine_flags=(*quiet, "--scheduling-policy=fcfs")),
            "batch, own engine, dpr": batch(model=str(model), engine_flags=quiet),
        }
        speeds = measure(contenders, args.num_requests, args.runs)
    figures = {name: median_of(values) for name, values in speeds.items()}
    for name, figure in figures.items():
        print(f"{name}: {figure['median']:.0f} output tokens/s, median of {figure['runs']}")
    if not args.no_save:
        save("batch", {"shape": args.shape, "num_requests": args.num_requests, "output_tokens_per_s": figures})


if __name__ == "__main__":
    main()

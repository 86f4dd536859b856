"""Flyball against vLLM on one machine, both loaded and measured in turns, so that noise hits both.

    python benchmarks/versus_vllm.py --vllm /path/to/vllm-venv/bin/python [--runs 5] [--vllm-env NAME=VALUE ...]

Offline: output tokens per second on three loads. Online: `flyball bench` in a closed loop at concurrency 1, 8 and 32
against both servers. Arrivals: `flyball bench` in an open loop, with Poisson arrivals of --rate requests a second for 20 s and
outputs of 16 to 112 tokens: clients in a closed loop whose outputs have one length may go on in step. Each run has a seed, the
same for both sides, so that no prompt is sent twice; the tokens that each server found in its prefix cache are in the
result, and the run fails if there are any. The side that goes first changes from run to run. The side that is not measured is
stopped (SIGSTOP), so that an idle engine that polls takes nothing from the other.

Beside it, a profile of this engine's time while it decodes and while it computes prompts, and what the machine reached between
these parts: the bytes a second that torch copies, and the operations of its matrix product. Writes results/versus_vllm.json,
with vLLM's versions, settings and warnings. For a CPU build of vLLM set VLLM_CPU_KVCACHE_SPACE (GiB), and give it the libraries
that it recommends: --vllm-env LD_PRELOAD=/path/libtcmalloc_minimal.so.4:/path/libiomp5.so. Figures of different runs do not
compare: machines and neighbours differ.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from common import make_checkpoint, save
from machine import bounds_of
from servers import Server, awake, bench_arrivals, in_turns, measure_all, server, show, summary

LOADS = ("96x128x64", "64x32x128", "16x1024x16")
OFFLINE = Path(__file__).with_name("offline.py")
DTYPE = "bfloat16"
PARTS = ("offline", "online", "arrivals", "profile")
VLLM_PACKAGES = ("vllm", "torch", "transformers", "triton")


@dataclass(frozen=True)
class Vllm:
    """``python`` of its environment; ``variables`` that its processes get beside this process's; ``dtype`` of its weights."""

    python: str
    variables: Mapping[str, str]
    dtype: str


class OfflineEngine:
    """`offline.py --serve` in a process; ``script`` is another checkout's."""

    def __init__(
        self,
        python: str,
        engine: str,
        checkpoint: Path,
        variables: Mapping[str, str],
        script: Path = OFFLINE,
        flags: Sequence[str] = (),
    ) -> None:
        command = [python, str(script), engine, "--serve", *flags]
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
            name: stack.enter_context(
                contextlib.closing(OfflineEngine(python, name, checkpoint, variables, flags=["--dtype", dtype]))
            )
            for name, python, variables, dtype in (
                ("vllm", vllm.python, vllm.variables, vllm.dtype),
                ("flyball", sys.executable, {}, DTYPE),
            )
        }
        result = {}
        for load, speeds in offline_speeds(engines, runs):
            result[load] = summary(speeds, higher_is_better=True)
            print(f"offline {load} output tok/s: {show(result[load])}", flush=True)
    return result


def offline_speeds(
    engines: Mapping[str, OfflineEngine], runs: int, loads: Sequence[str] = LOADS
) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Yield each load with the output tokens a second of each run of each engine, run in turns."""
    for engine in engines.values():  # the first run of a shape is slower
        for load in loads:
            engine.measure(load)
    for load in loads:
        speeds: dict[str, list[float]] = {name: [] for name in engines}
        for name, engine in in_turns(engines, runs):
            speeds[name].append(engine.measure(load))
        yield load, speeds


def online(vllm: Vllm, checkpoint: Path, runs: int) -> dict[str, Any]:
    """Return what clients in a closed loop see."""

    def measured(servers: Mapping[str, Server]) -> dict[str, Any]:
        return {"by_concurrency": measure_all("online, concurrency", servers, checkpoint, runs)}

    return beside_each_other(vllm, checkpoint, measured)


def arrivals(vllm: Vllm, checkpoint: Path, runs: int, rates: Sequence[int]) -> dict[str, Any]:
    """Return what clients see that do not wait for each other, by requests a second."""

    def measured(servers: Mapping[str, Server]) -> dict[str, Any]:
        return {"by_rate": measure_all("requests a second:", servers, checkpoint, runs, rates, bench_arrivals)}

    return beside_each_other(vllm, checkpoint, measured)


def beside_each_other(
    vllm: Vllm, checkpoint: Path, measure_servers: Callable[[Mapping[str, Server]], dict[str, Any]]
) -> dict[str, Any]:
    """Return what is measured of both servers, with their flags, warnings and tokens that were in a prefix cache: none.

    Raises:
        RuntimeError: some prompts were in a prefix cache.
    """
    flags = [str(checkpoint), "--max-model-len", "4096", "--served-model-name", "m"]
    theirs = [str(Path(vllm.python).with_name("vllm")), "serve", *flags, "--dtype", vllm.dtype]
    ours = [sys.executable, "-m", "flyball_runtime.cli", "serve", *flags, "--dtype", DTYPE]
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {
            "vllm": stack.enter_context(server(theirs, logs / "vllm", vllm.variables)),
            "flyball": stack.enter_context(server(ours, logs / "flyball", {})),
        }
        result = {"flags": flags[1:]} | measure_servers(servers)
        result["prefix_cache_hit_tokens"] = {name: one.num_prefix_hits() for name, one in servers.items()}
        result["warnings"] = {name: one.warnings() for name, one in servers.items()}
    if any(result["prefix_cache_hit_tokens"].values()):
        raise RuntimeError(f"some prompts were in a prefix cache: {result['prefix_cache_hit_tokens']}")
    return result


PROFILES = {
    "64_decodes": (64, 32, 32),
    "256_decodes": (256, 4, 16),
    "prefill_16_x_128": (16, 128, 1),
    "prefill_16_x_1024": (16, 1024, 1),
}
"""Name to sequences, input and output tokens."""
NUM_PROFILES = 5
"""Of each, the quickest is kept: whatever else ran meanwhile would count as time outside any op."""


def profile(
    checkpoint: Path, loads: Sequence[str] = tuple(PROFILES), times: int = NUM_PROFILES
) -> dict[str, dict[str, float]]:
    """Return the share of self CPU time by op, for each of these loads of PROFILES, and its tokens per second.

    The ops of a decoder layer run one by one here, so that each has its share.
    """
    import random
    from unittest import mock

    import torch
    from torch.profiler import ProfilerActivity

    from flyball_runtime.llm import LLM, SamplingParams
    from flyball_runtime.model.transformer import DecoderLayer

    with mock.patch.object(DecoderLayer, "_as_op", create=True, return_value=None):  # older checkouts have none
        llm = LLM(checkpoint, dtype=DTYPE, max_model_len=4096, enable_prefix_caching=False)
    rng = random.Random(0)
    result = {}
    for name in loads:
        num, num_input, num_output = PROFILES[name]
        prompts = [[rng.randrange(10, 8000) for _ in range(num_input)] for _ in range(num)]
        sampling = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
        llm.generate(prompts, sampling)
        start_s = time.perf_counter()
        llm.generate(prompts, sampling)
        wall_s = time.perf_counter() - start_s
        taken = []
        for _ in range(times):
            with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as recorded:
                start_s = time.perf_counter()
                llm.generate(prompts, sampling)
                profiled_us = (time.perf_counter() - start_s) * 1e6
            taken.append((profiled_us, recorded.key_averages()))
        profiled_us, events = min(taken, key=itemgetter(0))
        ops = {event.key: event.self_cpu_time_total / profiled_us for event in events}
        largest = dict(sorted(ops.items(), key=lambda item: -item[1])[:8])
        outside = {"outside any op (scheduling, inputs, Python)": 1 - sum(ops.values())}
        result[name] = largest | outside | {"tokens_per_s": num * (num_input + num_output) / wall_s}
    return result


def num_weights(checkpoint: Path) -> dict[str, int]:
    """Return how many weights each token meets, and how many each token that is sampled from meets beside them."""
    from flyball_runtime.core.model_config import ModelConfig
    from flyball_runtime.model.loader import iter_headers, weight_files

    sizes = {header.name: math.prod(header.shape) for header in iter_headers(weight_files(checkpoint))}
    embedding = sizes.pop("model.embed_tokens.weight")
    head = sizes.pop("lm_head.weight", embedding)  # which may be tied to it
    of_layers = sum(sizes.values())
    if (moe := ModelConfig.from_dir(checkpoint).moe) is not None:
        of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
        of_layers -= of_experts * (moe.num_experts - moe.experts_per_token) // moe.num_experts
    return {"of_layers": of_layers, "of_head": head}


def versions_of(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of these packages in the environment of that Python."""
    script = (
        "import importlib.metadata as m, json, sys\n"
        "found = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        "print(json.dumps({name: found.get(name, 'none') for name in sys.argv[1:]}))"
    )
    done = subprocess.run([python, "-c", script, *packages], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def vllm_environment(vllm: Vllm) -> dict[str, Any]:
    """Return the versions in vLLM's environment, and the variables that configure it."""
    variables = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")} | vllm.variables
    if "LD_PRELOAD" in variables:  # where the libraries lie says nothing
        variables["LD_PRELOAD"] = ":".join(Path(library).name for library in variables["LD_PRELOAD"].split(":"))
    return versions_of(vllm.python, VLLM_PACKAGES) | {"variables": variables}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="Python of an environment with vLLM")
    parser.add_argument(
        "--vllm-env", metavar="NAME=VALUE", action="append", default=[], help="for vLLM's processes alone"
    )
    parser.add_argument(
        "--vllm-dtype",
        default=DTYPE,
        help="float32 for a CPU with AVX2 alone, where products in bf16 take a hundred times as long in torch",
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shape", default="small")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--rate", type=int, action="append", help="of arrivals, requests a second; default: 2 and 4")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    # Left alone, vLLM's CPU build may keep a core back for its front end; both engines get all of them.
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    checkpoint = make_checkpoint(Path("out/checkpoints").absolute(), args.shape)
    vllm = Vllm(args.vllm, dict(variable.split("=", 1) for variable in args.vllm_env), args.vllm_dtype)
    result: dict[str, Any] = {"shape": args.shape, "vllm": vllm_environment(vllm), "vllm_dtype": vllm.dtype}
    measures: dict[str, tuple[str, Callable[[], object]]] = {
        "offline": ("offline_output_tokens_per_s", lambda: offline(vllm, checkpoint, args.runs)),
        "online": ("online_128_in_64_out", lambda: online(vllm, checkpoint, args.runs)),
        "arrivals": ("arrivals_128_in", lambda: arrivals(vllm, checkpoint, args.runs, args.rate or (2, 4))),
        "profile": ("share_of_time", lambda: profile(checkpoint)),
    }
    from flyball_runtime.bounds import Bounds  # here, because older checkouts have no such module

    bounds = Bounds()
    reached = [bounds.measure()]
    for name in args.part or PARTS:
        figures, measure = measures[name]
        result[figures] = measure()
        reached.append(bounds.measure())
    result["bounds"] = bounds_of(reached)
    result["num_weights"] = num_weights(checkpoint)
    save("versus_vllm", result)


if __name__ == "__main__":
    main()

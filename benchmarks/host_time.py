"""What a step takes beside the model, part by part, while 1, 64 or 256 sequences decode in an engine that is a library.

    python benchmarks/host_time.py [--before CHECKOUT] [--runs 5]

With another checkout, which has been set up, both are measured in turns, and the first of one run is the last of the next. The
functions of each part are timed, less what other parts take within them. To time one takes a microsecond or two, which the part
around it has. "Messages" is what the engine's process would send for a step, encoded and decoded; behind a server the API
process does the half of it, and what makes text of tokens. Steps with prompts are left out. Writes results/host_time.json.
"""

import argparse
import collections
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import make_checkpoint, save
from machine import commit_of, median_of
from versus_vllm import DTYPE

LOADS = {
    "1 sequence": (1, 512, 0.0),
    "64 sequences": (64, 64, 0.0),
    "64 sequences, temperature": (64, 64, 0.8),
    "256 sequences": (256, 32, 0.0),
}
"""Sequences, tokens that each generates, and their temperature; with one, they have top_k and top_p too."""

MODEL, REST, MESSAGES = "model", "rest", "messages"
PARTS = {
    "scheduling": ("Scheduler.plan", "Scheduler.commit"),
    "inputs": ("Rows.apply", "Rows.inputs", "Rows.remember", "runner.entries_of"),
    MODEL: ("CausalLM.forward",),
    "sampling": (
        "SamplingTensors.likeliest",
        "SamplingTensors.sample",
        "SamplingTensors.sample_and_score",
        "SamplingTensors.raw_logprobs",
    ),
    "step-time model": ("Governor.observe", "Governor.predict"),
    "figures for metrics": ("Engine._stats",),
    "text": ("OutputText.add",),
    REST: ("LLM._step",),
}
"""The functions of each part; checkouts have different ones."""


class Parts:
    """Seconds of each part in each step that decodes only."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = collections.defaultdict(float)
        self._within = [0.0]  # of each function that runs, what those of other parts took

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **settings: Any) -> Any:
            self._within.append(0.0)
            start_s = time.perf_counter()
            result = function(*args, **settings)
            took_s = time.perf_counter() - start_s
            self._now[part] += took_s - self._within.pop()
            self._within[-1] += took_s
            return result

        return run

    def end_step(self, decodes_only: bool) -> None:
        if decodes_only:
            self.steps.append(dict(self._now))
        self._now.clear()


def watch(parts: Parts) -> None:
    """Have the functions of all parts timed."""
    from flyball_runtime import llm
    from flyball_runtime.engine import engine, process, rows, runner
    from flyball_runtime.governor import Governor
    from flyball_runtime.model import sampler, transformer
    from flyball_runtime.scheduler import Scheduler
    from flyball_runtime.text.output import OutputText

    owners: dict[str, Any] = {
        "Scheduler": Scheduler,
        "Rows": rows.Rows,
        "runner": runner,
        "CausalLM": transformer.CausalLM,
        "SamplingTensors": sampler.SamplingTensors,
        "Governor": Governor,
        "Engine": engine.Engine,
        "OutputText": OutputText,
        "LLM": llm.LLM,
    }
    for part, names in PARTS.items():
        for owner, name in (one.split(".") for one in names):
            if hasattr(owners[owner], name):
                setattr(owners[owner], name, parts.timed(part, getattr(owners[owner], name)))

    outputs: list[Any] = []
    step, step_of_all = engine.Engine.step, llm.LLM._step
    message = parts.timed(MESSAGES, lambda output: process.decode_from_engine(process.encode_message(output)))

    def noted(self: Any) -> Any:
        outputs.append(step(self))
        return outputs[-1]

    def whole(self: Any, requests: Any) -> None:
        step_of_all(self, requests)
        output = outputs.pop()
        message(output)
        parts.end_step(output.stats.num_prefill_tokens == 0)

    engine.Engine.step = noted  # type: ignore[method-assign]
    llm.LLM._step = whole  # type: ignore[method-assign]


def measure(checkpoint: str) -> dict[str, dict[str, float]]:
    """Return the microseconds of each part in a step, for each load: means of one run."""
    from flyball_runtime.core.config import EngineConfig
    from flyball_runtime.llm import LLM, SamplingParams

    parts, found, rng = Parts(), {}, random.Random(time.time_ns())
    watch(parts)
    settings: dict[str, Any] = {"dtype": DTYPE, "max_model_len": 4096, "enable_prefix_caching": False}
    if "num_scheduler_steps" in EngineConfig.__dataclass_fields__:  # older checkouts have only single steps
        settings["num_scheduler_steps"] = 1
    engine = LLM(checkpoint, **settings)
    for load, (num, num_tokens, temperature) in LOADS.items():
        filters: dict[str, Any] = {"top_k": 50, "top_p": 0.95} if temperature else {}
        sampling = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, **filters)
        engine.generate([[rng.randrange(10, 8000) for _ in range(16)] for _ in range(num)], sampling)
        names = [*PARTS, MESSAGES]
        found[load] = {name: 1e6 * sum(one.get(name, 0.0) for one in parts.steps) / len(parts.steps) for name in names}
        parts.steps.clear()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="another checkout of Flyball that is set up")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shape", default="small")
    parser.add_argument("--measure", metavar="CHECKPOINT", help=argparse.SUPPRESS)  # one side's process
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    checkpoint = make_checkpoint(Path("out/checkpoints").absolute(), args.shape)
    pythons = {"now": sys.executable}
    if args.before:
        pythons["before"] = str(args.before.absolute() / ".venv/bin/python")
    found: dict[str, list[dict[str, dict[str, float]]]] = {side: [] for side in pythons}
    for run in range(args.runs):
        for side in list(pythons)[:: 1 if run % 2 else -1]:
            command = [pythons[side], __file__, "--measure", str(checkpoint)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ)
            found[side].append(json.loads(done.stdout.splitlines()[-1]))
        print(f"run {run + 1} of {args.runs}", flush=True)
    by_load: dict[str, Any] = {
        load: {
            side: {part: median_of(one[load][part] for one in of_side) for part in of_side[0][load]}
            for side, of_side in found.items()
        }
        for load in LOADS
    }
    for load, sides in by_load.items():
        for side, of_side in sides.items():
            shown = ", ".join(f"{part} {figures['median']:.0f}" for part, figures in of_side.items())
            print(f"{load}, {side}, us a step: {shown}")
    result: dict[str, Any] = {"shape": args.shape, "microseconds_of_a_step": by_load}
    save("host_time", result | ({"before": commit_of(args.before)} if args.before else {}))


if __name__ == "__main__":
    main()

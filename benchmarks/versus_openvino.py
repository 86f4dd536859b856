"""Flyball against OpenVINO GenAI's continuous batching on one machine, in 16, 8 and 4 bits, measured in turns.

    python benchmarks/versus_openvino.py --openvino /path/to/venv/bin/python [--runs 5]

That environment has openvino-genai and optimum-intel; the model is exported by its optimum-cli. OpenVINO GenAI is a library
without a server, so both engines run offline: output tokens per second of prompts that are all submitted at once. Both have
the same limits of a step, no prefix cache, and both cores. Each run has a seed of its own, the same for both sides; the side
that goes first changes from run to run, and the one that is not measured is stopped (SIGSTOP).

OpenVINO keeps what is its default: keys and values in 8 bits, and beside weights of 8 and 4 bits inputs rounded to 8 bits in
groups. In 16 bits it is measured twice: with its default, which on a CPU with AVX512_BF16 is that dot product, and with
products in fp32, which are faster where a core issues one of those a cycle. Writes results/versus_openvino.json.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import make_checkpoint, save
from flyball_runtime.bounds import Bounds
from machine import bounds_of
from servers import OURS, show, summary
from versus_vllm import OfflineEngine, offline_speeds, versions_of

LOADS = ("1x128x64", "8x128x64", "32x128x64", "64x32x128", "16x1024x16")
INT4 = ("--weight-format", "int4", "--sym", "--group-size", "32", "--ratio", "1.0")
FP16 = ("--weight-format", "fp16")
PAIRS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "16 bits": ("none", FP16, {"INFERENCE_PRECISION_HINT": "f32"}),
    "16 bits, OpenVINO's default": ("none", FP16, {}),
    "8 bits": ("int8", ("--weight-format", "int8"), {}),
    "4 bits, inputs in 8": ("w4a8", INT4, {}),
    "4 bits, Flyball's inputs in 16": ("int4", INT4, {}),
}
"""Our quantization, what OpenVINO's export is told, and its properties."""

PACKAGES = ("openvino", "openvino-genai", "optimum-intel", "nncf")


def exported(python: str, checkpoint: Path, flags: tuple[str, ...], folder: Path) -> Path:
    """Return the model as OpenVINO reads it; one that is there already is taken."""
    path = folder / "-".join(flag.lstrip("-") for flag in flags)
    if not path.exists():
        export = [str(Path(python).with_name("optimum-cli")), "export", "openvino", "--model", str(checkpoint)]
        command = [*export, "--task", "text-generation-with-past", *flags, str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return path


def measure(ours: tuple[Path, str], theirs: tuple[str, Path, dict[str, str]], runs: int) -> dict[str, Any]:
    (checkpoint, quantization), (python, model, properties) = ours, theirs
    with contextlib.ExitStack() as stack:

        def start(python: str, engine: str, path: Path, *flags: str) -> OfflineEngine:
            return stack.enter_context(contextlib.closing(OfflineEngine(python, engine, path, {}, flags=flags)))

        engines = {
            "openvino": start(python, "openvino", model, "--openvino-properties", json.dumps(properties)),
            OURS: start(sys.executable, OURS, checkpoint, "--quantization", quantization),
        }
        result = {}
        for load, speeds in offline_speeds(engines, runs, LOADS):
            result[load] = summary(speeds, higher_is_better=True)
            print(f"{model.name}, {quantization}, {load} output tok/s: {show(result[load])}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--openvino", required=True, metavar="PYTHON", help="Python of an environment with OpenVINO GenAI"
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shape", default="small")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    checkpoint = make_checkpoint(Path("out/checkpoints").absolute(), args.shape)
    pairs: dict[str, Any] = {}
    bounds = Bounds()
    reached = [bounds.measure()]
    with tempfile.TemporaryDirectory() as folder:
        for name, (quantization, flags, properties) in PAIRS.items():
            model = exported(args.openvino, checkpoint, flags, Path(folder))
            measured = measure((checkpoint, quantization), (args.openvino, model, properties), args.runs)
            about = {"quantization": quantization, "export": flags, "properties": properties}
            pairs[name] = about | {"output_tokens_per_s": measured}
            reached.append(bounds.measure())
    versions = versions_of(args.openvino, PACKAGES)
    save("versus_openvino", {"shape": args.shape, "openvino": versions, "bounds": bounds_of(reached), "pairs": pairs})


if __name__ == "__main__":
    main()

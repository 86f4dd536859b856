"""Flyball against llama.cpp's server on one machine, in 16, 8 and 4 bits, measured in turns, so that noise hits both.

    python benchmarks/versus_llamacpp.py --llamacpp FOLDER --checkpoint FOLDER --gguf FILE [--runs 5] [--pair "8 bits"]

FOLDER has llama-server and llama-quantize; FILE is the checkpoint as BF16 GGUF, made by llama.cpp's
convert_hf_to_gguf.py. The pairs are bf16 with BF16, `--quantization int8` with Q8_0, and int4 and w4a8 with Q4_0, beside which
llama.cpp rounds inputs to 8 bits, as w4a8 does. `flyball bench` sends prompts of 128 random tokens in a closed loop at
concurrency 1, 8 and 32, with a seed for each run, the same for both sides; 64 tokens come back, or the run fails. llama.cpp
gets as many slots and threads as it can use. The side that goes first changes from run to run, and the one that is not measured
is stopped (SIGSTOP). Between pairs, what the machine reaches with torch's copy and matrix product. Writes
results/versus_llamacpp.json.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import save
from flyball_runtime.bounds import Bounds
from machine import bounds_of
from servers import CONCURRENCIES, INPUT_LEN, OURS, OUTPUT_LEN, Server, measure_all, server
from versus_vllm import num_weights

PAIRS = {
    "16 bits": ((), "BF16"),
    "8 bits": (("--quantization=int8",), "Q8_0"),
    "4 bits": (("--quantization=int4",), "Q4_0"),
    "4 bits, inputs in 8": (("--quantization=w4a8",), "Q4_0"),
}
"""Our flags, and llama.cpp's type."""

SLOTS, SLOT_TOKENS = max(CONCURRENCIES), 2 * (INPUT_LEN + OUTPUT_LEN)


def quantized(gguf: Path, kind: str, llamacpp: Path, folder: Path) -> Path:
    """Return the model in that type; the output layer too is in it, or in what llama.cpp puts in its place."""
    if kind == "BF16":
        return gguf
    path = folder / f"{kind}.gguf"
    subprocess.run([llamacpp / "llama-quantize", gguf, path, kind], check=True, capture_output=True)
    return path


@contextlib.contextmanager
def both(
    checkpoint: Path, flags: tuple[str, ...], gguf: Path, llamacpp: Path, logs: Path
) -> Iterator[dict[str, Server]]:
    threads = str(len(os.sched_getaffinity(0)))
    ours = [sys.executable, "-m", "flyball_runtime.cli", "serve", str(checkpoint), "--dtype", "bfloat16", *flags]
    ours += ["--max-model-len", str(SLOT_TOKENS)]
    theirs = [str(llamacpp / "llama-server"), "-m", str(gguf), "--parallel", str(SLOTS), "-c", str(SLOTS * SLOT_TOKENS)]
    theirs += ["-t", threads, "-b", "2048", "-ub", "512", "--alias", "m"]
    with contextlib.ExitStack() as stack:
        yield {
            "llamacpp": stack.enter_context(server(theirs, logs / "llamacpp", {})),
            OURS: stack.enter_context(server([*ours, "--served-model-name", "m"], logs / OURS, {})),
        }


def version(llamacpp: Path) -> str:
    done = subprocess.run([llamacpp / "llama-server", "--version"], check=True, capture_output=True, text=True)
    return (done.stderr + done.stdout).strip().splitlines()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llamacpp", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--gguf", type=Path, required=True, metavar="FILE")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--pair", choices=list(PAIRS), action="append", help="default: all")
    args = parser.parse_args()
    pairs: dict[str, Any] = {}
    weights = num_weights(args.checkpoint)
    bounds = Bounds()
    reached = [bounds.measure()]
    with tempfile.TemporaryDirectory() as folder:
        for name in args.pair or PAIRS:
            flags, kind = PAIRS[name]
            gguf = quantized(args.gguf, kind, args.llamacpp, Path(folder))
            with both(args.checkpoint, flags, gguf, args.llamacpp, Path(folder)) as servers:
                by_concurrency = measure_all(f"{name}, concurrency", servers, args.checkpoint, args.runs)
            about = {"flags": flags, "gguf": kind, "gguf_bytes": gguf.stat().st_size}
            pairs[name] = about | {"by_concurrency": by_concurrency}
            reached.append(bounds.measure())
    about = {"checkpoint": args.checkpoint.name, "llamacpp": version(args.llamacpp)}
    machine = {"bounds": bounds_of(reached), "num_weights": weights}
    save("versus_llamacpp", about | machine | {"pairs": pairs})


if __name__ == "__main__":
    main()

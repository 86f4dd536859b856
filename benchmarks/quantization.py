"""Decoding with weights in 16, 8 and 4 bits: one engine for each, as a library, in turns.

    python benchmarks/quantization.py [--runs 5] [--kind int8 ...]

Output tokens a second of 1, 8 and 32 sequences with prompts of 16 tokens, each run with prompts of its own. There is neither
server nor client, so that the two cores of a small machine are the engine's. Engines that are not measured are stopped
(SIGSTOP), and the first of one run is the last of the next. Between loads, what the machine reaches with torch's copy and
matrix product. Writes results/quantization.json.
"""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

from common import make_checkpoint, save
from flyball_runtime.bounds import Bounds
from machine import bounds_of, median_of
from versus_vllm import DTYPE, OfflineEngine, num_weights, offline_speeds

LOADS = ("1x16x256", "8x16x128", "32x16x128")
BITS = {"none": 16.0, "int8": 8.0, "w8a16": 8.0, "int4": 4.5, "w4a8": 4.5}
"""Of a weight, with its part of the scales that groups of 32 have; scales of whole rows are too few to count."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shape", default="small")
    parser.add_argument("--kind", choices=list(BITS), action="append", help="beside none; default: all")
    args = parser.parse_args()
    checkpoint = make_checkpoint(Path("out/checkpoints").absolute(), args.shape)
    kinds = dict.fromkeys(["none", *(args.kind or BITS)])
    bounds, by_load = Bounds(), {}
    reached = [bounds.measure()]
    with contextlib.ExitStack() as stack:
        flags = {kind: ["--dtype", DTYPE, "--quantization", kind] for kind in kinds}
        engines = {
            kind: stack.enter_context(
                contextlib.closing(OfflineEngine(sys.executable, "flyball", checkpoint, {}, flags=flags[kind]))
            )
            for kind in kinds
        }
        for load, speeds in offline_speeds(engines, args.runs, LOADS):
            by_load[load] = of_load = {kind: median_of(values) for kind, values in speeds.items()}
            base = of_load["none"]["median"]
            shown = ", ".join(
                f"{kind} {one['median']:.1f} ({one['median'] / base:.2f}x)" for kind, one in of_load.items()
            )
            print(f"{load} output tok/s: {shown}", flush=True)
            reached.append(bounds.measure())
    result: dict[str, Any] = {
        "shape": args.shape,
        "num_weights": num_weights(checkpoint),
        "bits": {kind: BITS[kind] for kind in kinds},
        "output_tokens_per_s": by_load,
        "bounds": bounds_of(reached),
    }
    save("quantization", result)


if __name__ == "__main__":
    main()

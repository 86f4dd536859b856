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
from linear import QUANTIZED
from machine import bounds_of, median_of
from versus_vllm import DTYPE, OfflineEngine, num_weights, offline_speeds

LOADS = ("1x16x256", "8x16x128", "32x16x128")
BYTES = {"none": 2.0} | {kind: bytes_per_weight for kind, (_, bytes_per_weight) in QUANTIZED.items()}
"""Of a weight in a layer, by kind."""


def weight_bytes(kind: str, of_layers: int, of_head: int) -> int:
    """Return what one token reads of so many weights; the output layer has at least 8 bits."""
    return round(of_layers * BYTES[kind] + of_head * max(BYTES[kind], BYTES["int8"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shape", default="small")
    parser.add_argument("--kind", choices=list(BYTES), action="append", help="beside none; default: all")
    args = parser.parse_args()
    checkpoint = make_checkpoint(Path("out/checkpoints").absolute(), args.shape)
    kinds = dict.fromkeys(["none", *(args.kind or BYTES)])
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
    sizes = num_weights(checkpoint)
    result: dict[str, Any] = {
        "shape": args.shape,
        "weight_bytes_of_a_token": {kind: weight_bytes(kind, **sizes) for kind in kinds},
        "output_tokens_per_s": by_load,
        "bounds": bounds_of(reached),
    }
    save("quantization", result)


if __name__ == "__main__":
    main()

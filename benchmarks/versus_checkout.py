"""This checkout against another one of Flyball, e.g. an older commit, in turns: offline and behind a server.

    git worktree add ../before COMMIT && make -C ../before setup
    python benchmarks/versus_checkout.py ../before [--runs 5] [--part offline] [--part online] [--part profile]

Offline: output tokens a second on three loads; each side runs its own `offline.py`. Online: `flyball bench` of this checkout at
both servers, as in `versus_vllm.py`. Each side has the environment of its own checkout, and both have the same random weights.
The side that is not measured is stopped (SIGSTOP); the one that goes first changes from run to run. Profile: where the time of
each goes, as in `versus_vllm.py`. Writes results/versus_checkout.json.
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
from machine import commit_of, median_of
from servers import OURS, measure_all, server
from versus_vllm import NUM_PROFILES, PROFILES, OfflineEngine, offline_speeds

HERE = Path(__file__).parent
FLAGS = ["--dtype", "bfloat16", "--max-model-len", "4096", "--served-model-name", "m"]


def offline(before: Path, checkpoint: Path, runs: int) -> dict[str, Any]:
    """Return the figures of each load, and of its median this checkout's over the other's."""
    sides = {
        "before": (str(before / ".venv/bin/python"), before / "benchmarks/offline.py"),
        "now": (sys.executable, HERE / "offline.py"),
    }
    result = {}
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(contextlib.closing(OfflineEngine(python, "flyball", checkpoint, {}, script)))
            for name, (python, script) in sides.items()
        }
        for load, speeds in offline_speeds(engines, runs):
            found: dict[str, Any] = {name: median_of(of_side) for name, of_side in speeds.items()}
            ratio = found["now"]["median"] / found["before"]["median"]
            print(f"offline {load} output tok/s: {ratio:.2f}x of before", flush=True)
            result[load] = found | {"now_over_before": ratio}
    return result


def online(before: Path, checkpoint: Path, runs: int) -> dict[str, Any]:
    """Return the figures of each concurrency, and how much better this checkout's are."""
    pythons = {"before": str(before / ".venv/bin/python"), OURS: sys.executable}
    serve = ["-m", "flyball_runtime.cli", "serve", str(checkpoint), *FLAGS]
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {
            name: stack.enter_context(server([python, *serve], logs / name, {})) for name, python in pythons.items()
        }
        return measure_all("online, concurrency", servers, checkpoint, runs)


def profiles(before: Path, checkpoint: Path, loads: list[str], times: int) -> dict[str, Any]:
    """Return for both checkouts the share of each op in the time of these loads."""
    script = (
        "import json, pathlib, sys, versus_vllm; checkpoint, times, *loads = sys.argv[1:]; "
        "print(json.dumps(versus_vllm.profile(pathlib.Path(checkpoint), loads, int(times))))"
    )
    found = {}
    for name, python in (("before", str(before / ".venv/bin/python")), ("now", sys.executable)):
        variables = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        }
        command = [python, "-c", script, str(checkpoint), str(times), *loads]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=variables)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


PARTS = {"offline": "offline_output_tokens_per_s", "online": "online_128_in_64_out", "profile": "share_of_time"}
"""Of the result, and their names in it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, metavar="CHECKOUT", help="a checkout of Flyball that is set up")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shape", default="small")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="default: all")
    parser.add_argument("--profile-load", choices=list(PROFILES), action="append", help="default: all")
    parser.add_argument("--profile-times", type=int, default=NUM_PROFILES, help="of which the quickest is kept")
    args = parser.parse_args()
    before = args.before.absolute()
    checkpoint = make_checkpoint(Path("out/checkpoints").absolute(), args.shape)
    measure = {
        "offline": lambda: offline(before, checkpoint, args.runs),
        "online": lambda: {"flags": FLAGS, "by_concurrency": online(before, checkpoint, args.runs)},
        "profile": lambda: profiles(before, checkpoint, args.profile_load or list(PROFILES), args.profile_times),
    }
    result: dict[str, Any] = {"shape": args.shape, "before": commit_of(before)}
    save("versus_checkout", result | {PARTS[part]: measure[part]() for part in args.part or PARTS})


if __name__ == "__main__":
    main()

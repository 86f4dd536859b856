"""What a CPU limit that is no whole number does: as many threads as Flyball chooses beside one fewer or one more, in turns.

    python benchmarks/cpu_limit.py [--cpus 1.5] [--runs 5]

Two servers, each in a cgroup of its own with the limit, as Kubernetes gives it to a container: one leaves the number of threads
to Flyball, which rounds the limit, the other rounds it the other way (`--num-threads`). `flyball bench` as in `versus_vllm.py`.
Needs root, and as many cores as the threads. Writes results/cpu_limit.json.
"""

import argparse
import contextlib
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from common import make_checkpoint, save
from servers import OURS, measure_all, server

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


@contextlib.contextmanager
def cgroup(name: str, cpus: float) -> Iterator[Path]:
    """Make a cgroup of version 1 or 2 that may use so many CPUs; remove it when its processes have ended."""
    is_v1 = (CGROUPS / "cpu").is_dir()
    folder = (CGROUPS / "cpu" if is_v1 else CGROUPS) / name
    folder.mkdir()
    quota_us = round(cpus * PERIOD_US)
    if is_v1:
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
    else:
        (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
    try:
        yield folder
    finally:
        while (folder / "cgroup.procs").read_text():
            time.sleep(0.1)
        folder.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpus", type=float, default=1.5)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shape", default="small")
    args = parser.parse_args()
    checkpoint = make_checkpoint(Path("out/checkpoints").absolute(), args.shape)
    other = math.floor(args.cpus) if args.cpus % 1 >= 0.5 else math.ceil(args.cpus)
    flags = {OURS: [], f"--num-threads {other}": [f"--num-threads={other}"]}
    serve = [sys.executable, "-m", "flyball_runtime.cli", "serve", str(checkpoint), "--served-model-name", "m"]
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {}
        for number, (name, own) in enumerate(flags.items()):
            folder = stack.enter_context(cgroup(f"flyball-benchmark-{number}", args.cpus))
            command = ["sh", "-c", ENTER, str(folder), *serve, *own]
            servers[name] = stack.enter_context(server(command, logs / str(number), {}))
        by_concurrency = measure_all(f"{args.cpus:g} CPUs, concurrency", servers, checkpoint, args.runs)
    save("cpu_limit", {"shape": args.shape, "cpus": args.cpus, "by_concurrency": by_concurrency})


if __name__ == "__main__":
    main()

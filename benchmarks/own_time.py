"""Processes with a time of their own, which stands still while they are stopped, so that several can share a machine in turns.

    python benchmarks/own_time.py MODULE [ARGUMENT ...]

runs ``main(ARGUMENTS)`` of a module. Under ``OwnTime``, its ``time.monotonic()`` and ``time.perf_counter()``, and those of the
processes that it spawns, leave out the time in which the group was stopped. So timeouts, leases, windows and measured times are
those of a run without pauses. The time of day goes on.
"""

import contextlib
import importlib
import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

PAUSED_ENV = "FLYBALL_BENCHMARK_PAUSED"
"""Path of a file with the seconds, as a double, in which the group was stopped."""

STOP_S = 0.01
"""Time in which every process of a group has stopped. It counts as the group's own, so that its clock never goes back."""


class OwnTime:
    """A process and its children, in a session and a time of their own. They run from the start on.

    Args:
        words: module and arguments.
        clock: a file for the group's clock.
        errors: where stderr goes.
    """

    def __init__(self, *words: str, clock: Path, errors: IO[bytes]) -> None:
        self._clock, self._paused_s, self._stopped_s = clock, 0.0, 0.0
        clock.write_bytes(struct.pack("d", 0.0))
        self.process = subprocess.Popen(
            (sys.executable, __file__, *words),
            env=os.environ | {PAUSED_ENV: str(clock)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)
        time.sleep(STOP_S)
        self._stopped_s = time.monotonic()

    def go_on(self) -> None:
        self._paused_s += time.monotonic() - self._stopped_s
        with self._clock.open("r+b") as file:
            file.write(struct.pack("d", self._paused_s))
        os.killpg(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End every process of the group, running or stopped."""
        with self.process, contextlib.suppress(ProcessLookupError):  # they may all have ended
            os.killpg(self.process.pid, signal.SIGKILL)


def enter() -> None:
    """Set this process's clocks to the time of its group."""
    with Path(os.environ[PAUSED_ENV]).open("r+b") as file:
        paused = memoryview(mmap.mmap(file.fileno(), 8)).cast("d")
    time.monotonic = _without(time.monotonic, paused)
    time.perf_counter = _without(time.perf_counter, paused)


def _without(clock: Callable[[], float], paused: memoryview) -> Callable[[], float]:
    def own_s() -> float:
        return clock() - paused[0]

    return own_s


if PAUSED_ENV in os.environ and __name__ in ("__main__", "__mp_main__"):
    enter()  # as the script, and as the main module of a process that multiprocessing spawns

if __name__ == "__main__":
    sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[2:]))

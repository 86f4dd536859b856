"""Background processes that cannot outlive the tests."""

import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cluster_kit.errors import StartFailed

POLL_S = 0.02
LOG_TAIL_CHARACTERS = 3000


class ProcessGroup:
    """Processes that end with this one, even if it is killed: a guard reads a pipe that only we hold open.

    Not PR_SET_PDEATHSIG: that follows the thread that started a process, and tests start some from worker threads.
    """

    def __init__(self, log_folder: Path) -> None:
        self._log_folder = log_folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._guard = subprocess.Popen(
            ("/bin/sh", "-c", "read -r _; kill -KILL 0"), stdin=subprocess.PIPE, process_group=0
        )

    def start(self, name: str, *command: str, environment: Mapping[str, str] | None = None) -> None:
        """Start a process; its output is added to ``name``.log."""
        with self.log_path(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=self._guard.pid,
            )

    def kill(self, name: str) -> None:
        """End one process at once."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def wait_until(self, name: str, becomes: str, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait for a condition that a process brings about.

        Raises:
            StartFailed: the process ended, or the time is up.
        """
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s or self._processes[name].poll() is not None:
                raise StartFailed(f"{name} became {becomes}", timeout_s, self.log_tail(name))
            time.sleep(POLL_S)

    def log_path(self, name: str) -> Path:
        return self._log_folder / f"{name}.log"

    def log_tail(self, name: str) -> str:
        return self.log_path(name).read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]

    def close(self) -> None:
        """Kill all of them. Nothing is asked to leave first: nobody reads their data again."""
        self._guard.communicate()
        for process in self._processes.values():
            process.wait()

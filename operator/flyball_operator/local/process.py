"""One child process: its log file, its signals, and what its exit code means."""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from flyball_protocol import endpoints
from flyball_protocol.quoting import one_line

TAIL_BYTES = 65536
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)

_MEANINGS = {
    endpoints.EXIT_OK: "stopped cleanly",
    endpoints.EXIT_CONFIG_ERROR: "configuration error",
    endpoints.EXIT_ENGINE_DIED: "the engine died",
    endpoints.EXIT_DRAIN_TIMEOUT: "requests were still running at the drain deadline",
}


class Process:
    """A running child in a process group of its own, so that Ctrl-C in the terminal reaches us only and we drain it."""

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path, log_start: int) -> None:
        self._process = process
        self._log_path = log_path
        self._log_start = log_start

    @classmethod
    async def start(cls, argv: Sequence[str], env: Mapping[str, str], log_path: Path) -> "Process":
        """Start ``argv`` with ``env`` added to our own environment; its output is appended to ``log_path``.

        Raises:
            OSError: the executable cannot be run, or the log file not be written.
        """
        # Unbuffered, so that the last line in the log is the last thing the child said.
        full_env = {**os.environ, "PYTHONUNBUFFERED": "1", **env}
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *argv,
                env=full_env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
            return cls(process, log_path, log.tell())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Return the exit code once the process has ended; what is left of its group is killed."""
        code = await self._process.wait()
        self.kill()
        return code

    async def stop(self, grace_s: float) -> bool:
        """Ask the process to end, and kill its group after ``grace_s``. Returns whether it had to be killed."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
            return True
        return False

    def kill(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def last_words(self) -> str:
        """Return the last error that this process logged, else the last line that it wrote, else an empty string."""
        try:
            tail = self._tail()
        except OSError as error:
            return f"its log cannot be read ({error.strerror})"
        lines = [one_line(line.strip()) for line in tail.splitlines() if line.strip()]
        errors = [line for line in lines if " CRITICAL " in line or " ERROR " in line]
        return (errors or lines or [""])[-1]

    def _tail(self) -> str:
        with self._log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - TAIL_BYTES))
            return log.read(TAIL_BYTES).decode("utf-8", "replace")

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)


def explain_exit(code: int) -> str:
    """Return an exit code in words."""
    if code < 0:
        return f"ended by signal {-code} ({signal.strsignal(-code)})"
    meaning = _MEANINGS.get(code)
    return f"exit code {code} ({meaning})" if meaning else f"exit code {code}"


def _end_with_parent() -> None:
    """Have the kernel send this process SIGTERM when the operator is gone without having drained it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

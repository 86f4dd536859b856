"""One child process: its log file, its signals, what its exit code means, and its probes."""

import asyncio
import ctypes
import errno
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from flyball_protocol import endpoints
from flyball_protocol.quoting import one_line

log = logging.getLogger(__name__)

TAIL_BYTES = 65536
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)

_MEANINGS = {
    endpoints.EXIT_OK: "stopped cleanly",
    endpoints.EXIT_CONFIG_ERROR: "configuration error",
    endpoints.EXIT_ENGINE_DIED: "the engine died",
    endpoints.EXIT_DRAIN_TIMEOUT: "requests were still running at the drain deadline",
}


def in_words(error: Exception) -> str:
    """Return what went wrong, without the address that the reader knows already."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno).lower()
    return one_line(f"{type(error).__name__}: {error}".rstrip(": "))


def out_of_files(error: Exception) -> bool:
    """Return whether this process has no file handle left, which says nothing about whom it wanted to ask."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE)


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


@dataclass(frozen=True)
class Probe:
    """An httpGet probe; the field names are Kubernetes'. ``grace_s`` is None where the pod's grace period holds."""

    path: str
    period_s: float
    timeout_s: float
    failure_threshold: int
    grace_s: float | None = None


class Prober:
    """Asks one process, with the kubelet's meaning of period, timeout and thresholds. ``url`` is its base URL."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._had_no_files = False

    async def until_success(self, probe: Probe) -> str | None:
        """Return None after the first success, or why ``failure_threshold`` failures in a row came first."""
        return await self._until(probe, success=True)

    async def until_failure(self, probe: Probe) -> str:
        """Return why ``failure_threshold`` probes in a row failed, as soon as they have."""
        return await self._until(probe, success=False) or "never"

    async def _until(self, probe: Probe, *, success: bool) -> str | None:
        failures = 0
        while True:
            problem = await self.ask(probe)
            if problem is None and success:
                return None
            failures = failures + 1 if problem else 0
            if failures >= probe.failure_threshold:
                return f"{probe.path} failed {failures} times in a row, every {probe.period_s:g} s: {problem}"
            await asyncio.sleep(probe.period_s)

    async def ask(self, probe: Probe) -> str | None:
        """Return None when the probe succeeds now, or why it does not. Without a file handle to ask with, it waits for one."""
        while True:
            try:
                return await self._ask(probe)
            except (aiohttp.ClientError, OSError) as error:
                if not out_of_files(error):
                    return in_words(error)
                self._note_no_files()
            await asyncio.sleep(probe.period_s)

    def _note_no_files(self) -> None:
        if not self._had_no_files:
            log.warning("%s cannot be probed: no file handles are left (ulimit -n); it counts as it was", self._url)
        self._had_no_files = True

    async def _ask(self, probe: Probe) -> str | None:
        timeout = aiohttp.ClientTimeout(total=probe.timeout_s)
        try:
            async with self._session.get(self._url + probe.path, timeout=timeout, allow_redirects=False) as response:
                return None if 200 <= response.status < 400 else f"status {response.status}"
        except TimeoutError:
            return f"no answer in {probe.timeout_s:g} s"

"""HTTP probes, with the kubelet's meaning of period, timeout and thresholds."""

import asyncio
import logging
from dataclasses import dataclass

import aiohttp

from flyball_operator.local.reasons import in_words, out_of_files

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Probe:
    """An httpGet probe; the field names are Kubernetes'. ``grace_s`` is None where the pod's grace period holds."""

    path: str
    period_s: float
    timeout_s: float
    failure_threshold: int
    grace_s: float | None = None


class Prober:
    """Asks one process. ``url`` is its base URL."""

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

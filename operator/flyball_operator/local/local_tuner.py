"""The slow loop at work on local replicas, and their evidence for whoever looks."""

import asyncio
import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from flyball_operator.local.fleet import Fleet
from flyball_operator.local.reports import Trouble
from flyball_operator.spec import LiveLimits, Tuning
from flyball_operator.tuning import Action, Decision, PodEvidence, Reason
from flyball_operator.tuning.admin import AdminClient, Target
from flyball_operator.tuning.loop import Round, SlowLoop
from flyball_operator.tuning.record import DecisionRecord, to_line

log = logging.getLogger(__name__)

WAITING = frozenset(
    {Reason.NO_REPLICAS, Reason.NO_EVIDENCE, Reason.SETTLING, Reason.COOLING_DOWN, Reason.STEADY, Reason.TUNING_OFF}
)
"""Reasons to hold that need no attention; they are told in the debug log only."""


TICK_S = 0.5
"""Between two looks at whether a replica is new."""


class LocalTuner:
    """Runs a round every interval while tuning is on, and at once when a replica is new or the manifest has changed.

    Reads evidence every ``evidence_period_s`` too if that is given.
    """

    def __init__(
        self,
        name: str,
        tuning: Tuning,
        fleet: Fleet,
        admin: AdminClient,
        *,
        record_path: Path,
        evidence_period_s: float | None,
        report: Callable[[str], None],
    ) -> None:
        self.evidence: dict[str, PodEvidence] = {}
        self.decision: Decision | None = None
        self._tuning = tuning
        self._fleet = fleet
        self._admin = admin
        self._record_path = record_path
        self._evidence_period_s = evidence_period_s
        self._report = report
        self._loop = SlowLoop(name, admin, on_record=self._write)
        self._changed = asyncio.Event()
        self._asked: list[Target] = []
        self._recording = Trouble(
            report,
            f"decisions are not recorded in {record_path}",
            lambda count: f"decisions are recorded in {record_path} again; {count} are missing",
        )

    def tune(self, tuning: Tuning) -> None:
        """Change objectives, bounds or pace; the next round follows at once."""
        self._tuning = tuning
        self._changed.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tune_forever())
            if self._evidence_period_s is not None:
                tasks.create_task(self._watch_forever(self._evidence_period_s))

    async def _tune_forever(self) -> None:
        while True:
            self._changed.clear()
            self._asked = self._targets()
            if self._tuning.mode == "Disabled" and self._tuning.limits == LiveLimits() and not self._loop.has_work:
                self.decision = None
            else:
                await self._round()
            await self._wait()

    async def _wait(self) -> None:
        """Wait until the next round is due."""
        end_s = time.monotonic() + self._tuning.interval_seconds
        while (left_s := end_s - time.monotonic()) > 0 and not self._changed.is_set() and not self._has_new():
            with contextlib.suppress(TimeoutError):
                # Not asyncio.wait_for: in Python 3.11 it can lose a cancellation that comes together with the event.
                async with asyncio.timeout(min(TICK_S, left_s)):
                    await self._changed.wait()

    def _has_new(self) -> bool:
        """Return whether a replica serves that did not in the last round."""
        return not set(self._targets()) <= set(self._asked)

    async def _round(self) -> None:
        try:
            self._take_note(await self._loop.round(self._tuning, self._asked))
        except Exception:  # the loop's boundary: the replicas serve on, with the limits that they have
            log.exception("a round of tuning failed")

    async def _watch_forever(self, period_s: float) -> None:
        while True:
            self._keep(await self._admin.gather(self._targets()))
            await asyncio.sleep(period_s)

    def _targets(self) -> list[Target]:
        return [Target(replica.name, replica.admin_url) for replica in self._fleet.replicas if replica.ready]

    def _take_note(self, done: Round) -> None:
        self._keep(done.evidence)
        self.decision = done.decision
        if not done.told:
            return
        text = self._in_words(done.decision)
        if done.decision.action is Action.HOLD and done.decision.reason in WAITING:
            log.debug("%s", text)
        else:
            self._report(text)

    def _in_words(self, decision: Decision) -> str:
        if decision.reason is Reason.SPEC_LIMITS:
            return f"limits, revision {decision.revision}: {decision.why}"
        if decision.action is Action.HOLD:
            return f"tuning holds ({decision.reason}): {decision.why}"
        if self._tuning.mode == "Recommend":
            return f"tuning recommends ({decision.reason}): {decision.why}"
        return f"tuning, revision {decision.revision} ({decision.reason}): {decision.why}"

    def _keep(self, evidence: "list[PodEvidence] | tuple[PodEvidence, ...]") -> None:
        self.evidence = {pod.pod: pod for pod in evidence}

    def _write(self, record: DecisionRecord) -> None:
        with self._recording.tolerated():
            append_line(self._record_path, to_line(record))


def append_line(path: Path, line: bytes) -> None:
    """Append a line whole, or nothing of it. Raises OSError."""
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if file.write(line) < len(line):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

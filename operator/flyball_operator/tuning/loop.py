"""One round of the slow loop: gather, decide, post, read the answers back."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flyball_operator.spec import Tuning
from flyball_operator.tuning.admin import AdminClient, Posted, Target
from flyball_operator.tuning.core import LoopCore
from flyball_operator.tuning.decision import Decision
from flyball_operator.tuning.evidence import PodEvidence
from flyball_operator.tuning.record import DecisionRecord
from flyball_operator.tuning.recovery import Memory
from flyball_protocol import LimitsStatus, LimitsUpdate

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Round:
    """What one round saw and did. ``told`` says whether the decision differs from the one before."""

    evidence: tuple[PodEvidence, ...]
    decision: Decision
    posted: tuple[Posted, ...]
    told: bool


class SlowLoop:
    """Tunes one deployment. Revisions carry on from the highest that any replica reports, so a restart loses nothing.

    Args:
        canary_first, memory: see LoopCore.
    """

    def __init__(
        self,
        deployment: str,
        admin: AdminClient,
        *,
        on_record: Callable[[DecisionRecord], None],
        clock: Callable[[], float] = time.monotonic,
        canary_first: bool = False,
        memory: Memory | None = None,
    ) -> None:
        self._admin = admin
        self._clock = clock
        self._core = LoopCore(deployment, on_record=on_record, canary_first=canary_first, memory=memory)

    @property
    def has_trial(self) -> bool:
        """Whether a change is on trial at one replica."""
        return self._core.state.trial is not None

    async def round(self, tuning: Tuning, targets: Sequence[Target]) -> Round:
        """Decide once and, in mode Auto, bring the replicas to the limits that follow."""
        evidence = tuple(await self._admin.gather(targets))
        turn = self._core.turn(tuning, evidence, now_s=self._clock())
        updates = {target: turn.updates[target.name] for target in targets if target.name in turn.updates}
        posted = await self._admin.post_all(updates)
        for one, update in zip(posted, updates.values(), strict=True):
            _log_answer(one, update)
        return Round(evidence, turn.decision, tuple(posted), turn.told)


def _log_answer(posted: Posted, update: LimitsUpdate) -> None:
    if posted.ack is None:
        log.warning("%s did not take limits revision %d: %s", posted.pod, update.revision, posted.problem)
    elif posted.ack.status in (LimitsStatus.STALE, LimitsStatus.REJECTED):
        log.warning(
            "%s refused limits revision %d (%s, revision %d in force): %s",
            posted.pod,
            update.revision,
            posted.ack.status,
            posted.ack.revision,
            posted.ack.reason,
        )
    else:
        log.debug("%s has limits revision %d: %s", posted.pod, posted.ack.revision, posted.ack.status)

"""One round of the slow loop: gather, decide, post, read the answers back."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flyball_operator.spec import Tuning
from flyball_operator.tuning import spec_limits
from flyball_operator.tuning.admin import AdminClient, Target
from flyball_operator.tuning.core import LoopCore
from flyball_operator.tuning.decision import Decision
from flyball_operator.tuning.evidence import PodEvidence, Posted
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
        memory: see LoopCore.
    """

    def __init__(
        self,
        deployment: str,
        admin: AdminClient,
        *,
        on_record: Callable[[DecisionRecord], None],
        clock: Callable[[], float] = time.monotonic,
        memory: Memory | None = None,
    ) -> None:
        self._admin = admin
        self._clock = clock
        self._answers: dict[str, str] = {}
        self._core = LoopCore(deployment, on_record=on_record, memory=memory)

    @property
    def has_work(self) -> bool:
        """Whether limits are other than what the spec says."""
        return self._core.state.tuned

    async def round(self, tuning: Tuning, targets: Sequence[Target]) -> Round:
        """Bring the replicas to spec.tuning.limits where these hold; else decide once and post what follows."""
        evidence = tuple(await self._admin.gather(targets))
        wanted = spec_limits.due(tuning, self._core.state, evidence)
        if wanted is not None:
            posted = await self._post(targets, wanted.updates)
            problems = spec_limits.problems_of(posted)
            decision = spec_limits.outcome(wanted, evidence, problems, self._core.state)
            told = self._core.note(tuning, evidence, decision, now_s=self._clock(), problems=problems)
            return Round(evidence, decision, posted, told)
        if tuning.mode == "Disabled" and not self.has_work:
            return Round(evidence, spec_limits.settled(evidence, self._core.state), (), False)
        turn = self._core.turn(tuning, evidence, now_s=self._clock())
        return Round(evidence, turn.decision, await self._post(targets, turn.updates), turn.told)

    async def _post(self, targets: Sequence[Target], updates: Mapping[str, LimitsUpdate]) -> tuple[Posted, ...]:
        wanted = {target: updates[target.name] for target in targets if target.name in updates}
        posted = await self._admin.post_all(wanted)
        self._answers = {target.name: self._answers.get(target.name, "") for target in wanted}
        for one, update in zip(posted, wanted.values(), strict=True):
            self._log_answer(one, update)
        return tuple(posted)

    def _log_answer(self, posted: Posted, update: LimitsUpdate) -> None:
        """Log what a replica answered; a problem that stays is a warning once."""
        level, words = _answer(posted, update)
        is_old, self._answers[posted.pod] = self._answers.get(posted.pod) == words, words
        log.log(logging.DEBUG if is_old else level, "%s %s", posted.pod, words)


def _answer(posted: Posted, update: LimitsUpdate) -> tuple[int, str]:
    """Return the log level of an answer, and it in words."""
    ack = posted.ack
    if ack is None:
        return logging.WARNING, f"did not take limits revision {update.revision}: {posted.problem}"
    if ack.status in (LimitsStatus.STALE, LimitsStatus.REJECTED):
        stands = f"{ack.status}, revision {ack.revision} in force"
        return logging.WARNING, f"refused limits revision {update.revision} ({stands}): {ack.reason}"
    return logging.DEBUG, f"has limits revision {ack.revision}: {ack.status}"

"""One round of the slow loop: gather, decide, post, read the answers back."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from flyball_operator.spec import Tuning
from flyball_operator.tuning.admin import AdminClient, Posted, Target
from flyball_operator.tuning.canary import advance
from flyball_operator.tuning.decide import decide
from flyball_operator.tuning.decision import Action, Decision, Reason
from flyball_operator.tuning.evidence import PodEvidence
from flyball_operator.tuning.knobs import as_change
from flyball_operator.tuning.record import DecisionRecord
from flyball_operator.tuning.recovery import Memory, recover
from flyball_operator.tuning.state import TunerState
from flyball_protocol import LimitsStatus, LimitsUpdate

log = logging.getLogger(__name__)

LEASE_ROUNDS = 6
"""Limits are a lease of this many intervals, so that replicas fall back by themselves when the operator is gone."""

MIN_LEASE_S = 30.0


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
        canary_first: try each change on one replica before the others get it.
        memory: what an earlier slow loop left; nothing is posted until enough replicas answer to go on from there.
            None starts afresh.
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
        self._deployment = deployment
        self._admin = admin
        self._on_record = on_record
        self._clock = clock
        self._canary_first = canary_first
        self._memory = memory
        self._state = TunerState()
        self._told: tuple[Action, Reason, object] | None = None

    @property
    def has_trial(self) -> bool:
        """Whether a change is on trial at one replica."""
        return self._state.trial is not None

    async def round(self, tuning: Tuning, targets: Sequence[Target]) -> Round:
        """Decide once and, in mode Auto, bring the replicas to the limits that follow."""
        evidence = tuple(await self._admin.gather(targets))
        now_s = self._clock()
        if self._memory is not None:
            self._recover(self._memory, evidence, now_s)
        function, state = advance if self._canary_first else decide, self._state
        decision = function(tuning, state, evidence, now_s=now_s)
        posted: tuple[Posted, ...] = ()
        if self._memory is not None or (tuning.mode != "Auto" and decision.action is not Action.ROLL_BACK):
            self._state = TunerState()  # what was recommended was not done
        else:
            # Even a change that no replica took counts as made: it is not tried again before its cool-down.
            self._state = decision.state
            posted = await self._post(tuning, decision, targets)
        told = self._is_news(decision)
        if told or decision.action is not Action.HOLD:
            self._on_record(_record(self._deployment, tuning, state, evidence, now_s, decision, self._canary_first))
        return Round(evidence, decision, posted, told)

    def _recover(self, memory: Memory, evidence: tuple[PodEvidence, ...], now_s: float) -> None:
        state = recover(memory, evidence, now_s=now_s)
        if state is not None:
            self._state, self._memory = state, None

    async def _post(self, tuning: Tuning, decision: Decision, targets: Sequence[Target]) -> tuple[Posted, ...]:
        """Bring every replica to what it should have, or renew the lease of it."""
        lease_s = max(MIN_LEASE_S, LEASE_ROUNDS * float(tuning.interval_seconds))
        updates = {
            target: LimitsUpdate(revision=wanted[0], limits=as_change(wanted[1]), ttl_s=lease_s)
            for target in targets
            if (wanted := decision.wanted_at(target.name)) is not None
        }
        posted = await self._admin.post_all(updates)
        for one, update in zip(posted, updates.values(), strict=True):
            _log_answer(one, update)
        return tuple(posted)

    def _is_news(self, decision: Decision) -> bool:
        told = (decision.action, decision.reason, decision.limits)
        news, self._told = told != self._told, told
        return news


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


def _record(
    deployment: str,
    tuning: Tuning,
    state: TunerState,
    evidence: tuple[PodEvidence, ...],
    now_s: float,
    decision: Decision,
    canary_first: bool,
) -> DecisionRecord:
    return DecisionRecord(
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        deployment=deployment,
        tuning=tuning,
        state=state,
        evidence=evidence,
        now_s=now_s,
        decision=decision,
        canary_first=canary_first,
    )

"""One round of the slow loop: gather, decide, post, read the answers back."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from msgspec import structs

from flyball_operator.spec import Tuning
from flyball_operator.tuning.admin import AdminClient, Posted, Target
from flyball_operator.tuning.decide import decide
from flyball_operator.tuning.decision import Action, Decision, Reason
from flyball_operator.tuning.evidence import PodEvidence
from flyball_operator.tuning.knobs import as_change
from flyball_operator.tuning.record import DecisionRecord
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
    """Tunes one deployment. Revisions carry on from the highest that any replica reports, so a restart loses nothing."""

    def __init__(
        self,
        deployment: str,
        admin: AdminClient,
        *,
        on_record: Callable[[DecisionRecord], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deployment = deployment
        self._admin = admin
        self._on_record = on_record
        self._clock = clock
        self._state = TunerState()
        self._told: tuple[Action, Reason, object] | None = None

    async def round(self, tuning: Tuning, targets: Sequence[Target]) -> Round:
        """Decide once and, in mode Auto, bring the replicas to the limits that follow."""
        evidence = tuple(await self._admin.gather(targets))
        now_s = self._clock()
        state, decision = self._state, decide(tuning, self._state, evidence, now_s=now_s)
        posted: tuple[Posted, ...] = ()
        if tuning.mode == "Auto":
            # Even a change that no replica took counts as made: it is not tried again before its cool-down.
            self._state = decision.state
            posted = await self._post(tuning, decision, targets)
        else:
            self._state = TunerState()  # what was recommended was not done
        told = self._is_news(decision)
        if told or decision.action is Action.CHANGE:
            self._on_record(_record(self._deployment, tuning, state, evidence, now_s, decision))
        return Round(evidence, decision, posted, told)

    async def _post(self, tuning: Tuning, decision: Decision, targets: Sequence[Target]) -> tuple[Posted, ...]:
        """Post a change, or renew the lease of what is in force. At revision 0 nothing was ever posted: nothing to renew."""
        if decision.limits is None or decision.revision == 0:
            return ()
        lease_s = max(MIN_LEASE_S, LEASE_ROUNDS * float(tuning.interval_seconds))
        update = LimitsUpdate(revision=decision.revision, limits=as_change(decision.limits), ttl_s=lease_s)
        posted = await self._admin.post_all(targets, update)
        if any(_has_other_content(one, update) for one in posted):
            # Set by hand, by an earlier operator, or before the interval changed: the same limits, as a revision of ours.
            update = structs.replace(update, revision=update.revision + 1)
            self._state = structs.replace(self._state, revision=update.revision, limits=decision.limits)
            posted = await self._admin.post_all(targets, update)
        for one in posted:
            _log_answer(one, update)
        return tuple(posted)

    def _is_news(self, decision: Decision) -> bool:
        told = (decision.action, decision.reason, decision.limits)
        news, self._told = told != self._told, told
        return news


def _has_other_content(posted: Posted, update: LimitsUpdate) -> bool:
    """Return whether a replica refused to renew because this revision came to it with other words."""
    ack = posted.ack
    return ack is not None and ack.status is LimitsStatus.REJECTED and ack.revision == update.revision


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
) -> DecisionRecord:
    return DecisionRecord(
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        deployment=deployment,
        tuning=tuning,
        state=state,
        evidence=evidence,
        now_s=now_s,
        decision=decision,
    )

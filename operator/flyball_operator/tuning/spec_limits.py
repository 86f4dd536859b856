"""The limits that spec.tuning.limits sets: which replicas lack them, and what posting them came to. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from flyball_operator.spec import LiveLimits, Tuning
from flyball_operator.tuning.decision import Action, Decision, Reason
from flyball_operator.tuning.evidence import PodEvidence, Posted
from flyball_operator.tuning.knobs import moved_in_words
from flyball_operator.tuning.modes import as_change
from flyball_operator.tuning.state import TunerState
from flyball_protocol import Evidence, Limits, LimitsChange, LimitsStatus, LimitsUpdate

START = 1
"""The revision of the first limits that a replica is given."""

ACCEPTED = (LimitsStatus.APPLIED, LimitsStatus.DEFERRED)


@dataclass(frozen=True)
class Wanted:
    """A change that some replicas lack.

    Attributes:
        updates: what to post, by replica name; without a ttl, so it stays when the operator is gone.
        moved: in words, what changes.
    """

    change: LimitsChange
    revision: int
    updates: dict[str, LimitsUpdate]
    moved: str


def is_start(tuning: Tuning, state: TunerState, evidence: Sequence[PodEvidence]) -> bool:
    """Return whether mode Auto still has to start from the limits of the spec: no replica was given others yet.

    A replica that became ready after the first got them has to be given them too.
    """
    answered = [pod.evidence for pod in evidence if pod.evidence is not None]
    change = as_change(tuning.limits)
    is_untouched = all(
        one.revision == 0 or (one.revision == START and change.applied_to(one.target) == one.target) for one in answered
    )
    return tuning.mode == "Auto" and state.revision == 0 and is_untouched


def in_force(tuning: Tuning, evidence: Sequence[PodEvidence]) -> tuple[int, Limits] | None:
    """Return the newest revision, and its limits, if it has what the spec says; None without limits in the spec."""
    answered = [pod.evidence for pod in evidence if pod.evidence is not None]
    newest = max(answered, key=lambda one: one.revision, default=None)
    if newest is None or newest.revision == 0 or tuning.limits == LiveLimits():
        return None
    limits = newest.target
    return (newest.revision, limits) if as_change(tuning.limits).applied_to(limits) == limits else None


def lacking(tuning: Tuning, evidence: Sequence[PodEvidence]) -> Wanted | None:
    """Return what to post where; None if every replica that answered has the limits of the spec.

    A replica that missed the newest revision gets that one. If a replica has it with other limits, all get the next one.
    """
    change = as_change(tuning.limits)
    answered = {pod.pod: pod.evidence for pod in evidence if pod.evidence is not None}
    behind = {pod: one for pod, one in answered.items() if change.applied_to(one.target) != one.target}
    if not behind:
        return None
    newest = max(one.revision for one in answered.values())
    is_new = newest == 0 or any(one.revision == newest for one in behind.values())
    revision = newest + 1 if is_new else newest
    update = LimitsUpdate(revision=revision, limits=change)
    return Wanted(change, revision, dict.fromkeys(answered if is_new else behind, update), _moved(change, behind))


def problems_of(posted: Sequence[Posted]) -> tuple[str, ...]:
    """Return the words of the replicas that refused an update or did not answer."""
    return tuple(f"{one.pod}: {problem}" for one in posted if (problem := _problem(one)))


def outcome(wanted: Wanted, evidence: Sequence[PodEvidence], problems: Sequence[str], state: TunerState) -> Decision:
    """Return what to report: a change, or a hold with the problems."""
    before = next(pod.evidence.target for pod in evidence if pod.evidence is not None and pod.pod in wanted.updates)
    if problems:
        action, reason = Action.HOLD, Reason.LIMITS_REFUSED
        why = f"spec.tuning.limits asks for {wanted.moved}, which is not in force everywhere; {'; '.join(problems)}"
    else:
        action, reason, why = Action.CHANGE, Reason.SPEC_LIMITS, f"{wanted.moved}: spec.tuning.limits says so"
    limits = wanted.change.applied_to(before)
    return Decision(action=action, reason=reason, why=why, limits=limits, revision=wanted.revision, state=state)


def settled(evidence: Sequence[PodEvidence], state: TunerState) -> Decision:
    """Return the hold of mode Disabled while nothing has to be posted."""
    answered = [pod.evidence for pod in evidence if pod.evidence is not None]
    newest = max(answered, key=lambda one: one.revision, default=None)
    return Decision(
        action=Action.HOLD,
        reason=Reason.SPEC_LIMITS if answered else Reason.NO_REPLICAS,
        why="every replica that answers has the limits of spec.tuning.limits" if answered else "no replica answers",
        limits=newest.target if newest else None,
        revision=newest.revision if newest else 0,
        state=state,
    )


def _moved(change: LimitsChange, behind: dict[str, Evidence]) -> str:
    """Return ``max_num_seqs 64 -> 8`` for each limit that changes at a replica."""
    words: dict[str, str] = {}
    for target in (one.target for one in behind.values()):
        before, after = structs.asdict(target), structs.asdict(change.applied_to(target))
        for name in before:
            if before[name] != after[name]:
                words.setdefault(name, moved_in_words(name, before[name], after[name]))
    return ", ".join(words.values())


def _problem(posted: Posted) -> str:
    if posted.ack is None:
        return posted.problem
    return "" if posted.ack.status in ACCEPTED else posted.ack.reason

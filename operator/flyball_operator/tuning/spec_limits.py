"""The limits that spec.tuning.limits sets: which replicas lack them, and what posting them came to. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from flyball_operator.spec import LiveLimits, Tuning
from flyball_operator.tuning.decision import Action, Decision, Reason
from flyball_operator.tuning.evidence import PodEvidence, Posted, of_one_family
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


def due(tuning: Tuning, state: TunerState, evidence: Sequence[PodEvidence]) -> Wanted | None:
    """Return what to post before anything else; None while the replicas have the limits of the spec, or tuning has moved them.

    In mode Auto, tuning starts from these limits: they are due once, for the replicas of a model and template that were given
    no others. In other modes they are due whenever a replica lacks them, once what tuning moved is taken back.
    """
    if tuning.limits == LiveLimits():
        return None
    if tuning.mode != "Auto":
        return None if state.tuned else lacking(tuning, evidence)
    kind, own, _ = of_one_family(evidence, state.family)
    is_known = state.revision > 0 and state.family in ("", kind)
    if is_known or not all(_is_untouched(tuning, state, one) for one in own):
        return None
    return lacking(tuning, own, first=_start(state))


def for_strangers(tuning: Tuning, decision: Decision, evidence: Sequence[PodEvidence]) -> dict[str, LimitsUpdate]:
    """Return what replicas of another template than is decided on are given to start with in mode Auto, by their names."""
    change = as_change(tuning.limits)
    update = LimitsUpdate(revision=_start(decision.state), limits=change)
    untouched = {pod.pod: pod.evidence for pod in evidence if pod.evidence is not None and pod.evidence.revision == 0}
    return {
        pod: update for pod, one in untouched.items() if pod in decision.left_alone and not _has(one.target, change)
    }


def in_force(tuning: Tuning, evidence: Sequence[PodEvidence]) -> tuple[int, Limits] | None:
    """Return the newest revision, and its limits, if it has what the spec says; None without limits in the spec."""
    answered = [pod.evidence for pod in evidence if pod.evidence is not None]
    newest = max(answered, key=lambda one: one.revision, default=None)
    if newest is None or newest.revision == 0 or tuning.limits == LiveLimits():
        return None
    limits = newest.target
    return (newest.revision, limits) if _has(limits, as_change(tuning.limits)) else None


def lacking(tuning: Tuning, evidence: Sequence[PodEvidence], *, first: int = START) -> Wanted | None:
    """Return what to post where; None if every replica that answered has the limits of the spec.

    A replica that missed the newest revision gets that one. If a replica has it with other limits, all get the next one.

    Args:
        first: the revision where no replica has any.
    """
    change = as_change(tuning.limits)
    answered = {pod.pod: pod.evidence for pod in evidence if pod.evidence is not None}
    behind = {pod: one for pod, one in answered.items() if not _has(one.target, change)}
    if not behind:
        return None
    newest = max(one.revision for one in answered.values())
    is_new = any(one.revision == newest for one in behind.values())
    revision = max(first, newest + 1) if is_new else newest
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


def _start(state: TunerState) -> int:
    """Return the revision of the first limits of replicas with a new template; older ones may have any up to the state's."""
    return max(START, state.revision)


def _is_untouched(tuning: Tuning, state: TunerState, pod: PodEvidence) -> bool:
    """Return whether a replica has had no limits but those of the spec; the others may have got these already."""
    one = pod.evidence
    if one is None or one.revision == 0:
        return True
    return one.revision == _start(state) and _has(one.target, as_change(tuning.limits))


def _has(limits: Limits, change: LimitsChange) -> bool:
    """Return whether the change would change nothing."""
    return change.applied_to(limits) == limits


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

"""A decision in a few words for programs: which limits it moved, from what to what, and what became of them. Pure."""

from collections.abc import Sequence

from msgspec import Struct

from flyball_operator.spec import Tuning
from flyball_operator.tuning.decision import Action, Decision, Reason
from flyball_operator.tuning.evidence import PodEvidence
from flyball_operator.tuning.knobs import moved_in_words
from flyball_protocol import Limits

VERDICTS = {
    Action.HOLD: "held",
    Action.CHANGE: "made",
    Action.TRY: "tried",
    Action.PROMOTE: "kept",
    Action.ROLL_BACK: "reverted",
    Action.COMMIT: "settled",
    Action.RESTORE: "restored",
}
RECOMMENDED = "recommended"


class Moved(Struct, frozen=True, kw_only=True):
    """One limit, named as in Limits. None is no step-time target."""

    knob: str
    before: float | None
    after: float | None

    def __str__(self) -> str:
        return moved_in_words(self.knob, self.before, self.after)


def is_made(tuning: Tuning, decision: Decision) -> bool:
    """Return whether a decision changed limits; in mode Recommend most are recommendations only."""
    is_due = tuning.mode == "Auto" or decision.action is not Action.CHANGE or decision.reason is Reason.SPEC_LIMITS
    return decision.action not in (Action.HOLD, Action.COMMIT) and is_due


def verdict_of(tuning: Tuning, decision: Decision) -> str:
    """Return held, made, tried, kept, reverted, settled, restored or recommended."""
    if decision.action is Action.CHANGE and not is_made(tuning, decision):
        return RECOMMENDED
    return VERDICTS[decision.action]


def moved_by(decision: Decision, evidence: Sequence[PodEvidence]) -> tuple[Moved, ...]:
    """Return the limits that a decision moves: of a trial and its end those of the trial, else what differs at a replica."""
    if decision.action in (Action.HOLD, Action.COMMIT) or decision.limits is None:
        return ()
    if decision.action in (Action.CHANGE, Action.RESTORE):
        return _differences(decision.limits, evidence)
    trial, last = decision.state.trial, decision.state.last_move
    move = trial.move if trial is not None else last
    return () if move is None else (Moved(knob=str(move.knob), before=move.before, after=move.after),)


def _differences(limits: Limits, evidence: Sequence[PodEvidence]) -> tuple[Moved, ...]:
    """Return what ``limits`` changes, each limit once, as the first replica that has another value has it."""
    found: dict[str, Moved] = {}
    for target in (pod.evidence.target for pod in evidence if pod.evidence is not None):
        for name in limits.__struct_fields__:
            before, after = getattr(target, name), getattr(limits, name)
            if before != after:
                found.setdefault(name, Moved(knob=name, before=before, after=after))
    return tuple(found.values())

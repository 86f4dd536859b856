"""What the slow loop knew before it was restarted, found again from the replicas and from what was left for it. Pure."""

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct, structs

from flyball_operator.tuning.evidence import PodEvidence
from flyball_operator.tuning.knobs import Knob
from flyball_operator.tuning.situation import MIN_EVIDENCE
from flyball_operator.tuning.state import Direction, Move, Trial, TunerState, finite
from flyball_protocol import BootPrior, Evidence, Limits


class Memory(Struct, frozen=True, kw_only=True):
    """What an earlier slow loop wrote down outside the replicas.

    Attributes:
        revision: the newest it set anywhere; revisions go on above it.
        trying: whether its last change was one on trial, under that revision.
        tuned: whether limits were moved since they last were what the spec says.
        change_age_s: seconds since its last change, None when it made none.
        kv_moves: changes of the KV share, which has cool-downs of its own; ``at_s`` is relative to now, so below 0.
        prior: the limits it left for new replicas.
    """

    revision: int = 0
    trying: bool = False
    tuned: bool = False
    change_age_s: float | None = None
    kv_moves: tuple[Move, ...] = ()
    prior: BootPrior | None = None


def recover(memory: Memory, evidence: Sequence[PodEvidence], *, now_s: float) -> TunerState | None:
    """Return where to go on; None while too few replicas answer to know.

    A single replica ahead of the others has a change on trial, if the memory says so or does not know its revision: the
    trial goes on, with a new window. Otherwise who is behind has missed a change.
    """
    answered = {pod.pod: pod.evidence for pod in evidence if pod.evidence is not None}
    if not answered or len(answered) < MIN_EVIDENCE * len(evidence):
        return None
    kv_moves = tuple(structs.replace(one, at_s=now_s + one.at_s) for one in memory.kv_moves)
    trial = _trial(memory, answered, now_s)
    if trial is not None:
        return TunerState(revision=trial.before_revision, limits=trial.before, trial=trial, moves=kv_moves, tuned=True)
    newest = max(answered.values(), key=lambda one: one.revision)
    revision, limits = newest.revision, newest.target
    if memory.prior is not None and memory.prior.revision > revision:
        revision, limits = memory.prior.revision, memory.prior.limits
    revision = max(revision, memory.revision)
    if revision == 0:
        return TunerState()
    moves = (*kv_moves, *_last_change(memory, limits, now_s))
    prior = memory.prior
    settled = prior is not None and (prior.revision, prior.limits) == (
        revision,
        limits,
    )  # only settled limits get there
    return TunerState(revision=revision, limits=limits, moves=moves, tuned=memory.tuned, settled=settled)


def _trial(memory: Memory, answered: dict[str, Evidence], now_s: float) -> Trial | None:
    (canary, newest), *others = sorted(answered.items(), key=lambda item: -item[1].revision)
    known = memory.revision if memory.prior is None else max(memory.revision, memory.prior.revision)
    is_trial = newest.revision > known or (memory.trying and newest.revision == memory.revision)
    if not is_trial or not others or others[0][1].revision == newest.revision:
        return None
    before, before_revision = _in_force([one for _, one in others])
    changed = [knob for knob in Knob if knob.of(newest.target) != knob.of(before)]
    if not changed:
        return None
    return Trial(
        canary=canary,
        move=_move(changed[0], before, newest.target, now_s),
        limits=newest.target,
        revision=newest.revision,
        before=before,
        before_revision=before_revision,
        started_s=now_s,
    )


def _in_force(others: Sequence[Evidence]) -> tuple[Limits, int]:
    """Return the limits that most have; of several, the newest."""
    counts = Counter((one.target, one.revision) for one in others)
    return max(counts, key=lambda found: (counts[found], found[1]))


def _move(knob: Knob, before: Limits, after: Limits, now_s: float) -> Move:
    low, high = knob.of(before), knob.of(after)
    direction = Direction.RAISE if high > low else Direction.CUT
    return Move(knob=knob, direction=direction, before=finite(low), after=finite(high), at_s=now_s)


def _last_change(memory: Memory, limits: Limits, now_s: float) -> tuple[Move, ...]:
    """Stand in for the last change, so that its evidence settles and its cool-down passes before the next."""
    if memory.change_age_s is None:
        return ()
    knob, at_s = Knob.MAX_NUM_SEQS, now_s - memory.change_age_s
    value = knob.of(limits)
    return (Move(knob=knob, direction=Direction.CLAMP, before=value, after=value, at_s=at_s),)

"""Modes in which tuning moves nothing: the replicas have what the spec says. Pure."""

from collections.abc import Sequence

from flyball_operator.spec import LiveLimits, Tuning
from flyball_operator.tuning.decision import Action, Decision, Reason
from flyball_operator.tuning.evidence import PodEvidence, tightest
from flyball_operator.tuning.knobs import Knob, in_words, same
from flyball_operator.tuning.situation import cannot_decide
from flyball_operator.tuning.state import TunerState
from flyball_protocol import Envelope, Limits, LimitsChange


def as_change(limits: LiveLimits) -> LimitsChange:
    """Return the limits of the spec in the runtime's units; those left out are None."""
    percent, target_ms = limits.kv_cache_percent, limits.step_time_target_milliseconds
    return LimitsChange(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        kv_cache_fraction=None if percent is None else percent / 100,
        step_time_target_ms=None if target_ms is None else float(target_ms),
    )


def base_limits(tuning: Tuning, envelope: Envelope) -> Limits:
    """Return the limits that the spec says: all of the envelope, but for what ``tuning.limits`` sets."""
    whole = Limits(
        max_num_seqs=envelope.max_num_seqs,
        max_num_batched_tokens=envelope.max_num_batched_tokens,
        kv_cache_fraction=1.0,
    )
    return as_change(tuning.limits).applied_to(whole)


def restore(tuning: Tuning, state: TunerState, evidence: Sequence[PodEvidence]) -> Decision:
    """Bring every replica to what the spec says, and hold it there, without a lease."""
    answered = {one.pod: one.evidence for one in evidence if one.evidence is not None}
    if not answered:
        return cannot_decide(state, evidence, {one.pod: one.problem or "no answer" for one in evidence})
    wanted = base_limits(tuning, tightest([one.envelope for one in answered.values()]))
    newest = max(state.revision, *(one.revision for one in answered.values()))
    others = sorted(pod for pod, one in answered.items() if not same(one.target, wanted))
    listed = ", ".join(f"{knob} {in_words(knob, knob.of(wanted))}" for knob in Knob)
    is_new = state.trial is not None or not state.settled or state.limits is None or not same(state.limits, wanted)
    if others and (is_new or newest > state.revision):
        return Decision(
            action=Action.RESTORE,
            reason=Reason.TUNING_OFF,
            why=f"mode {tuning.mode}: every replica gets what the spec says ({listed})",
            limits=wanted,
            revision=newest + 1,
            state=TunerState(revision=newest + 1, limits=wanted, settled=True, tuned=True),
        )
    where = f"not yet at {', '.join(others)}" if others else "in force everywhere"
    return Decision(
        action=Action.HOLD,
        reason=Reason.TUNING_OFF,
        why=f"what the spec says ({listed}) is {where}",
        limits=wanted,
        revision=newest,
        state=TunerState(revision=newest, limits=wanted, settled=True, tuned=bool(others)),
    )

"""What the replicas reported, checked and pooled into one view of the deployment."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from msgspec import Struct

from flyball_protocol import Envelope, Evidence, LatencyWindow, Limits
from flyball_simulation.baselines.rules.state import TunerState


class PodEvidence(Struct, frozen=True, kw_only=True):
    """What one ready replica answered.

    Attributes:
        pod: its name.
        evidence: None when it did not answer; ``problem`` then says why.
        age_s: seconds since it was read.
    """

    pod: str
    evidence: Evidence | None = None
    age_s: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class Pooled:
    """The replicas taken together.

    Attributes:
        limits, revision: what should be in force: the newest revision that a replica reports or that was decided before.
        in_step: whether every replica that reports this revision also has these limits.
        envelope: the tightest of all.
        ttft, itl: one window per replica.
        blocked_by: share of steps by reason, over all replicas.
        recomputed_share: computed tokens thrown away by preemption, as a share of all computed tokens.
        window_s: the longest window reported.
        num_waiting: requests queued now, over all replicas.
    """

    limits: Limits
    revision: int
    in_step: bool
    envelope: Envelope
    ttft: tuple[LatencyWindow, ...]
    itl: tuple[LatencyWindow, ...]
    blocked_by: dict[str, float]
    recomputed_share: float
    window_s: float
    num_waiting: int


def fault(pod: PodEvidence, *, max_age_s: float, min_uptime_s: float) -> str | None:
    """Return why ``pod`` cannot be decided on, or None when it can."""
    evidence = pod.evidence
    if evidence is None:
        return pod.problem or "no answer"
    if pod.age_s > max_age_s:
        return f"evidence is {pod.age_s:.0f} s old, more than {max_age_s:.0f} s"
    if evidence.draining or not evidence.ready:
        return "draining" if evidence.draining else "not ready"
    if evidence.uptime_s < min_uptime_s:
        return f"up for {evidence.uptime_s:.0f} s only"
    if not (_consistent(evidence.ttft) and _consistent(evidence.itl)):
        return "latency buckets that contradict themselves"
    if not all(0 <= share <= 1 for share in evidence.blocked_by.values()):
        return "blocked_by shares outside 0 to 1"
    return None


def pool(evidence: Sequence[Evidence], state: TunerState) -> Pooled:
    """Pool the evidence of at least one replica."""
    newest = max(evidence, key=lambda one: one.revision)
    limits, revision = newest.target, newest.revision
    if state.limits is not None and state.revision >= revision:
        limits, revision = state.limits, state.revision
    steps = sum(one.num_steps for one in evidence)
    reasons = sorted({reason for one in evidence for reason in one.blocked_by})
    computed = sum(one.num_prompt_tokens + one.num_generated_tokens + one.num_recomputed_tokens for one in evidence)
    return Pooled(
        limits=limits,
        revision=revision,
        in_step=all(one.target == limits for one in evidence if one.revision == revision),
        envelope=tightest([one.envelope for one in evidence]),
        ttft=tuple(one.ttft for one in evidence),
        itl=tuple(one.itl for one in evidence),
        blocked_by={
            reason: sum(one.blocked_by.get(reason, 0.0) * one.num_steps for one in evidence) / max(1, steps)
            for reason in reasons
        },
        recomputed_share=sum(one.num_recomputed_tokens for one in evidence) / max(1, computed),
        window_s=max(min(one.window_s, one.uptime_s) for one in evidence),
        num_waiting=sum(one.num_waiting for one in evidence),
    )


def tightest(envelopes: Sequence[Envelope]) -> Envelope:
    """Return the envelope of limits that every replica can take."""
    return Envelope(
        max_num_seqs=min(one.max_num_seqs for one in envelopes),
        max_num_batched_tokens=min(one.max_num_batched_tokens for one in envelopes),
        min_num_batched_tokens=max(one.min_num_batched_tokens for one in envelopes),
        num_kv_blocks=min(one.num_kv_blocks for one in envelopes),
        min_kv_cache_fraction=max(one.min_kv_cache_fraction for one in envelopes),
        block_size=max(one.block_size for one in envelopes),
        max_model_len=min(one.max_model_len for one in envelopes),
    )


def _consistent(window: LatencyWindow) -> bool:
    return (
        len(window.counts) == len(window.edges_s) + 1
        and all(count >= 0 for count in window.counts)
        and all(low < high for low, high in pairwise(window.edges_s))
    )

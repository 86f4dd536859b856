"""What the replicas reported: checked one by one, then those that are alike pooled into one view of the deployment."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from flyball_operator.tuning.signals import Counts, counts_of, total
from flyball_protocol import EVIDENCE_VERSION, Envelope, Evidence, LatencyWindow, Limits, LimitsAck, Objectives, Share

MAX_AGE_INTERVALS = 3


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
class Posted:
    """What became of an update at one replica: its answer, or the problem that kept it from answering."""

    pod: str
    ack: LimitsAck | None
    problem: str = ""


class StepCounts(NamedTuple):
    """What a step computes; see ``StepModel.predict``."""

    prefill_tokens: int
    decodes: int
    context_tokens: int
    attention_pairs: int


class Seen(Struct, frozen=True):
    """A replica as an earlier round found it, to notice numbers that go back.

    Attributes:
        step: its mean step when its step model had first settled, None before.
        step_s: what its step model said of that step, followed slowly since.
    """

    pod: str
    boot_id: str
    uptime_s: float
    step: StepCounts | None = None
    step_s: float = 0.0


@dataclass(frozen=True)
class Pooled:
    """Replicas of one model and one template, taken together.

    Attributes:
        envelope: the tightest of all.
        counts: against the objectives, of the replicas that count against the ones in force.
        counted_s: for how long they have, the shortest time of all.
        blocked_by: share of steps by reason, over all replicas.
        recomputed_share: computed tokens thrown away by preemption, as a share of all computed tokens.
        window_s: the longest window reported.
        arrivals_per_s: requests that one replica gets, on average.
    """

    envelope: Envelope
    counts: Counts
    counted_s: float
    blocked_by: dict[str, float]
    recomputed_share: float
    window_s: float
    arrivals_per_s: float


def family(evidence: Evidence) -> str:
    """Return what replicas must have in common to be pooled: model and template."""
    return f"{evidence.model}/{evidence.template}"


def largest_family(evidence: Sequence[PodEvidence], known: str) -> str:
    """Return the family of most replicas; of several, the one that is ``known``."""
    counts = Counter(family(one.evidence) for one in evidence if one.evidence is not None)
    return max(counts, key=lambda one: (counts[one], one == known, one), default=known)


def of_one_family(evidence: Sequence[PodEvidence], known: str) -> tuple[str, list[PodEvidence], tuple[str, ...]]:
    """Return the largest family, its replicas with those that did not answer, and the names of the others."""
    kind = largest_family(evidence, known)
    strangers = tuple(one.pod for one in evidence if one.evidence is not None and family(one.evidence) != kind)
    return kind, [one for one in evidence if one.pod not in strangers], strangers


def mean_step(evidence: Evidence) -> StepCounts | None:
    """Return what a replica computed in a mean step of its window, by the mean of its requests; None if it computed nothing."""
    num_steps, lengths = evidence.num_steps, evidence.lengths
    if num_steps == 0 or lengths is None:
        return None
    num_prompts = evidence.num_prompt_tokens / max(1.0, lengths.prompt_tokens) / num_steps
    decodes = max(1, round(evidence.num_generated_tokens / num_steps))
    return StepCounts(
        prefill_tokens=round(num_prompts * lengths.computed_prompt_tokens),
        decodes=decodes,
        context_tokens=round(decodes * lengths.context_tokens),
        attention_pairs=round(num_prompts * lengths.computed_prompt_tokens_squared / 2),
    )


LONE_DECODE = StepCounts(0, 1, 0, 0)


def common_step(evidence: Iterable[Evidence]) -> StepCounts:
    """Return a step by which replicas can be compared: it has no more of anything than the mean step of each of them.

    A step model says little about larger steps than it has learned from: one of short prompts may be far off for long ones.
    Without any steps, it is a lone decode.
    """
    steps = [step for one in evidence if (step := mean_step(one)) is not None]
    return StepCounts(*map(min, zip(*steps, strict=True))) if steps else LONE_DECODE


def find_faults(
    evidence: Sequence[PodEvidence],
    *,
    interval_s: float,
    seen: Mapping[str, Seen] | None = None,
    min_uptime_s: float | None = None,
) -> dict[str, str]:
    """Return why replicas cannot be decided on, by their names; those that can be are left out.

    Args:
        min_uptime_s: younger ones say too little; by default an interval.
    """
    seen = seen or {}
    least_s = interval_s if min_uptime_s is None else min_uptime_s
    found = {
        pod.pod: fault(pod, max_age_s=MAX_AGE_INTERVALS * interval_s, min_uptime_s=least_s, before=seen.get(pod.pod))
        for pod in evidence
    }
    return {pod: why for pod, why in found.items() if why}


def fault(pod: PodEvidence, *, max_age_s: float, min_uptime_s: float, before: Seen | None = None) -> str | None:
    """Return why ``pod`` cannot be decided on, or None when it can."""
    evidence = pod.evidence
    if evidence is None:
        return pod.problem or "no answer"
    if evidence.version != EVIDENCE_VERSION:
        return f"evidence of version {evidence.version}; this operator reads version {EVIDENCE_VERSION}"
    if (number := _impossible_number(msgspec.to_builtins(evidence), "evidence")) is not None:
        return number
    if not pod.age_s <= max_age_s:
        return f"evidence is {pod.age_s:.0f} s old, more than {max_age_s:.0f} s"
    if evidence.draining or not evidence.ready:
        return "draining" if evidence.draining else "not ready"
    if evidence.uptime_s < min_uptime_s:
        return f"up for {evidence.uptime_s:.0f} s only"
    return _contradiction(evidence) or _step_back(evidence, before)


_SIGNED = frozenset({"evidence.step_model.covariance"})


def _impossible_number(value: Any, path: str) -> str | None:
    """Return a sentence on the first number that is no count, size or time: NaN, infinite or negative."""
    if isinstance(value, dict):
        parts = ((one, f"{path}.{key}") for key, one in value.items())
    elif isinstance(value, (list, tuple)):
        parts = ((one, path) for one in value)
    else:
        is_bad = isinstance(value, (int, float)) and not (math.isfinite(value) and (value >= 0 or path in _SIGNED))
        return f"{path} is {value}, which is no possible value" if is_bad else None
    return next((why for one, at in parts if (why := _impossible_number(one, at)) is not None), None)


def _contradiction(evidence: Evidence) -> str | None:
    if not all(_consistent(one) for one in (evidence.ttft, evidence.itl, evidence.e2e)):
        return "latency buckets that contradict themselves"
    if not all(share <= 1 for share in evidence.blocked_by.values()):
        return "blocked_by shares outside 0 to 1"
    counts = evidence.objective_counts
    if counts is not None and not all(_possible(one) for one in (counts.ttft, counts.itl, counts.gaps, counts.steps)):
        return "more samples over an objective than there are"
    return None


def _step_back(evidence: Evidence, before: Seen | None) -> str | None:
    if before is None or before.boot_id != evidence.boot_id or evidence.uptime_s >= before.uptime_s:
        return None
    return f"its clock went back, from {before.uptime_s:.0f} s up to {evidence.uptime_s:.0f} s"


def _possible(share: Share) -> bool:
    return share.num_over <= share.num


def _consistent(window: LatencyWindow) -> bool:
    return len(window.counts) == len(window.edges_s) + 1 and all(low < high for low, high in pairwise(window.edges_s))


def pool(evidence: Sequence[Evidence], objectives: Objectives) -> Pooled:
    """Pool the evidence of at least one replica."""
    steps = sum(one.num_steps for one in evidence)
    reasons = sorted({reason for one in evidence for reason in one.blocked_by})
    computed = sum(one.num_prompt_tokens + one.num_generated_tokens + one.num_recomputed_tokens for one in evidence)
    counted = [one.objective_counts for one in evidence if counts_against(one, objectives)]
    return Pooled(
        envelope=tightest([one.envelope for one in evidence]),
        counts=total(counts_of(one) for one in counted if one is not None),
        counted_s=min((one.since_s for one in counted if one is not None), default=0.0),
        blocked_by={
            reason: sum(one.blocked_by.get(reason, 0.0) * one.num_steps for one in evidence) / max(1, steps)
            for reason in reasons
        },
        recomputed_share=sum(one.num_recomputed_tokens for one in evidence) / max(1, computed),
        window_s=max(min(one.window_s, one.uptime_s) for one in evidence),
        arrivals_per_s=sum(one.num_arrived / max(1.0, min(one.window_s, one.uptime_s)) for one in evidence)
        / len(evidence),
    )


def counts_against(evidence: Evidence, objectives: Objectives) -> bool:
    """Return whether a replica counts against these objectives."""
    return evidence.objective_counts is not None and evidence.objective_counts.objectives == objectives


def in_force(evidence: Sequence[Evidence], revision: int, limits: Limits | None) -> tuple[int, Limits]:
    """Return the newest revision that a replica reports or that was decided before, and its limits."""
    newest = max(evidence, key=lambda one: one.revision)
    if limits is not None and revision >= newest.revision:
        return revision, limits
    return newest.revision, newest.target


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

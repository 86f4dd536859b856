"""What a runtime has observed and learned: evidence for the operator's slow loop, and what a new replica starts with."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from flyball_protocol.limits import Envelope, Limits, Objectives, Revision

EVIDENCE_VERSION = 2
"""Grows when a field changes its meaning or goes. Fields that are added leave it as it is."""

FIXED_SHARE = 0.2
"""Of an efficient step's time, this share at most does not depend on what is computed."""

NonNegative = Annotated[float, Meta(ge=0)]


class LatencyWindow(Struct, frozen=True, kw_only=True):
    """Latency samples of the window, in seconds.

    Attributes:
        count: number of samples; the quantiles are None when it is 0.
        p50_s, p95_s, p99_s: exact quantiles of the samples kept.
        edges_s: upper bucket edges, ascending; the last bucket (above the last edge) has no entry here.
        counts: samples per bucket (not cumulative), ``len(edges_s) + 1`` entries.
    """

    count: int
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    edges_s: tuple[float, ...]
    counts: tuple[int, ...]


class KVBlocks(Struct, frozen=True, kw_only=True):
    """KV blocks by state: ``free + used + cached == total``; at most ``capacity`` of them may be used or cached."""

    total: int
    capacity: int
    free: int
    used: int
    cached: int


class Lengths(Struct, frozen=True, kw_only=True):
    """Lengths in tokens of the requests that finished lately; older ones count less and less.

    Attributes:
        num_requests: how many the means rest on, in effect.
        prompt_tokens, output_tokens: means per request.
        computed_prompt_tokens: mean of what was left to compute after the prefix cache.
        computed_prompt_tokens_squared: mean of its square.
        output_tokens_p95: 95th percentile.
        context_tokens: mean context of a decoding sequence at a moment, ``E[o * (i + o / 2)] / E[o]``: long ones weigh more.
    """

    num_requests: float
    prompt_tokens: float
    computed_prompt_tokens: float
    computed_prompt_tokens_squared: float
    output_tokens: float
    output_tokens_p95: float
    context_tokens: float


class Share(Struct, frozen=True, kw_only=True):
    """``num_over`` of ``num`` samples were over their objective."""

    num: int
    num_over: int


class ObjectiveCounts(Struct, frozen=True, kw_only=True):
    """Exact counts against the objectives posted last: over the window, or since they or other limits came if that is shorter.

    What has no objective has no samples.

    Attributes:
        since_s: seconds since these objectives, or limits under another revision, were posted.
        ttft: requests that got their first token.
        itl: requests that ended with two tokens or more, by the 95th percentile of their own gaps.
        gaps: gaps between two tokens of a request.
        steps: steps that brought running requests their next tokens, by the longest of those gaps: the gaps of one step are
            long together, so they are one sample.
    """

    objectives: Objectives
    since_s: float
    ttft: Share
    itl: Share
    gaps: Share
    steps: Share


class MemoryState(Struct, frozen=True, kw_only=True):
    """Memory of a replica.

    Attributes:
        pool_bytes: of the KV blocks that there is memory for now.
        pool_max_bytes: of the most KV blocks that live limits may ask for.
        process_bytes: resident memory of the engine process, and of the API process.
        limit_bytes: the lowest limit of a cgroup around them; None without one.
        available_bytes: what these processes may still take from the machine or their cgroups.
        pressure: share of the last 10 s in which some task stalled for memory (PSI), 0 to 1; None if the kernel does not say.
        device_free_bytes: free memory of the GPU; None on a CPU.
    """

    pool_bytes: int
    pool_max_bytes: int
    process_bytes: int
    limit_bytes: int | None = None
    available_bytes: int | None = None
    pressure: float | None = None
    device_free_bytes: int | None = None


class HitPoint(Struct, frozen=True, kw_only=True):
    """A pool of ``num_blocks`` KV blocks would have found this share (0 to 1) of the prompt tokens looked up."""

    num_blocks: int
    share: float


class StepModel(Struct, frozen=True, kw_only=True):
    """A model of the step time, learned by a runtime from the steps it took. Times are seconds.

    Attributes:
        base_s: of any step.
        token_s: of each token above the knee, prompt or decode.
        knee_tokens: tokens that a step computes for no more than its base (it reads all weights in any case).
        context_token_s: of each cached token that a decode reads.
        attention_pair_s: of each pair of a prompt token and a token that it attends to.
        interaction_s: of each pair of a prompt token and a decode in the same step.
        residual_p50, residual_p95: quantiles of ``|measured - predicted| / predicted`` over recent steps, each predicted
            before it was learned from; None before the first.
        num_steps: learned from.
        covariance: of the seconds for (a step, 256 tokens, 2**16 context tokens, 2**18 pairs), upper triangle, row by row, if
            steps differ by 100 % from what is predicted: multiply it by the square of their relative error. Empty if unknown.
        settled: whether the predictions can be planned with.
        interrupted_share: share of recent steps that took far longer than predicted, as if something had interrupted them: a
            CPU limit, another process. Predictions and residuals are of the others.
        interruption_s: median of how much longer those took, 0 without any.
    """

    base_s: NonNegative
    token_s: NonNegative
    knee_tokens: NonNegative = 0.0
    context_token_s: NonNegative = 0.0
    attention_pair_s: NonNegative = 0.0
    interaction_s: NonNegative = 0.0
    residual_p50: NonNegative | None = None
    residual_p95: NonNegative | None = None
    num_steps: Annotated[int, Meta(ge=0)] = 0
    covariance: tuple[float, ...] = ()
    settled: bool = False
    interrupted_share: NonNegative = 0.0
    interruption_s: NonNegative = 0.0

    @property
    def efficient_s(self) -> float:
        """Seconds of the shortest step that is efficient; shorter ones cost throughput. See FIXED_SHARE."""
        return self.base_s / FIXED_SHARE

    def predict(self, prefill_tokens: int, decodes: int, context_tokens: int, attention_pairs: int) -> float:
        """Return the seconds that a step takes; it never falls when an argument grows.

        Args:
            prefill_tokens: P, prompt tokens.
            decodes: D, sequences that get their next token.
            context_tokens: K, tokens in the cache that the decodes read, their own included.
            attention_pairs: Q, pairs of a prompt token and a token that it attends to.
        """
        above = prefill_tokens + decodes - self.knee_tokens
        return (
            self.base_s
            + (self.token_s * above if above > 0.0 else 0.0)
            + self.context_token_s * context_tokens
            + self.attention_pair_s * attention_pairs
            + self.interaction_s * prefill_tokens * decodes
        )


class Evidence(Struct, frozen=True, kw_only=True):
    """Body of ``GET /admin/evidence``. Counts and shares cover the last ``window_s`` seconds.

    Read it with ``decode_evidence``. None and an empty tuple mean "not known yet".

    Attributes:
        model: served model name.
        boot_id: differs between any two starts of a runtime.
        template: which template of the deployment this replica was started from (FLYBALL_TEMPLATE); "" if it was not told.
        key: what step times depend on, ``model/dtype/device/version``; a draft model is named behind the model. Models of
            runtimes with another key do not fit.
        uptime_s: seconds since the runtime became ready.
        num_arrived: requests accepted, and those refused because the queue was full.
        ttft, itl, e2e: arrival to first token, gap between two tokens, arrival to last token.
        blocked_by: share of steps (0 to 1) by why the head of the queue was not admitted: none, seqs, kv, reserve,
            budget, step_time.
        num_preemptions, num_recomputed_tokens: preemptions, and computed tokens thrown away by them.
        step_time_p50_s, step_time_p95_s: duration of one engine step, None without steps.
        step_model: what the runtime has learned of its step time.
        objective_counts: None until objectives are posted.
        prefix_hits: what larger and smaller pools would find in the prefix cache, by size.
    """

    version: int = EVIDENCE_VERSION
    model: str
    boot_id: str
    template: str
    key: str
    uptime_s: float
    window_s: float
    ready: bool
    draining: bool
    revision: int
    target: Limits
    effective: Limits
    envelope: Envelope
    num_running: int
    num_waiting: int
    num_arrived: int
    num_finished: int
    num_failed: int
    ttft: LatencyWindow
    itl: LatencyWindow
    e2e: LatencyWindow
    blocked_by: dict[str, float]
    kv_blocks: KVBlocks
    num_prompt_tokens: int
    num_generated_tokens: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_steps: int
    step_time_p50_s: float | None
    step_time_p95_s: float | None
    step_model: StepModel | None = None
    lengths: Lengths | None = None
    objective_counts: ObjectiveCounts | None = None
    memory: MemoryState | None = None
    prefix_hits: tuple[HitPoint, ...] = ()


class _Version(Struct, frozen=True):
    version: int = 1  # the first one did not say


def decode_evidence(body: bytes) -> Evidence:
    """Decode the body of an answer.

    Raises:
        msgspec.DecodeError: it is no evidence, or of a version that this side does not read.
    """
    version = msgspec.json.decode(body, type=_Version).version
    if version != EVIDENCE_VERSION:
        raise msgspec.ValidationError(
            f"evidence of version {version}; version {EVIDENCE_VERSION} can be read here. "
            "Update the runtime and the operator to the same release."
        )
    return msgspec.json.decode(body, type=Evidence)


class BootPrior(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Content of the file that ``flyball serve --boot-prior`` reads: limits that served well, and their revision.

    Attributes:
        revision: in force from the start, so that older ones are stale.
        step_model: what a replica of this deployment has learned of its step time.
        key: of the replica that learned it (``Evidence.key``). A runtime of another key does not use the model.
    """

    revision: Revision
    limits: Limits
    step_model: StepModel | None = None
    key: str = ""

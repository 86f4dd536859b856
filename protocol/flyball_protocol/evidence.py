"""Evidence: what a runtime observed over its last window, read by the operator's slow loop."""

from msgspec import Struct

from flyball_protocol.limits import Envelope, Limits


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


class Evidence(Struct, frozen=True, kw_only=True):
    """Body of ``GET /admin/evidence``. Counts and shares cover the last ``window_s`` seconds.

    Attributes:
        model: served model name.
        uptime_s: seconds since the runtime became ready.
        ttft, itl, e2e: arrival to first token, gap between two tokens, arrival to last token.
        blocked_by: share of steps (0 to 1) by why the head of the queue was not admitted: none, seqs, kv, budget, step_time.
        num_preemptions, num_recomputed_tokens: preemptions, and computed tokens thrown away by them.
        step_time_p50_s, step_time_p95_s: duration of one engine step, None without steps.
    """

    model: str
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

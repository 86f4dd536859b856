"""Evidence of a make-believe replica."""

from typing import Any

from flyball_operator.spec import Bounds, Objectives, Tuning
from flyball_operator.tuning import PodEvidence
from flyball_protocol import Envelope, Evidence, KVBlocks, LatencyWindow, Limits

EDGES_S = (0.01, 0.02, 0.04, 0.08, 0.5, 1.0, 2.0, 4.0)
TUNING = Tuning(
    mode="Auto",
    interval_seconds=15,
    cooldown_seconds=60,
    min_samples=100,
    max_step_percent=25,
    objectives=Objectives(ttft_p95_milliseconds=1000, inter_token_latency_p95_milliseconds=40),
    bounds=Bounds(),
)
LIMITS = Limits(max_num_seqs=64, kv_cache_fraction=0.8, max_num_batched_tokens=512)
ENVELOPE = Envelope(
    max_num_seqs=128,
    max_num_batched_tokens=2048,
    min_num_batched_tokens=16,
    num_kv_blocks=1000,
    min_kv_cache_fraction=0.1,
    block_size=16,
    max_model_len=1024,
)


def window(objective_s: float, *, over: int, within: int) -> LatencyWindow:
    """Return a window with ``over`` samples above the edge ``objective_s`` and ``within`` below it."""
    counts = [0] * (len(EDGES_S) + 1)
    at = EDGES_S.index(objective_s)
    counts[at], counts[at + 1] = within, over
    return LatencyWindow(count=over + within, p50_s=0.0, p95_s=0.0, p99_s=9.0, edges_s=EDGES_S, counts=tuple(counts))


def make_evidence(
    *,
    ttft_over: int = 0,
    ttft_count: int = 1000,
    itl_over: int = 0,
    itl_count: int = 20000,
    blocked_by: dict[str, float] | None = None,
    limits: Limits = LIMITS,
    **changes: Any,
) -> Evidence:
    fields: dict[str, Any] = {
        "model": "demo",
        "boot_id": "b1",
        "template": "t1",
        "key": "demo/bfloat16/cpu/1",
        "uptime_s": 600.0,
        "window_s": 60.0,
        "ready": True,
        "draining": False,
        "revision": 3,
        "target": limits,
        "effective": limits,
        "envelope": ENVELOPE,
        "num_running": 10,
        "num_waiting": 2,
        "num_arrived": 1000,
        "num_finished": 1000,
        "num_failed": 0,
        "ttft": window(1.0, over=ttft_over, within=ttft_count - ttft_over),
        "itl": window(0.04, over=itl_over, within=itl_count - itl_over),
        "e2e": window(4.0, over=0, within=100),
        "blocked_by": {"none": 1.0} if blocked_by is None else blocked_by,
        "kv_blocks": KVBlocks(total=1000, capacity=800, free=500, used=400, cached=100),
        "num_prompt_tokens": 100_000,
        "num_generated_tokens": 20_000,
        "num_prefix_queried_tokens": 0,
        "num_prefix_hit_tokens": 0,
        "num_preemptions": 0,
        "num_recomputed_tokens": 0,
        "num_steps": 2000,
        "step_time_p50_s": 0.01,
        "step_time_p95_s": 0.03,
    }
    return Evidence(**(fields | changes))


def pods(*evidence: Evidence | None) -> list[PodEvidence]:
    return [
        PodEvidence(pod=f"replica {i}", evidence=one, problem="" if one else "no answer in 2.0 s")
        for i, one in enumerate(evidence, 1)
    ]

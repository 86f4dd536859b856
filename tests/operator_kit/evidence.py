"""Evidence of a make-believe replica."""

from typing import Any

from flyball_operator.spec import Bounds, Objectives, Tuning
from flyball_operator.tuning import PodEvidence
from flyball_protocol import (
    Envelope,
    Evidence,
    KVBlocks,
    LatencyWindow,
    Lengths,
    Limits,
    ObjectiveCounts,
    Share,
    StepModel,
)
from flyball_protocol import (
    Objectives as PostedObjectives,
)

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
POSTED = PostedObjectives(ttft_s=1.0, itl_s=0.04)
MODEL = StepModel(
    base_s=0.010,
    token_s=6e-5,
    context_token_s=8e-8,
    attention_pair_s=3e-9,
    residual_p50=0.02,
    residual_p95=0.05,
    num_steps=5000,
    settled=True,
)
"""A step of 512 prompt tokens and 16 decodes with 1k tokens of context takes 43 ms."""

LENGTHS = Lengths(
    num_requests=300.0,
    prompt_tokens=1000.0,
    computed_prompt_tokens=1000.0,
    computed_prompt_tokens_squared=1.5e6,
    output_tokens=200.0,
    output_tokens_p95=400.0,
    context_tokens=1100.0,
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
    posted: PostedObjectives | None = POSTED,
    since_s: float = 5.0,
    **changes: Any,
) -> Evidence:
    """Return evidence in which so many of the gaps, and as many of the steps and requests, are over the objective.

    Args:
        posted: the objectives that it counts against.
        since_s: since when; a few seconds, so that a change need not be waited for.
    """
    share = itl_over / max(1, itl_count)
    counts = posted and ObjectiveCounts(
        objectives=posted,
        since_s=since_s,
        ttft=Share(num=ttft_count, num_over=ttft_over),
        itl=Share(num=itl_count // 20, num_over=round(share * (itl_count // 20))),
        gaps=Share(num=itl_count, num_over=itl_over),
        steps=Share(num=itl_count // 10, num_over=round(share * (itl_count // 10))),
    )
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
        "objective_counts": counts,
    }
    return Evidence(**(fields | changes))


def pods(*evidence: Evidence | None) -> list[PodEvidence]:
    return [
        PodEvidence(pod=f"replica {i}", evidence=one, problem="" if one else "no answer in 2.0 s")
        for i, one in enumerate(evidence, 1)
    ]

"""What this runtime observed over its last window, for the operator's slow loop."""

from flyball_protocol import Evidence
from flyball_runtime.api.metrics import (
    E2E,
    GENERATION_TOKENS,
    ITL,
    PREEMPTIONS,
    PREFIX_HITS,
    PREFIX_QUERIED,
    PROMPT_TOKENS,
    RECOMPUTED,
    REQUESTS,
    STEP_DURATION,
    TTFT,
    Metrics,
)
from flyball_runtime.core.errors import EngineDead, NotReady
from flyball_runtime.engine.front import EngineFront


def build_evidence(front: EngineFront, metrics: Metrics) -> Evidence:
    """Evidence of this moment. ``num_finished`` counts stop and length, ``num_failed`` error; aborts are neither.

    Raises:
        NotReady: the engine has not reported yet.
        EngineDead: it will not report any more.
    """
    if front.dead_reason is not None:
        raise EngineDead(front.dead_reason)
    stats, first_step_s = metrics.latest, metrics.first_step_s
    if stats is None or first_step_s is None:
        raise NotReady
    recent, limits, steps = metrics.recent(), front.limits(), metrics.window(STEP_DURATION)
    return Evidence(
        model=metrics.model_name,
        uptime_s=metrics.clock.now() - first_step_s,
        window_s=metrics.window_s,
        ready=front.ready,
        draining=front.draining,
        revision=limits.revision,
        target=limits.target,
        effective=limits.effective,
        envelope=limits.envelope,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_finished=recent[REQUESTS, "stop"] + recent[REQUESTS, "length"],
        num_failed=recent[REQUESTS, "error"],
        ttft=metrics.window(TTFT),
        itl=metrics.window(ITL),
        e2e=metrics.window(E2E),
        blocked_by=metrics.blocked_by_shares(),
        kv_blocks=stats.kv_blocks,
        num_prompt_tokens=recent[PROMPT_TOKENS],
        num_generated_tokens=recent[GENERATION_TOKENS],
        num_prefix_queried_tokens=recent[PREFIX_QUERIED],
        num_prefix_hit_tokens=recent[PREFIX_HITS],
        num_preemptions=recent[PREEMPTIONS],
        num_recomputed_tokens=recent[RECOMPUTED],
        num_steps=steps.count,
        step_time_p50_s=steps.p50_s,
        step_time_p95_s=steps.p95_s,
    )

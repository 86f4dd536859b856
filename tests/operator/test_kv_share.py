"""The share of the KV pool: it follows what is needed and what memory there is."""

from typing import Any

import pytest
from msgspec import structs

from flyball_operator.tuning import Action, Decision, Reason, TunerState, decide
from flyball_operator.tuning.kv_share import ROOMY_S, knee, shortage
from flyball_protocol import Evidence, HitPoint, KVBlocks, Limits, MemoryState
from operator_kit.deployment import Deployment
from operator_kit.evidence import ENVELOPE, LENGTHS, LIMITS, MODEL, POSTED, TUNING, make_evidence, pods

NOW_S = 10_000.0
GIB = 1 << 30
PACED = structs.replace(LIMITS, step_time_target_ms=38.0)
HALF = structs.replace(PACED, kv_cache_fraction=0.5)
PLENTY = MemoryState(
    pool_bytes=4 * GIB,
    pool_max_bytes=8 * GIB,
    process_bytes=10 * GIB,
    limit_bytes=64 * GIB,
    available_bytes=40 * GIB,
    pressure=0.0,
)
TIGHT = structs.replace(PLENTY, available_bytes=2 * GIB)
STALLED = structs.replace(PLENTY, available_bytes=3 * GIB + GIB // 2, pressure=0.3)
BUSY = KVBlocks(total=1000, capacity=500, free=0, used=500, cached=0)
IDLE = KVBlocks(total=1000, capacity=800, free=780, used=20, cached=0)


def decided(limits: Limits = PACED, *, state: TunerState | None = None, **fields: Any) -> Decision:
    found = TunerState(revision=3, limits=limits, objectives=POSTED, settled=True, tuned=True, family="demo/t1")
    return decide(TUNING, state or found, pods(seen(limits, **fields)), now_s=NOW_S)


def seen(limits: Limits = PACED, **fields: Any) -> Evidence:
    return make_evidence(**({"limits": limits} | fields))


def test_it_grows_when_requests_wait_for_blocks_and_memory_is_there() -> None:
    decision = decided(HALF, memory=PLENTY, kv_blocks=BUSY, blocked_by={"kv": 0.5})
    assert (decision.action, decision.reason) == (Action.CHANGE, Reason.KV_BLOCKED)
    assert decision.limits == structs.replace(HALF, kv_cache_fraction=0.75)


@pytest.mark.parametrize("memory", [None, TIGHT, structs.replace(PLENTY, available_bytes=None)])
def test_it_does_not_grow_without_memory_that_is_known(memory: MemoryState | None) -> None:
    assert decided(HALF, memory=memory, kv_blocks=BUSY, blocked_by={"kv": 0.5}).reason is not Reason.KV_BLOCKED


def test_a_gpu_has_memory_of_its_own() -> None:
    on_gpu = structs.replace(PLENTY, device_free_bytes=1 * GIB)
    assert decided(HALF, memory=on_gpu, kv_blocks=BUSY, blocked_by={"kv": 0.5}).reason is Reason.STEADY


def test_under_memory_pressure_it_is_cut_and_memory_comes_back() -> None:
    decision = decided(memory=STALLED)
    assert (decision.action, decision.reason) == (Action.CHANGE, Reason.MEMORY_PRESSURE)
    assert decision.limits == structs.replace(PACED, kv_cache_fraction=0.64)
    assert "tasks stall for memory 30% of the time" in decision.why


@pytest.mark.parametrize(
    "memory",
    [
        structs.replace(PLENTY, pressure=0.3),
        structs.replace(TIGHT, pool_bytes=GIB // 16, pool_max_bytes=GIB // 16, pressure=0.3),
        structs.replace(STALLED, device_free_bytes=GIB),
    ],
    ids=["memory is available", "the pool is small beside what is left", "the pool is in the memory of a GPU"],
)
def test_it_is_left_alone_where_a_smaller_pool_would_not_help(memory: MemoryState) -> None:
    assert decided(memory=memory).reason is Reason.STEADY
    assert decided(HALF, memory=memory, kv_blocks=BUSY, blocked_by={"kv": 0.5}).reason is Reason.STEADY, "nor raised"


def test_it_is_never_cut_below_what_runs() -> None:
    decision = decided(HALF, memory=STALLED, kv_blocks=structs.replace(BUSY, used=480))
    assert (decision.action, decision.reason) == (Action.HOLD, Reason.MEMORY_PRESSURE)
    assert "what runs needs all of the KV pool" in decision.why
    some = decided(memory=STALLED, kv_blocks=structs.replace(IDLE, used=600))
    assert some.limits is not None and some.limits.kv_cache_fraction == 0.75


def test_nor_below_the_envelope() -> None:
    low = structs.replace(PACED, kv_cache_fraction=0.11)
    decision = decided(low, memory=STALLED, kv_blocks=structs.replace(IDLE, used=0))
    assert decision.limits is not None and decision.limits.kv_cache_fraction >= ENVELOPE.min_kv_cache_fraction


def test_an_idle_pool_gives_memory_back_after_half_an_hour() -> None:
    deployment = Deployment(lambda _: {"memory": PLENTY, "kv_blocks": IDLE, "num_running": 0})
    deployment.minutes(ROOMY_S / 60 - 1)
    assert deployment.limits.kv_cache_fraction == 1.0
    deployment.minutes(3)
    assert deployment.limits.kv_cache_fraction == 0.1
    assert ("change", "KVUnused") in deployment.changes


def test_prefixes_that_pay_are_kept() -> None:
    hits = (
        HitPoint(num_blocks=200, share=0.1),
        HitPoint(num_blocks=600, share=0.4),
        HitPoint(num_blocks=1000, share=0.41),
    )
    deployment = Deployment(lambda _: {"memory": PLENTY, "kv_blocks": IDLE, "prefix_hits": hits})
    deployment.minutes(ROOMY_S / 60 + 3)
    assert deployment.limits.kv_cache_fraction == 0.6, "the knee of the curve"


def test_the_knee_of_the_curve() -> None:
    assert knee(()) == 0
    assert knee((HitPoint(num_blocks=100, share=0.001), HitPoint(num_blocks=1000, share=0.005))) == 0
    assert knee((HitPoint(num_blocks=100, share=0.2), HitPoint(num_blocks=1000, share=0.5))) == 1000


def test_what_memory_is_short_of_is_told() -> None:
    assert shortage(PLENTY) is None
    assert shortage(TIGHT) == "2048 MiB are left of 65536 MiB"


def again(decision: Decision, after_s: float, **fields: Any) -> Decision:
    assert decision.limits is not None
    one = seen(decision.limits, revision=decision.revision, **fields)
    return decide(TUNING, structs.replace(decision.state, settled=True), pods(one), now_s=NOW_S + after_s)


GROWS: dict[str, Any] = {"memory": PLENTY, "kv_blocks": BUSY, "blocked_by": {"kv": 0.5}}


def test_after_a_raise_it_grows_again_once_what_waits_is_of_the_time_since() -> None:
    grown = decided(structs.replace(PACED, kv_cache_fraction=0.2), **GROWS)
    assert again(grown, 45, **GROWS).reason is not Reason.KV_BLOCKED
    assert again(grown, 60, **GROWS).reason is Reason.KV_BLOCKED


def test_after_a_cut_growing_waits_longer_than_shrinking() -> None:
    cut = decided(memory=STALLED)
    assert again(cut, 130, memory=STALLED).reason is Reason.MEMORY_PRESSURE
    assert again(cut, 290, **GROWS).reason is not Reason.KV_BLOCKED
    assert again(cut, 300, **GROWS).reason is Reason.KV_BLOCKED


SHORT_STEPS: dict[str, Any] = {
    "step_model": MODEL,
    "lengths": LENGTHS,
    "kv_blocks": BUSY,
    "blocked_by": {"step_time": 0.5},
}


def test_it_grows_where_steps_are_short_for_its_sake_and_first_tokens_late() -> None:
    """With short steps few requests wait for blocks, however small the pool is."""
    decision = decided(HALF, memory=PLENTY, ttft_over=500, **SHORT_STEPS)
    assert (decision.reason, "the KV pool is small" in decision.why) == (Reason.KV_BLOCKED, True)
    assert decided(HALF, memory=PLENTY, **SHORT_STEPS).reason is not Reason.KV_BLOCKED
    assert decided(HALF, memory=TIGHT, ttft_over=500, **SHORT_STEPS).reason is not Reason.KV_BLOCKED
    large = SHORT_STEPS | {"kv_blocks": KVBlocks(total=20_000, capacity=10_000, free=0, used=10_000, cached=0)}
    assert decided(HALF, memory=PLENTY, ttft_over=500, **large).reason is not Reason.KV_BLOCKED


def test_steps_that_are_shorter_than_suits_the_pool_are_made_longer_first() -> None:
    small = SHORT_STEPS | {
        "kv_blocks": KVBlocks(total=1000, capacity=1000, free=0, used=1000, cached=0),
        "num_arrived": 10,
    }
    for target_ms, reason in ((13.0, Reason.TTFT_OVER), (15.0, Reason.KV_BLOCKED)):
        limits = structs.replace(HALF, step_time_target_ms=target_ms)
        assert decided(limits, memory=PLENTY, ttft_over=500, **small).reason is reason


def test_while_it_may_soon_grow_the_limits_are_not_at_their_end() -> None:
    small = structs.replace(PACED, kv_cache_fraction=0.2, step_time_target_ms=14.0)
    late = {"ttft_over": 500, "num_arrived": 10} | SHORT_STEPS | {"blocked_by": {"kv": 0.5}}
    grown = decided(small, memory=PLENTY, **late)
    waiting = again(grown, 45, memory=PLENTY, **late)
    assert (grown.reason, waiting.reason) == (Reason.KV_BLOCKED, Reason.COOLING_DOWN)
    assert waiting.why.endswith("50% of steps waited for KV blocks; the next raise of the KV share may come in 15 s")
    assert again(grown, 45, memory=None, **late).reason is Reason.AT_LIMIT

"""The share of the KV pool that may be used: it gives memory back, and takes it again, without touching what runs. Pure.

A larger pool costs no latency, so this is no trade-off and no experiment: the share follows what is needed and what there is.
"""

from collections.abc import Container

from flyball_operator.tuning.decision import Decision, Reason
from flyball_operator.tuning.knobs import DEAD_BAND, Knob, towards
from flyball_operator.tuning.signals import Standing
from flyball_operator.tuning.situation import BINDING_SHARE, Situation
from flyball_operator.tuning.state import Direction
from flyball_protocol import Evidence, HitPoint, MemoryState

PRESSURE = 0.10
"""Share of time stalled for memory above which memory is given back."""

GUARD = 0.05
"""Share of the memory limit that stays free."""

PRESSED_CUT = 0.8
"""What one cut under memory pressure leaves, unless more is needed by what runs."""

RAISE = 1.5
GROWTH = 1.25
"""What runs now may need so many times its blocks soon."""

WORTH = 0.95
"""A pool is large enough for the prefix cache when it finds this share of what the largest would."""

LEAST_HITS = 0.01
ROOMY = 1.25
ROOMY_S = 1800.0
"""The pool is cut when it has been ``ROOMY`` times as large as needed for so long."""

RAISE_COOLDOWN_S, RAISE_AFTER_CUT_S, CUT_COOLDOWN_S = 60.0, 300.0, 120.0
"""After a raise, what requests wait for is of the time since then after a window; whether memory stays is known later."""


def under_pressure(now: Situation) -> Decision | None:
    """Give memory back while the system is short of it, where that helps."""
    memory = {pod: one.memory for pod, one in now.usable.items() if one.memory is not None and _would_help(one.memory)}
    pressed = {pod: why for pod, one in memory.items() if (why := shortage(one))}
    if not pressed:
        return None
    value = now.limits.kv_cache_fraction
    why = "; ".join(f"{pod}: {why}" for pod, why in sorted(pressed.items()))
    aim = max(needed_share(now), PRESSED_CUT * value)
    cut = towards(Knob.KV_CACHE_FRACTION, value, aim, now.spans[Knob.KV_CACHE_FRACTION], dead_band=0.02)
    if cut is None or cut > value:
        return now.hold(Reason.MEMORY_PRESSURE, f"{why}; what runs needs all of the KV pool; add memory or replicas")
    if (left_s := _cooldown_s(now, CUT_COOLDOWN_S)) > 0:
        return now.hold(Reason.COOLING_DOWN, f"{why}; the next cut of the KV share may come in {left_s:.0f} s")
    return now.change(
        Reason.MEMORY_PRESSURE, f"{why}; KV memory is given back", {Knob.KV_CACHE_FRACTION: cut}, Direction.CUT
    )


def blocked(now: Situation) -> Decision | None:
    """Take more of the pool while it is too small and there is memory for it."""
    why, value = _why_small(now), _larger(now)
    if not why or value is None or _raise_in_s(now) > 0:
        return None
    return now.change(
        Reason.KV_BLOCKED, f"{why}, and there is memory", {Knob.KV_CACHE_FRACTION: value}, Direction.RAISE
    )


def waits(now: Situation) -> str:
    """Return what a larger pool waits for, although it would help; "" if it does not wait."""
    if not _why_small(now) or _larger(now) is None or (left_s := _raise_in_s(now)) <= 0:
        return ""
    return f"{_why_small(now)}; the next raise of the KV share may come in {left_s:.0f} s"


def _why_small(now: Situation) -> str:
    """Return how requests show that the pool is too small; "" if they do not."""
    share = Knob.KV_CACHE_FRACTION.waited_for(now.blocked_by)
    if share > BINDING_SHARE:
        return f"{share:.0%} of steps waited for KV blocks"
    share = Knob.STEP_TIME.waited_for(now.blocked_by)
    if share > BINDING_SHARE and now.ttft.standing is Standing.OVER and _keeps_steps_short(now):
        return f"{share:.0%} of steps waited for the step target, which is short because the KV pool is small"
    return ""


def _keeps_steps_short(now: Situation) -> bool:
    """Return whether steps are as long as suits the pool, and a larger one would suit longer ones."""
    plan, target_ms = now.plan, Knob.STEP_TIME.of(now.limits)
    return plan is not None and plan.aim_s < plan.step_s and target_ms >= (1 - DEAD_BAND) * 1000 * plan.aim_s


def _larger(now: Situation) -> float | None:
    """Return the share that a raise takes, None without memory for it."""
    value = now.limits.kv_cache_fraction
    raised = towards(Knob.KV_CACHE_FRACTION, value, RAISE * value, now.spans[Knob.KV_CACHE_FRACTION], dead_band=0.02)
    return raised if raised is not None and raised > value and _has_memory(now, raised - value) else None


def _raise_in_s(now: Situation) -> float:
    after_raise = _cooldown_s(now, RAISE_COOLDOWN_S)
    after_cut = _cooldown_s(now, RAISE_AFTER_CUT_S, {Direction.CUT})
    return max(after_raise, after_cut)


def unused(now: Situation) -> Decision | None:
    """Give back what has long not been needed."""
    since_s = now.state.roomy_since_s
    if since_s is None or now.now_s - since_s < ROOMY_S or not is_roomy(now):
        return None
    value, need = now.limits.kv_cache_fraction, needed_share(now)
    cut = towards(Knob.KV_CACHE_FRACTION, value, need, now.spans[Knob.KV_CACHE_FRACTION])
    if cut is None:
        return None
    why = f"for {(now.now_s - since_s) / 60:.0f} minutes what ran, with the prefixes that pay, needed {need:.0%}"
    return now.change(Reason.KV_UNUSED, why, {Knob.KV_CACHE_FRACTION: cut}, Direction.CUT)


def is_roomy(now: Situation) -> bool:
    """Return whether the pool is larger than needed, and memory is known, so that it can be taken again."""
    is_known = all(one.memory is not None for one in now.usable.values())
    return is_known and now.limits.kv_cache_fraction > ROOMY * needed_share(now)


def needed_share(now: Situation) -> float:
    """Return the share of the pool that what runs, its growth, and the prefixes that pay for themselves need."""
    return max(_needed(one) for one in now.usable.values())


def _needed(one: Evidence) -> float:
    blocks = max(GROWTH * one.kv_blocks.used, knee(one.prefix_hits))
    return min(1.0, max(one.envelope.min_kv_cache_fraction, blocks / max(1, one.envelope.num_kv_blocks)))


def knee(hits: tuple[HitPoint, ...]) -> int:
    """Return the smallest pool that finds nearly what the largest would; 0 where prefixes hardly repeat."""
    most = max((one.share for one in hits), default=0.0)
    return 0 if most < LEAST_HITS else min(one.num_blocks for one in hits if one.share >= WORTH * most)


def shortage(memory: MemoryState) -> str | None:
    """Return what memory is short of, or None."""
    if memory.pressure is not None and memory.pressure > PRESSURE:
        return f"tasks stall for memory {memory.pressure:.0%} of the time"
    if (
        memory.limit_bytes
        and memory.available_bytes is not None
        and memory.available_bytes < GUARD * memory.limit_bytes
    ):
        return f"{memory.available_bytes / 2**20:.0f} MiB are left of {memory.limit_bytes / 2**20:.0f} MiB"
    return None


def _would_help(memory: MemoryState) -> bool:
    """Return whether a smaller pool would ease a shortage: it is in the memory that is short, and as large as what is left.

    Tasks may stall although there is memory, because of another cgroup's limit.
    """
    left = memory.available_bytes
    return memory.device_free_bytes is None and (left is None or left <= memory.pool_bytes)


def _has_memory(now: Situation, more: float) -> bool:
    """Return whether every replica is known to have memory for ``more`` of the pool."""
    return all(one.memory is not None and _fits(one.memory, more) for one in now.usable.values())


def _fits(memory: MemoryState, more: float) -> bool:
    free = memory.available_bytes if memory.device_free_bytes is None else memory.device_free_bytes
    return (
        free is not None
        and shortage(memory) is None
        and free > more * memory.pool_max_bytes + GUARD * (memory.limit_bytes or free)
    )


def _cooldown_s(now: Situation, cooldown_s: float, directions: Container[Direction] = tuple(Direction)) -> float:
    """Return the seconds left of a cool-down since the last such move of the KV share."""
    own = [move for move in now.state.moves if move.knob is Knob.KV_CACHE_FRACTION and move.direction in directions]
    return max((move.at_s + cooldown_s - now.now_s for move in own), default=0.0)

"""Settings fixed at start-up, and the limits that move under them: which are asked for, by which revision, until when."""

import logging
import math
from dataclasses import dataclass
from typing import Protocol

from flyball_protocol import (
    BootPrior,
    Envelope,
    Limits,
    LimitsAck,
    LimitsChange,
    LimitsReport,
    LimitsStatus,
    LimitsUpdate,
    Objectives,
)
from flyball_runtime.core.clock import Clock
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.kv_layout import most_blocks

logger = logging.getLogger(__name__)

MAX_STEP_TIME_TARGET_MS = 600_000.0


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The upper bounds that live limits move under, and what cannot change while serving.

    EngineConfig checks the ranges, where users set them. What depends on the model's length is checked here.

    Attributes:
        max_model_len: longest sequence (prompt and output) in tokens.
        max_num_seqs: most sequences that may run at once; rows of the engine's batch tensors.
        max_num_batched_tokens: most tokens in one step.
        enable_chunked_prefill: False computes each prompt whole, in one step.
        num_start_blocks: KV blocks at the start; None takes all that there may be.
        policy: the name of one in policies.py.
        fair_share: clients take turns within a priority; see queue.py.
        max_loras: adapters that running sequences may have, all together; 0 where none are served.

    Raises:
        ConfigError: without chunked prefill, the longest prompt does not fit into a step.
    """

    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    num_start_blocks: int | None = None
    policy: str = "fcfs"
    fair_share: bool = True
    max_loras: int = 0

    def __post_init__(self) -> None:
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}, below the model length {self.max_model_len}, "
                "and without chunked prefill a whole prompt must fit into one step. "
                "Raise it, lower --max-model-len, or leave --enable-chunked-prefill on."
            )

    def start_limits(self, num_kv_blocks: int) -> Limits:
        """The limits in force until others are posted: everything, but of the KV cache what was allocated at the start."""
        num_start_blocks = num_kv_blocks if self.num_start_blocks is None else self.num_start_blocks
        return Limits(
            max_num_seqs=self.max_num_seqs,
            kv_cache_fraction=num_start_blocks / num_kv_blocks,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def envelope(self, num_kv_blocks: int, block_size: int, windows: tuple[int | None, ...] = (None,)) -> Envelope:
        """What live limits may be with this many KV blocks, of which each group of layers needs its own for a token.

        The smallest KV fraction and token budget are the least with which any one sequence can always be computed to
        its end, so no limits inside the envelope can stop progress.

        Raises:
            ConfigError: one sequence of ``max_model_len`` tokens does not fit into the KV cache.
        """
        most = self.max_num_batched_tokens
        num_needed = sum(most_blocks(window, self.max_model_len, most, block_size) for window in windows)
        if num_needed > num_kv_blocks:
            raise ConfigError(
                f"the KV cache has {num_kv_blocks} blocks of {block_size} tokens; "
                f"one sequence of --max-model-len {self.max_model_len} needs {num_needed} blocks. "
                "Lower --max-model-len, or raise --kv-cache-memory-bytes or --gpu-memory-utilization."
            )
        return Envelope(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            min_num_batched_tokens=1 if self.enable_chunked_prefill else self.max_model_len,
            num_kv_blocks=num_kv_blocks,
            min_kv_cache_fraction=_round_up(num_needed / num_kv_blocks),
            block_size=block_size,
            max_model_len=self.max_model_len,
        )


class LimitsEnforcer(Protocol):
    """What obeys the limits: the scheduler."""

    @property
    def envelope(self) -> Envelope: ...

    @property
    def limits(self) -> Limits:
        """The target."""
        ...

    @property
    def effective(self) -> Limits:
        """What holds this moment; above the target while a lowered limit drains."""
        ...

    @property
    def kv_drains(self) -> bool:
        """Whether a lowered KV limit still drains."""
        ...

    def set_limits(self, limits: Limits, kv_deadline_s: float = math.inf) -> None:
        """Aim at ``limits``; preempt for a lowered KV limit from ``kv_deadline_s`` on."""
        ...


class LimitsLedger:
    """Decides on updates and passes accepted ones on.

    *Revision*: a lower one than the one in force is stale. An equal one that asks for the same limits renews the lease, or
    ends it, and changes nothing else (or restores its limits, when the lease ran out in between); with other limits it is
    rejected.

    *Last known good*: the whole target that resulted from the last update without ttl, at first the start-up limits.

    *Boot prior*: takes the place of the start-up limits, and its revision that of 0. What of it lies outside the envelope
    starts at the nearest value inside.

    *Lease*: an update with ttl holds for that long. When it runs out unrenewed, each target falls to its last known
    good value or stays where it is, whichever is lower, so a runtime that nobody tends never takes on more. The
    revision stays. An update without ttl ends the lease: what results is the new last known good, fields taken over
    from the lease included.

    *KV drain*: running sequences may hold up a lowered KV limit for ``kv_drain_timeout_s``, of the update or else of the
    ledger, counted from when the limit began to drain. A renewal without it changes nothing.
    """

    def __init__(
        self,
        enforcer: LimitsEnforcer,
        clock: Clock,
        boot_prior: BootPrior | None = None,
        kv_drain_timeout_s: float = math.inf,
    ) -> None:
        self._enforcer = enforcer
        self._clock = clock
        self._revision = 0
        self._lease_end_s: float | None = None
        self._default_drain_timeout_s = self._drain_timeout_s = kv_drain_timeout_s
        self._drain_start_s = 0.0
        self._objectives: Objectives | None = None
        if boot_prior is not None:
            self._start_with(boot_prior)
        self._last_known_good = enforcer.limits
        self._resolved = enforcer.limits  # the whole target that the revision in force asked for

    @property
    def revision(self) -> int:
        """Of the last accepted update; before the first, of the boot prior, or 0."""
        return self._revision

    @property
    def objectives(self) -> Objectives | None:
        """Those that an accepted update named last. Leases do not end them."""
        return self._objectives

    @property
    def target(self) -> Limits:
        return self._enforcer.limits

    def post(self, update: LimitsUpdate) -> LimitsAck:
        """Take an update or refuse it; never raises for a well-formed one."""
        self.tick()
        if update.revision < self._revision:
            return self._refuse(
                LimitsStatus.STALE,
                f"revision {update.revision} is older than {self._revision}, in force here; post one above it.",
            )
        if update.revision == self._revision and update.limits.applied_to(self._resolved) != self._resolved:
            return self._refuse(
                LimitsStatus.REJECTED,
                f"revision {update.revision} is in force with other limits; post a change under a revision above it.",
            )
        reasons = violations(update.limits, self._enforcer.envelope)
        if reasons:
            return self._refuse(LimitsStatus.REJECTED, " ".join(reasons))
        return self._accept(update)

    def tick(self) -> bool:
        """Let a lease that has run out fall back; True when one just did. Call it every step, and while idle."""
        if self._lease_end_s is None or self._clock.now() < self._lease_end_s:
            return False
        self._lease_end_s = None
        fallback = lower_of(self.target, self._last_known_good)
        logger.warning(
            "the lease of limits revision %d was not renewed and has run out; target changes from %s to %s",
            self._revision,
            self.target,
            fallback,
        )
        self._aim_at(fallback)
        return True

    def report(self) -> LimitsReport:
        self.tick()
        return LimitsReport(
            revision=self._revision,
            target=self.target,
            effective=self._enforcer.effective,
            envelope=self._enforcer.envelope,
            last_known_good=self._last_known_good,
            lease_expires_in_s=None if self._lease_end_s is None else self._lease_end_s - self._clock.now(),
            objectives=self._objectives,
        )

    def _start_with(self, prior: BootPrior) -> None:
        limits = inside(prior.limits, self._enforcer.envelope)
        if reasons := violations(prior.limits, self._enforcer.envelope):
            logger.error(
                "the boot prior's limits (revision %d) do not fit this runtime: %s Starting with the nearest values that fit.",
                *(prior.revision, " ".join(reasons)),
            )
        self._enforcer.set_limits(limits)
        self._revision = prior.revision
        logger.info("starting with the boot prior's revision %d: %s", prior.revision, limits)

    def _accept(self, update: LimitsUpdate) -> LimitsAck:
        if update.revision > self._revision:
            self._resolved = update.limits.applied_to(self.target)
            self._drain_timeout_s = self._default_drain_timeout_s
        if update.kv_drain_timeout_s is not None:
            self._drain_timeout_s = update.kv_drain_timeout_s
        self._revision = update.revision
        self._objectives = update.objectives or self._objectives
        if update.ttl_s is None:
            self._last_known_good, self._lease_end_s = self._resolved, None
        else:
            self._lease_end_s = self._clock.now() + update.ttl_s
        self._aim_at(self._resolved)
        reason = "; ".join(_draining(self.target, self._enforcer.effective))
        status = LimitsStatus.DEFERRED if reason else LimitsStatus.APPLIED
        return self._ack(status, reason)

    def _aim_at(self, limits: Limits) -> None:
        if not self._enforcer.kv_drains:
            self._drain_start_s = self._clock.now()
        self._enforcer.set_limits(limits, self._drain_start_s + self._drain_timeout_s)

    def _refuse(self, status: LimitsStatus, reason: str) -> LimitsAck:
        logger.warning("limits update %s: %s", status.value, reason)
        return self._ack(status, reason)

    def _ack(self, status: LimitsStatus, reason: str) -> LimitsAck:
        return LimitsAck(
            status=status,
            revision=self._revision,
            target=self.target,
            effective=self._enforcer.effective,
            reason=reason,
        )


def violations(change: LimitsChange | Limits, envelope: Envelope) -> list[str]:
    """Return a sentence for each limit outside the envelope: its value, the range, the way out."""
    ranges: tuple[tuple[str, float | None, float, float, str], ...] = (
        ("max_num_seqs", change.max_num_seqs, 1, envelope.max_num_seqs, "start with a higher --max-num-seqs"),
        (
            "kv_cache_fraction",
            change.kv_cache_fraction,
            envelope.min_kv_cache_fraction,
            1.0,
            f"one sequence of {envelope.max_model_len} tokens must fit; start with a lower --max-model-len",
        ),
        (
            "max_num_batched_tokens",
            change.max_num_batched_tokens,
            envelope.min_num_batched_tokens,
            envelope.max_num_batched_tokens,
            "start with a higher --max-num-batched-tokens, or with chunked prefill to go lower",
        ),
        ("step_time_target_ms", change.step_time_target_ms, 0.0, MAX_STEP_TIME_TARGET_MS, "lift it with 0"),
    )
    return [
        f"{name} is {value}; this runtime takes {low:.6g} to {high:.6g}. Stay inside, or {way_out}."
        for name, value, low, high, way_out in ranges
        if value is not None and not low <= value <= high
    ]


def inside(limits: Limits, envelope: Envelope) -> Limits:
    """Return the limits nearest to ``limits`` that have no ``violations``."""
    return Limits(
        max_num_seqs=min(max(limits.max_num_seqs, 1), envelope.max_num_seqs),
        kv_cache_fraction=min(max(limits.kv_cache_fraction, envelope.min_kv_cache_fraction), 1.0),
        max_num_batched_tokens=min(
            max(limits.max_num_batched_tokens, envelope.min_num_batched_tokens), envelope.max_num_batched_tokens
        ),
        step_time_target_ms=None
        if limits.step_time_target_ms is None
        else min(limits.step_time_target_ms, MAX_STEP_TIME_TARGET_MS),
    )


def lower_of(a: Limits, b: Limits) -> Limits:
    """Return the lower of each limit. No step-time target is the higher one: it limits nothing."""
    targets = [t for t in (a.step_time_target_ms, b.step_time_target_ms) if t is not None]
    return Limits(
        max_num_seqs=min(a.max_num_seqs, b.max_num_seqs),
        kv_cache_fraction=min(a.kv_cache_fraction, b.kv_cache_fraction),
        max_num_batched_tokens=min(a.max_num_batched_tokens, b.max_num_batched_tokens),
        step_time_target_ms=min(targets, default=None),
    )


def _draining(target: Limits, effective: Limits) -> list[str]:
    return [
        f"{name} drains from {getattr(effective, name):.6g} to {getattr(target, name):.6g} as running sequences end"
        for name in ("max_num_seqs", "kv_cache_fraction", "max_num_batched_tokens")
        if getattr(effective, name) > getattr(target, name)
    ]


def _round_up(fraction: float) -> float:
    """To 4 decimals, so that the bound can be printed, typed and posted."""
    return min(1.0, math.ceil(fraction * 10_000) / 10_000)

"""Live limits: what the operator may move while a runtime serves, and how the runtime answers.

All types are frozen msgspec structs: ``msgspec.json.decode(body, type=LimitsUpdate)`` validates types, bounds and unknown
fields and raises ``msgspec.ValidationError`` with the path of the offending field.
"""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

MAX_REVISION = 2**53 - 1
"""The largest integer that every JSON reader keeps exact."""

Revision = Annotated[int, Meta(ge=1, le=MAX_REVISION)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
"""Bounded on the wire, so that every number that is decoded can be encoded again, compared and held in an int32 tensor."""

Fraction = Annotated[float, Meta(gt=0, le=1)]


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A complete set of live limits.

    Attributes:
        max_num_seqs: most sequences that may run (hold KV blocks) at once.
        kv_cache_fraction: share of the envelope's KV blocks that may be in use, in (0, 1].
        max_num_batched_tokens: most tokens one step may compute (decodes and prefill chunks together).
        step_time_target_ms: step time that chunk sizes aim at; None means no target.
    """

    max_num_seqs: Count
    kv_cache_fraction: Fraction
    max_num_batched_tokens: Count
    step_time_target_ms: Annotated[float, Meta(gt=0)] | None = None


class LimitsChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The limits to move; a field left out keeps its present target. A step-time target of 0 lifts it."""

    max_num_seqs: Count | None = None
    kv_cache_fraction: Fraction | None = None
    max_num_batched_tokens: Count | None = None
    step_time_target_ms: Annotated[float, Meta(ge=0)] | None = None

    def applied_to(self, limits: Limits) -> Limits:
        """Return ``limits`` with the fields that this change names replaced."""
        changes = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        if changes.get("step_time_target_ms") == 0:
            changes["step_time_target_ms"] = None
        return msgspec.structs.replace(limits, **changes)


class Objectives(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latencies to stay within, in seconds; None: no objective.

    Attributes:
        ttft_s: arrival to first token.
        itl_s: gap between two tokens.
    """

    ttft_s: Annotated[float, Meta(gt=0)] | None = None
    itl_s: Annotated[float, Meta(gt=0)] | None = None


class LimitsUpdate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /admin/limits``.

    Attributes:
        revision: grows with every change; a lower one than the revision in force is stale, an equal one renews the lease.
        limits: what to change.
        ttl_s: the change is a lease. When it runs out unrenewed, the runtime falls back to the last limits that were
            posted without a lease (or the start-up limits), never above the ones in force. None: no lease.
        objectives: what latencies are counted against from now on. They stay until others are posted. None leaves them.
        kv_drain_timeout_s: how long running sequences may hold up a KV limit that this lowers, before some are preempted
            for it. None takes the runtime's ``--kv-drain-timeout``, or leaves what holds if this only renews a lease.
    """

    revision: Revision
    limits: LimitsChange
    ttl_s: Annotated[float, Meta(gt=0, le=86400)] | None = None
    objectives: Objectives | None = None
    kv_drain_timeout_s: Annotated[float, Meta(ge=0, le=86400)] | None = None


class LimitsStatus(StrEnum):
    """How a runtime answered an update."""

    APPLIED = "applied"
    """In force: effective equals target."""
    DEFERRED = "deferred"
    """Accepted; a lowered limit is draining and effective is still above target."""
    STALE = "stale"
    """Refused: a newer revision is in force."""
    REJECTED = "rejected"
    """Refused: outside the envelope, or unsupported by this runtime."""


class Envelope(Struct, frozen=True, kw_only=True):
    """What start-up made room for; live limits move inside it.

    Attributes:
        max_num_seqs, max_num_batched_tokens: upper bounds set by the start-up flags.
        min_num_batched_tokens: the token budget may not fall below this.
        num_kv_blocks: most KV blocks that there may be.
        min_kv_cache_fraction: smallest fraction that still holds one sequence of ``max_model_len`` tokens.
        block_size: tokens per KV block.
        max_model_len: longest sequence (prompt and output) in tokens.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    min_num_batched_tokens: int
    num_kv_blocks: int
    min_kv_cache_fraction: float
    block_size: int
    max_model_len: int


class LimitsReport(Struct, frozen=True, kw_only=True):
    """Body of ``GET /admin/limits``: target is what was asked, effective what holds this moment.

    ``objectives`` are those posted last, None before.
    """

    revision: int
    target: Limits
    effective: Limits
    envelope: Envelope
    last_known_good: Limits
    lease_expires_in_s: float | None = None
    objectives: Objectives | None = None


class LimitsAck(Struct, frozen=True, kw_only=True):
    """Answer to ``POST /admin/limits``. ``reason`` says why an update was stale, rejected or deferred."""

    status: LimitsStatus
    revision: int
    target: Limits
    effective: Limits
    reason: str = ""


LIMITS_HTTP_STATUS: dict[LimitsStatus, int] = {
    LimitsStatus.APPLIED: 200,
    LimitsStatus.DEFERRED: 202,
    LimitsStatus.STALE: 409,
    LimitsStatus.REJECTED: 422,
}

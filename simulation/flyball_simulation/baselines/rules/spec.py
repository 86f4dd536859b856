"""The fields of ``spec.tuning`` that these rules read, with the defaults of their time."""

from typing import Literal

from msgspec import Struct


class Objectives(Struct, frozen=True, kw_only=True):
    ttft_p95_milliseconds: int | None = None
    inter_token_latency_p95_milliseconds: int | None = None


class Range(Struct, frozen=True, kw_only=True):
    min: int | None = None
    max: int | None = None


class Bounds(Struct, frozen=True, kw_only=True):
    max_num_seqs: Range = Range()
    max_num_batched_tokens: Range = Range()
    kv_cache_percent: Range = Range()


class Tuning(Struct, frozen=True, kw_only=True):
    mode: Literal["Disabled", "Recommend", "Auto"] = "Auto"
    interval_seconds: int = 15
    cooldown_seconds: int = 60
    min_samples: int = 100
    max_step_percent: int = 25
    objectives: Objectives = Objectives()
    bounds: Bounds = Bounds()

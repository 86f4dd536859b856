"""An LLMDeployment as a frozen value. The CRD (crds/llmdeployments.yaml) documents the fields."""

from typing import Literal

from msgspec import Struct

from flyball_operator.model_source import ModelSource


class _Spec(Struct, frozen=True, rename="camel", kw_only=True, forbid_unknown_fields=True):
    """Base of the values below: the CRD's fields, in snake case."""


class Model(_Spec, frozen=True, kw_only=True):
    uri: str
    revision: str | None = None
    served_name: str | None = None


class EnvVar(_Spec, frozen=True, kw_only=True):
    name: str
    value: str


class Runtime(_Spec, frozen=True, kw_only=True):
    dtype: Literal["Auto", "BFloat16", "Float16", "Float32"]
    max_num_seqs: int
    max_num_batched_tokens: int
    image: str | None = None
    max_model_len: int | None = None
    kv_cache_memory_percent: int | None = None
    kv_cache_memory: str | int | None = None
    extra_args: tuple[str, ...] = ()
    env: tuple[EnvVar, ...] = ()


class Accelerator(_Spec, frozen=True, kw_only=True):
    resource_name: str
    count: int


class Resources(_Spec, frozen=True, kw_only=True):
    requests: dict[str, str | int] = {}
    limits: dict[str, str | int] = {}


class Objectives(_Spec, frozen=True, kw_only=True):
    ttft_p95_milliseconds: int | None = None
    inter_token_latency_p95_milliseconds: int | None = None


class Range(_Spec, frozen=True, kw_only=True):
    min: int | None = None
    max: int | None = None


class Bounds(_Spec, frozen=True, kw_only=True):
    max_num_seqs: Range = Range()
    max_num_batched_tokens: Range = Range()
    kv_cache_percent: Range = Range()


class Tuning(_Spec, frozen=True, kw_only=True):
    mode: Literal["Off", "Recommend", "Auto"]
    interval_seconds: int
    cooldown_seconds: int
    min_samples: int
    max_step_percent: int
    objectives: Objectives = Objectives()
    bounds: Bounds = Bounds()


class Drain(_Spec, frozen=True, kw_only=True):
    pre_stop_seconds: int
    timeout_seconds: int


class Rollout(_Spec, frozen=True, kw_only=True):
    drain: Drain


class DeploymentSpec(_Spec, frozen=True, kw_only=True):
    model: Model
    runtime: Runtime
    accelerator: Accelerator
    replicas: int
    tuning: Tuning
    rollout: Rollout
    startup_timeout_seconds: int
    resources: Resources = Resources()


class LLMDeployment(Struct, frozen=True, kw_only=True):
    """One LLMDeployment, complete and consistent.

    Attributes:
        name, namespace: from metadata.
        spec: every field, defaults filled in.
        model_source: ``spec.model.uri`` taken apart.
    """

    name: str
    namespace: str
    spec: DeploymentSpec
    model_source: ModelSource

    @property
    def served_name(self) -> str:
        return self.spec.model.served_name or self.name

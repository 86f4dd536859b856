"""An LLMDeployment as a frozen value, with its model source and quantities. The CRD documents the fields."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct


class _Spec(Struct, frozen=True, rename="camel", kw_only=True, forbid_unknown_fields=True):
    """Base of the values below: the CRD's fields, in snake case."""


Quantity = str | int
IntOrPercent = int | str


class SecretKey(_Spec, frozen=True, kw_only=True):
    name: str
    key: str


class ModelCache(_Spec, frozen=True, kw_only=True):
    mode: Literal["EmptyDir", "Claim"]
    claim_name: str | None = None
    size: Quantity | None = None
    storage_class_name: str | None = None
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] | None = None


class Model(_Spec, frozen=True, kw_only=True):
    uri: str
    cache: ModelCache
    revision: str | None = None
    served_name: str | None = None
    secret_ref: SecretKey | None = None


class ObjectName(_Spec, frozen=True, kw_only=True):
    name: str


class KeyRef(_Spec, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    key: str
    optional: bool | None = None


class ValueSource(_Spec, frozen=True, kw_only=True, omit_defaults=True):
    secret_key_ref: KeyRef | None = None
    config_map_key_ref: KeyRef | None = None


class EnvVar(_Spec, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    value: str | None = None
    value_from: ValueSource | None = None


class ObjectRef(_Spec, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    optional: bool | None = None


class EnvSource(_Spec, frozen=True, kw_only=True, omit_defaults=True):
    prefix: str | None = None
    secret_ref: ObjectRef | None = None
    config_map_ref: ObjectRef | None = None


class Runtime(_Spec, frozen=True, kw_only=True):
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    max_num_seqs: int
    max_num_batched_tokens: int | None = None
    image: str | None = None
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    image_pull_secrets: tuple[ObjectName, ...] = ()
    api_keys_secret_ref: SecretKey | None = None
    max_model_len: int | None = None
    gpu_memory_utilization_percent: int | None = None
    kv_cache_memory_percent: int | None = None  # the former name
    kv_cache_memory: Quantity | None = None
    extra_args: tuple[str, ...] = ()
    env: tuple[EnvVar, ...] = ()
    env_from: tuple[EnvSource, ...] = ()


class Accelerator(_Spec, frozen=True, kw_only=True):
    resource_name: str
    count: int


class Resources(_Spec, frozen=True, kw_only=True):
    requests: dict[str, Quantity] = {}
    limits: dict[str, Quantity] = {}


class ScalingPolicy(_Spec, frozen=True, kw_only=True):
    type: Literal["Pods", "Percent"]
    value: int
    period_seconds: int


class ScalingRules(_Spec, frozen=True, kw_only=True, omit_defaults=True):
    stabilization_window_seconds: int | None = None
    select_policy: Literal["Max", "Min", "Disabled"] | None = None
    policies: tuple[ScalingPolicy, ...] | None = None


class ScalingBehavior(_Spec, frozen=True, kw_only=True):
    scale_up: ScalingRules | None = None
    scale_down: ScalingRules | None = None


class HPA(_Spec, frozen=True, kw_only=True):
    metric_type: Literal["Pods", "External"]


class KEDA(_Spec, frozen=True, kw_only=True):
    trigger: Literal["MetricsAPI", "Prometheus"]
    polling_seconds: int
    prometheus_address: str | None = None


class Autoscaling(_Spec, frozen=True, kw_only=True):
    mode: Literal["Disabled", "HPA", "KEDA", "External"]
    min_replicas: int
    target_queue_depth: int
    target_running_percent: int
    hpa: HPA
    keda: KEDA
    target_load_percent: int | None = None
    max_replicas: int | None = None
    behavior: ScalingBehavior = ScalingBehavior()


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


class LiveLimits(_Spec, frozen=True, kw_only=True):
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    step_time_target_milliseconds: int | None = None
    kv_cache_percent: int | None = None


class Tuning(_Spec, frozen=True, kw_only=True):
    mode: Literal["Disabled", "Recommend", "Auto"]
    interval_seconds: int
    cooldown_seconds: int
    min_samples: int
    max_step_percent: int
    objectives: Objectives = Objectives()
    bounds: Bounds = Bounds()
    limits: LiveLimits = LiveLimits()


class Drain(_Spec, frozen=True, kw_only=True):
    pre_stop_seconds: int
    timeout_seconds: int


class Rollout(_Spec, frozen=True, kw_only=True):
    max_surge: IntOrPercent
    max_unavailable: IntOrPercent
    drain: Drain
    progress_deadline_seconds: int | None = None


class Disruption(_Spec, frozen=True, kw_only=True):
    mode: Literal["Managed", "Disabled"]
    max_unavailable: int


class Service(_Spec, frozen=True, kw_only=True):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"]
    port: int
    annotations: dict[str, str] = {}


class LabelSelector(_Spec, frozen=True, kw_only=True):
    match_labels: dict[str, str]


class Peer(_Spec, frozen=True, kw_only=True):
    namespace_selector: LabelSelector | None = None
    pod_selector: LabelSelector | None = None
    cidr: str | None = None


class NetworkPolicy(_Spec, frozen=True, kw_only=True):
    mode: Literal["Disabled", "Managed"]
    ingress_from: tuple[Peer, ...] | None = None


class Monitoring(_Spec, frozen=True, kw_only=True):
    pod_monitor: Literal["Auto", "Enabled", "Disabled"]
    interval_seconds: int
    labels: dict[str, str] = {}


class DeploymentSpec(_Spec, frozen=True, kw_only=True):
    model: Model
    runtime: Runtime
    accelerator: Accelerator
    replicas: int
    autoscaling: Autoscaling
    tuning: Tuning
    rollout: Rollout
    startup_timeout_seconds: int
    disruption: Disruption
    service: Service
    network_policy: NetworkPolicy
    monitoring: Monitoring
    suspend: bool
    resources: Resources = Resources()
    pod_template: dict[str, Any] = {}


@dataclass(frozen=True)
class HubModel:
    """``ORG/NAME`` or ``hf://ORG/NAME``: downloaded by the runtime."""

    repo: str
    revision: str | None


@dataclass(frozen=True)
class ClaimModel:
    """``pvc://CLAIM/FOLDER``: a folder of a PersistentVolumeClaim; an empty folder is the claim's root."""

    claim: str
    folder: str


@dataclass(frozen=True)
class ImageModel:
    """``oci://REFERENCE``: an image whose root folder is the model."""

    reference: str


@dataclass(frozen=True)
class FolderModel:
    """``file:FOLDER``: an absolute folder of the machine that runs the replicas."""

    path: Path


ModelSource = HubModel | ClaimModel | ImageModel | FolderModel


def is_on_hub(uri: str) -> bool:
    """Return whether ``uri`` names a model of the Hugging Face Hub, with or without ``hf://``."""
    return uri.startswith("hf://") or ":" not in uri


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


def plain(value: object) -> Any:
    """Return a part of a spec as JSON would have it: mappings, lists and scalars, and no tuples."""
    return msgspec.json.decode(msgspec.json.encode(value))


_UNITS: dict[str | None, Fraction] = {
    None: Fraction(1),
    "m": Fraction(1, 1000),
    **{unit: Fraction(1000 ** (i + 1)) for i, unit in enumerate("kMGT")},
    **{f"{unit}i": Fraction(1024 ** (i + 1)) for i, unit in enumerate("KMGT")},
}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?", re.ASCII)


def number_of(quantity: str | int) -> Fraction:
    """Return the number that a quantity such as ``2Gi``, ``1.5`` or ``500m`` stands for.

    Raises:
        ValueError: not such a quantity.
    """
    matched = _QUANTITY.fullmatch(str(quantity))
    if matched is None:
        raise ValueError(f"{quantity!r} is no quantity; write a number and nothing, m, k, M, G, T, Ki, Mi, Gi or Ti")
    return Fraction(matched[1]) * _UNITS[matched[2]]


def size_as_quantity(size: str | int) -> str | int:
    """Return a size as a Kubernetes quantity: ``2GiB`` is ``2Gi``."""
    return size.removesuffix("B") if isinstance(size, str) else size


def size_in_bytes(size: str | int) -> int:
    """Return the bytes of a size, rounded up. Raises ValueError, as ``number_of`` does."""
    return math.ceil(number_of(size_as_quantity(size)))

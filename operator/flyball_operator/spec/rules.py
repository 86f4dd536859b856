"""Rules that span fields of a spec. The CRD states the simple ones as CEL too, for kubectl apply."""

import ipaddress
import math
import re
from collections.abc import Iterator

from flyball_operator import names
from flyball_operator.spec import (
    DeploymentSpec,
    EnvVar,
    Objectives,
    Quantity,
    Range,
    is_on_hub,
    number_of,
    size_as_quantity,
)
from flyball_operator.spec.schema import path_of_entry
from flyball_protocol.endpoints import ADMIN_TOKEN_ENV
from flyball_protocol.quoting import quoted

MANAGED_FLAGS = frozenset(
    {
        "--host",
        "--port",
        "--admin-host",
        "--admin-port",
        "--admin-token-file",
        "--api-key",
        "--api-key-file",
        "--served-model-name",
        "--revision",
        "--dtype",
        "--device",
        "--max-model-len",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--gpu-memory-utilization",
        "--kv-cache-memory-bytes",
        "--boot-prior",
        "--drain-timeout",
        "--drain-quiet",
        "--shutdown-timeout",
    }
)
"""Flags of ``flyball serve`` that follow from spec fields; extraArgs may not repeat them."""

_RESOURCES = frozenset({"cpu", "memory", "ephemeral-storage"})
_METADATA_KEY = re.compile(
    r"([a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
)


def problems(spec: DeploymentSpec) -> list[str]:
    """Return one line for each rule that ``spec`` breaks."""
    parts = (
        _model_problems,
        _cache_problems,
        _runtime_problems,
        _resource_problems,
        _autoscaling_problems,
        _tuning_problems,
        _rollout_problems,
        _pod_template_problems,
        _monitoring_problems,
        _metadata_problems,
        _network_problems,
    )
    return [line for part in parts for line in part(spec)]


def _model_problems(spec: DeploymentSpec) -> Iterator[str]:
    model = spec.model
    if is_on_hub(model.uri):
        return
    if model.revision is not None:
        yield f"spec.model.revision works with a model of the Hub only; the uri is {quoted(model.uri)}, remove revision"
    if model.secret_ref is not None:
        yield (
            f"spec.model.secretRef is the Hub's token and works with a model of the Hub only; the uri is {quoted(model.uri)}. "
            "Remove it, or for oci:// use spec.runtime.imagePullSecrets"
        )


def _cache_problems(spec: DeploymentSpec) -> Iterator[str]:
    cache = spec.model.cache
    is_claim, makes_claim = cache.mode == "Claim", cache.mode == "Claim" and cache.size is not None
    if is_claim and (cache.claim_name is None) == (cache.size is None):
        yield (
            "spec.model.cache.mode is Claim, which needs claimName (a PersistentVolumeClaim that exists) "
            "or size (of one to make), not both"
        )
    if not is_claim and cache.claim_name is not None:
        yield f"spec.model.cache.claimName is {quoted(cache.claim_name)} and mode {cache.mode}; set mode Claim or remove it"
    if not makes_claim and (cache.storage_class_name or cache.access_mode):
        yield "spec.model.cache.storageClassName and accessMode are for a claim to be created; they need mode Claim and size"


def _runtime_problems(spec: DeploymentSpec) -> Iterator[str]:
    runtime = spec.runtime
    if runtime.kv_cache_memory_percent is not None:
        yield "spec.runtime.kvCacheMemoryPercent is now called gpuMemoryUtilizationPercent; rename it"
    if runtime.kv_cache_memory is not None and runtime.gpu_memory_utilization_percent is not None:
        yield "spec.runtime.kvCacheMemory and gpuMemoryUtilizationPercent are both set; keep one of them"
    if runtime.gpu_memory_utilization_percent is not None and spec.accelerator.count == 0:
        yield (
            f"spec.runtime.gpuMemoryUtilizationPercent is {runtime.gpu_memory_utilization_percent}, "
            "a share of the accelerator's memory, but spec.accelerator.count is 0; set kvCacheMemory instead"
        )
    if runtime.max_num_batched_tokens is not None and runtime.max_num_batched_tokens < runtime.max_num_seqs:
        yield (
            f"spec.runtime.maxNumBatchedTokens is {runtime.max_num_batched_tokens}, less than maxNumSeqs "
            f"{runtime.max_num_seqs}; each running sequence decodes one token a step, so raise it or lower maxNumSeqs"
        )
    for i, argument in enumerate(runtime.extra_args):
        yield from _extra_arg_problems(i, argument)
    for i, variable in enumerate(runtime.env):
        yield from _env_problems(f"spec.runtime.env[{i}]", variable, spec)
    for i, source in enumerate(runtime.env_from):
        if (source.secret_ref is None) == (source.config_map_ref is None):
            yield f"spec.runtime.envFrom[{i}] needs exactly one of secretRef and configMapRef"


def _extra_arg_problems(index: int, argument: str) -> Iterator[str]:
    flag = argument.partition("=")[0]
    if not re.match("--[^=]", argument):
        yield f"spec.runtime.extraArgs[{index}] is {quoted(argument)}; write --flag or --flag=value"
        return
    managed = sorted(known for known in MANAGED_FLAGS if known.startswith(flag))  # argparse takes abbreviations
    if managed:
        yield (
            f"spec.runtime.extraArgs[{index}] is {quoted(flag)}; {managed[0]} is set from other fields of spec, "
            "remove it here"
        )


def _env_problems(path: str, variable: EnvVar, spec: DeploymentSpec) -> Iterator[str]:
    source = variable.value_from
    if variable.value is not None and source is not None:
        yield f"{path} has both value and valueFrom; keep one of them"
    if source is not None and (source.secret_key_ref is None) == (source.config_map_key_ref is None):
        yield f"{path}.valueFrom needs exactly one of secretKeyRef and configMapKeyRef"
    if variable.name == ADMIN_TOKEN_ENV:
        yield f"{path}.name is {ADMIN_TOKEN_ENV}, which the operator sets from a Secret; remove it"
    if variable.name == names.HUB_TOKEN_ENV and spec.model.secret_ref is not None:
        yield f"{path}.name is {names.HUB_TOKEN_ENV}, which spec.model.secretRef sets; keep one of them"


def _resource_problems(spec: DeploymentSpec) -> Iterator[str]:
    resources, accelerator = spec.resources, spec.accelerator
    for kind, amounts in (("requests", resources.requests), ("limits", resources.limits)):
        for name in amounts.keys() - _RESOURCES:
            yield (
                f"{path_of_entry(f'spec.resources.{kind}', name)} is not known; {', '.join(sorted(_RESOURCES))} are. "
                "Accelerators go into spec.accelerator.count, anything else into podTemplate"
            )
    for name in (resources.requests.keys() & resources.limits.keys()) & _RESOURCES:
        request, limit = resources.requests[name], resources.limits[name]
        if number_of(request) > number_of(limit):
            yield f"spec.resources.requests.{name} is {request}, more than its limit {limit}; raise it or lower the request"
    if "kubernetes.io/" in accelerator.resource_name or accelerator.resource_name.startswith("requests."):
        yield (
            f"spec.accelerator.resourceName is {accelerator.resource_name}, one of Kubernetes' own names; "
            "use the device plugin's, like nvidia.com/gpu"
        )
    memory, kv_cache = resources.limits.get("memory"), spec.runtime.kv_cache_memory
    if memory is not None and kv_cache is not None and accelerator.count == 0:
        yield from _memory_problems(kv_cache, memory)


def _memory_problems(kv_cache: Quantity, limit: Quantity) -> Iterator[str]:
    if number_of(size_as_quantity(kv_cache)) >= number_of(limit):
        yield (
            f"spec.runtime.kvCacheMemory is {kv_cache}, and spec.resources.limits.memory only {limit}; "
            "raise the limit (the weights need room too) or lower kvCacheMemory"
        )


def _autoscaling_problems(spec: DeploymentSpec) -> Iterator[str]:
    autoscaling = spec.autoscaling
    if autoscaling.mode in ("HPA", "KEDA") and autoscaling.max_replicas is None:
        yield f"spec.autoscaling.mode is {autoscaling.mode}, which needs maxReplicas; set it, or choose Disabled or External"
    if autoscaling.max_replicas is not None and autoscaling.max_replicas < autoscaling.min_replicas:
        yield (
            f"spec.autoscaling.maxReplicas is {autoscaling.max_replicas}, less than minReplicas "
            f"{autoscaling.min_replicas}; swap or widen them"
        )
    if autoscaling.keda.trigger == "Prometheus" and autoscaling.keda.prometheus_address is None:
        yield "spec.autoscaling.keda.trigger is Prometheus, which needs prometheusAddress; set it, or choose MetricsAPI"
    if autoscaling.target_load_percent is not None:
        yield from _load_problems(spec)


def _load_problems(spec: DeploymentSpec) -> Iterator[str]:
    """Yield why the load cannot be had: the tuner finds it, and the operator's own metrics have it, not the pods."""
    autoscaling = spec.autoscaling
    if spec.tuning.mode == "Disabled":
        yield (
            "spec.autoscaling.targetLoadPercent is a share of what a replica can serve within the objectives, which tuning "
            "finds, and spec.tuning.mode is Disabled; set Recommend or Auto, or remove targetLoadPercent"
        )
    if autoscaling.mode == "HPA" and autoscaling.hpa.metric_type == "Pods":
        yield (
            f"spec.autoscaling.targetLoadPercent is set, and pods have no {names.TUNER_LOAD}: the operator has it; "
            "set hpa.metricType to External"
        )
    if autoscaling.mode == "KEDA" and autoscaling.keda.trigger == "MetricsAPI":
        yield (
            f"spec.autoscaling.targetLoadPercent is set, and pods have no {names.TUNER_LOAD}: the operator has it; "
            "set keda.trigger to Prometheus"
        )


def _tuning_problems(spec: DeploymentSpec) -> Iterator[str]:
    tuning = spec.tuning
    if tuning.mode != "Disabled" and tuning.objectives == Objectives():
        yield (
            f"spec.tuning.mode is {tuning.mode} and spec.tuning.objectives is empty; "
            "set ttftP95Milliseconds or interTokenLatencyP95Milliseconds"
        )
    limits, bounds = tuning.limits, tuning.bounds
    envelopes = (
        ("maxNumSeqs", limits.max_num_seqs, bounds.max_num_seqs, spec.runtime.max_num_seqs),
        (
            "maxNumBatchedTokens",
            limits.max_num_batched_tokens,
            bounds.max_num_batched_tokens,
            spec.runtime.max_num_batched_tokens or math.inf,  # the runtime chooses it; the tuner keeps within
        ),
        ("kvCachePercent", limits.kv_cache_percent, bounds.kv_cache_percent, 100),
    )
    for name, limit, bound, envelope in envelopes:
        yield from _bounds_problems(f"spec.tuning.bounds.{name}", bound, name, envelope)
        if limit is not None:
            yield from _limit_problems(limit, bound, name, envelope)


def _bounds_problems(path: str, bounds: Range, name: str, envelope: float) -> Iterator[str]:
    if bounds.min is not None and bounds.max is not None and bounds.min > bounds.max:
        yield f"{path}.min is {bounds.min}, more than its max {bounds.max}; swap or widen them"
    for side, value in (("min", bounds.min), ("max", bounds.max)):
        if value is not None and value > envelope:
            yield (
                f"{path}.{side} is {value}; live limits stay inside the envelope, and spec.runtime.{name} is {envelope}. "
                "Lower the bound or raise the envelope"
            )


def _limit_problems(limit: int, bounds: Range, name: str, envelope: float) -> Iterator[str]:
    path = f"spec.tuning.limits.{name}"
    if limit > envelope:
        yield (
            f"{path} is {limit}; live limits stay inside the envelope, and spec.runtime.{name} is {envelope}. "
            "Lower the limit or raise the envelope"
        )
    low, high = bounds.min or 1, envelope if bounds.max is None else bounds.max
    if limit <= envelope and not low <= limit <= high:
        span = f"{low} or more" if math.isinf(high) else f"{low} to {high}"
        yield f"{path} is {limit}, outside spec.tuning.bounds.{name}, {span}; widen the bounds or move the limit"


def _rollout_problems(spec: DeploymentSpec) -> Iterator[str]:
    rollout = spec.rollout
    if {str(rollout.max_surge), str(rollout.max_unavailable)} <= {"0", "0%"}:
        yield (
            "spec.rollout.maxSurge and maxUnavailable are both 0, so nothing could ever be replaced; raise one of them"
        )


def _pod_template_problems(spec: DeploymentSpec) -> Iterator[str]:
    labels = spec.pod_template.get("metadata", {}).get("labels", {})
    for key in labels.keys() & names.labels("").keys():
        yield f"{path_of_entry('spec.podTemplate.metadata.labels', key)} is how the operator finds its pods; remove it"


def _monitoring_problems(spec: DeploymentSpec) -> Iterator[str]:
    for key in spec.monitoring.labels.keys() & names.labels("").keys():
        yield f"{path_of_entry('spec.monitoring.labels', key)} is a label that the operator sets; remove it"


def _metadata_problems(spec: DeploymentSpec) -> Iterator[str]:
    """Yield what the API server would refuse as a key of labels or annotations."""
    template = spec.pod_template.get("metadata", {})
    mappings = {
        "spec.podTemplate.metadata.labels": template.get("labels", {}),
        "spec.podTemplate.metadata.annotations": template.get("annotations", {}),
        "spec.service.annotations": spec.service.annotations,
        "spec.monitoring.labels": spec.monitoring.labels,
    }
    for i, peer in enumerate(spec.network_policy.ingress_from or ()):
        for name, selector in (("namespaceSelector", peer.namespace_selector), ("podSelector", peer.pod_selector)):
            if selector is not None:
                mappings[f"spec.networkPolicy.ingressFrom[{i}].{name}.matchLabels"] = selector.match_labels
    for path, mapping in mappings.items():
        for key in mapping:
            if not _METADATA_KEY.fullmatch(key):
                yield f"{path_of_entry(path, key)} must be NAME or DOMAIN/NAME, with letters, digits, '-', '_' and '.' in NAME"


def _network_problems(spec: DeploymentSpec) -> Iterator[str]:
    policy = spec.network_policy
    if policy.mode == "Disabled" and policy.ingress_from is not None:
        yield "spec.networkPolicy.ingressFrom needs mode Managed; set that mode or remove ingressFrom"
    for i, peer in enumerate(policy.ingress_from or ()):
        path = f"spec.networkPolicy.ingressFrom[{i}]"
        if (peer.cidr is not None) == (peer.namespace_selector is not None or peer.pod_selector is not None):
            yield f"{path} needs cidr, or namespaceSelector and podSelector (one or both)"
        if peer.cidr is not None and not _is_cidr(peer.cidr):
            yield f"{path}.cidr is {quoted(peer.cidr)}; expected ADDRESS/BITS, like 10.0.0.0/8"


def _is_cidr(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True

"""The Kubernetes objects that an LLMDeployment stands for. Pure: the cluster applies them, local mode runs the Deployment.

One function per kind of child. Each has ``names.labels``; the reconciler adds the owner and a hash.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flyball_operator import names
from flyball_operator.children.autoscaling import autoscaler
from flyball_operator.children.pod import pod_template
from flyball_operator.observed import Object
from flyball_operator.spec import LLMDeployment, Peer, plain, size_as_quantity
from flyball_protocol import endpoints

SLOW_START_MARGIN_S = 60
"""A replica that loads for the whole of its allowance is slow, not stuck."""


@dataclass(frozen=True)
class Platform:
    """What children may count on; the defaults are those of ``render``, which knows no cluster.

    Attributes:
        runtime_image: for whoever names none in ``spec.runtime.image``.
        keda: ScaledObjects of keda.sh/v1alpha1 can be made.
        pod_monitor: PodMonitors of monitoring.coreos.com/v1 can be made.
        operator_namespace: where the operator's own pods are.
    """

    runtime_image: str = field(default_factory=names.runtime_image)
    keda: bool = True
    pod_monitor: bool = True
    operator_namespace: str = names.OPERATOR_NAMESPACE


def missing_kinds(llm: LLMDeployment, platform: Platform) -> Iterator[str]:
    """Yield one line for each child that the spec asks for by name and the cluster has no kind for."""
    if llm.spec.autoscaling.mode == "KEDA" and not platform.keda:
        yield (
            "spec.autoscaling.mode is KEDA, and the cluster has no ScaledObject (keda.sh/v1alpha1); "
            "install KEDA, or choose HPA, External or Disabled"
        )
    if llm.spec.monitoring.pod_monitor == "Enabled" and not platform.pod_monitor:
        yield (
            "spec.monitoring.podMonitor is Enabled, and the cluster has no PodMonitor (monitoring.coreos.com/v1); "
            "install the Prometheus operator, or choose Auto or Disabled"
        )


def build(
    llm: LLMDeployment,
    platform: Platform,
    *,
    admin_token_secret: str,
    boot_prior: Mapping[str, Any] | None = None,
) -> list[Object]:
    """Return every child of ``llm``, but the Secret with its admin token (``token_secret``).

    Args:
        admin_token_secret: name of that Secret.
        boot_prior: what new pods start from, as ``limits.json`` holds it; None when nothing is known yet.

    Raises:
        SpecError: ``spec.podTemplate`` cannot be merged.
    """
    found = (
        deployment(llm, platform, admin_token_secret=admin_token_secret),
        service(llm),
        cache_claim(llm),
        boot_prior_map(llm, boot_prior),
        autoscaler(llm, keda=platform.keda),
        disruption_budget(llm),
        network_policy(llm, platform),
        pod_monitor(llm, platform),
    )
    return [child for child in found if child is not None]


def deployment(llm: LLMDeployment, platform: Platform, *, admin_token_secret: str) -> Object:
    """Return the apps/v1 Deployment. Raises SpecError when ``spec.podTemplate`` cannot be merged."""
    rollout = llm.spec.rollout
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": names.metadata(llm.namespace, llm.name),
        "spec": {
            "replicas": llm.spec.replicas,
            "selector": {"matchLabels": names.selector_labels(llm.name)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable},
            },
            "progressDeadlineSeconds": rollout.progress_deadline_seconds
            or llm.spec.startup_timeout_seconds + SLOW_START_MARGIN_S,
            "template": pod_template(llm, platform.runtime_image, admin_token_secret),
        },
    }


def service(llm: LLMDeployment) -> Object:
    """Return the v1 Service."""
    spec = llm.spec.service
    port = {"name": names.API_PORT_NAME, "port": spec.port, "targetPort": names.API_PORT_NAME, "protocol": "TCP"}
    found = names.metadata(llm.namespace, llm.name)
    if spec.annotations:
        found["annotations"] = dict(spec.annotations)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": found,
        "spec": {
            "type": spec.type,
            "selector": names.selector_labels(llm.name),
            "ports": [{**port, "appProtocol": "http"}],
        },
    }


def cache_claim(llm: LLMDeployment) -> Object | None:
    """Return the v1 PersistentVolumeClaim, or None when none is to be made."""
    cache = llm.spec.model.cache
    if cache.mode != "Claim" or cache.size is None:
        return None
    spec: Object = {
        "accessModes": [cache.access_mode or "ReadWriteMany"],
        "resources": {"requests": {"storage": size_as_quantity(cache.size)}},
    }
    if cache.storage_class_name is not None:
        spec["storageClassName"] = cache.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": names.metadata(llm.namespace, llm.name, names.cache_claim(llm.name)),
        "spec": spec,
    }


def boot_prior_map(llm: LLMDeployment, boot_prior: Mapping[str, Any] | None) -> Object | None:
    """Return the v1 ConfigMap, or None while there is nothing to say.

    It is a volume of the pods, optional and not part of their template's content, so a change rolls no pod.
    """
    if boot_prior is None:
        return None
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": names.metadata(llm.namespace, llm.name, names.boot_prior_map(llm.name)),
        "data": {names.BOOT_PRIOR_FILE: json.dumps(boot_prior, sort_keys=True)},
    }


def token_secret(llm: LLMDeployment, name: str, token: str) -> Object:
    """Return the v1 Secret with the token of the pods' admin port. It is immutable: another token has another name."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": names.metadata(llm.namespace, llm.name, name),
        "type": "Opaque",
        "immutable": True,
        "stringData": {names.ADMIN_TOKEN_KEY: token},
    }


def disruption_budget(llm: LLMDeployment) -> Object | None:
    """Return the policy/v1 PodDisruptionBudget, or None: with less than two replicas there is nothing to keep in service."""
    disruption = llm.spec.disruption
    if disruption.mode == "Disabled" or llm.spec.replicas < 2:
        return None
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": names.metadata(llm.namespace, llm.name),
        "spec": {
            "maxUnavailable": disruption.max_unavailable,
            "selector": {"matchLabels": names.selector_labels(llm.name)},
            # Replicas that serve nobody must not keep a node from being drained.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def network_policy(llm: LLMDeployment, platform: Platform) -> Object | None:
    """Return the networking.k8s.io/v1 NetworkPolicy, or None when the spec asks for none.

    Ports are numbers: a name would be looked up in each pod, and podTemplate may rename them.
    """
    if llm.spec.network_policy.mode == "Disabled":
        return None
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": names.metadata(llm.namespace, llm.name),
        "spec": {
            "podSelector": {"matchLabels": names.selector_labels(llm.name)},
            "policyTypes": ["Ingress"],
            "ingress": [_api_rule(llm), _rule(endpoints.ADMIN_PORT, [_operator(platform)])],
        },
    }


def _api_rule(llm: LLMDeployment) -> Object:
    peers = llm.spec.network_policy.ingress_from
    if peers is None:
        return _rule(endpoints.API_PORT, None)
    replicas = {"podSelector": {"matchLabels": names.selector_labels(llm.name)}}  # they relay for one that is restarted
    return _rule(endpoints.API_PORT, [*map(_peer, peers), replicas])


def _rule(port: int, peers: list[Object] | None) -> Object:
    ports = {"ports": [{"port": port, "protocol": "TCP"}]}
    return ports if peers is None else {**ports, "from": peers}


def _peer(peer: Peer) -> Object:
    if peer.cidr is not None:
        return {"ipBlock": {"cidr": peer.cidr}}
    selectors = {"namespaceSelector": peer.namespace_selector, "podSelector": peer.pod_selector}
    return {key: plain(value) for key, value in selectors.items() if value is not None}


def _operator(platform: Platform) -> Object:
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": platform.operator_namespace}},
        "podSelector": {"matchLabels": names.OPERATOR_LABELS},
    }


def pod_monitor(llm: LLMDeployment, platform: Platform) -> Object | None:
    """Return the monitoring.coreos.com/v1 PodMonitor, or None when it is disabled or the cluster does not know the kind."""
    monitoring = llm.spec.monitoring
    if monitoring.pod_monitor == "Disabled" or not platform.pod_monitor:
        return None
    interval = f"{monitoring.interval_seconds}s"
    common = names.metadata(llm.namespace, llm.name)
    endpoint = {"port": names.API_PORT_NAME, "path": endpoints.METRICS_PATH, "interval": interval}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {**common, "labels": {**monitoring.labels, **common["labels"]}},
        "spec": {
            "selector": {"matchLabels": names.selector_labels(llm.name)},
            "podTargetLabels": [names.INSTANCE_LABEL],
            "podMetricsEndpoints": [{**endpoint, "scrapeTimeout": interval}],
        },
    }

"""The object that scales: a HorizontalPodAutoscaler, or a ScaledObject from which KEDA makes one.

Both aim at the scale subresource of the LLMDeployment, so ``spec.replicas`` stays the one place that says how many. Both take
the larger of two wishes: waiting requests over their target, which adds replicas, and the sum of the replicas' running ratios
over its target, which keeps them while the queue is empty. The ratio is of what a replica started with, so lowering a live
limit does not raise it.
"""

from collections.abc import Iterator

from flyball_operator import names
from flyball_operator.observed import Object
from flyball_operator.spec import Autoscaling, LLMDeployment, plain
from flyball_protocol import endpoints

_DEFAULT_BEHAVIOR = {
    "scaleUp": {
        "stabilizationWindowSeconds": 30,
        "selectPolicy": "Max",
        "policies": [
            {"type": "Percent", "value": 100, "periodSeconds": 60},
            {"type": "Pods", "value": 2, "periodSeconds": 60},
        ],
    },
    # One at a time: a replica that ends drains first, and the others take its share over.
    "scaleDown": {
        "stabilizationWindowSeconds": 300,
        "selectPolicy": "Max",
        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
    },
}


def autoscaler(llm: LLMDeployment, *, keda: bool) -> Object | None:
    """Return the HorizontalPodAutoscaler or ScaledObject, or None where the mode makes none.

    ``keda``: whether the cluster can make ScaledObjects.
    """
    match llm.spec.autoscaling.mode:
        case "HPA":
            return _horizontal_pod_autoscaler(llm)
        case "KEDA":
            return _scaled_object(llm) if keda else None
        case _:
            return None


def _horizontal_pod_autoscaler(llm: LLMDeployment) -> Object:
    autoscaling = llm.spec.autoscaling
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": names.metadata(llm.namespace, llm.name),
        "spec": {
            "scaleTargetRef": _scale_target(llm),
            "minReplicas": autoscaling.min_replicas,
            "maxReplicas": autoscaling.max_replicas,
            "metrics": [_hpa_metric(llm, name, target) for name, target in _hpa_targets(autoscaling)],
            "behavior": _behavior(autoscaling),
        },
    }


def _scale_target(llm: LLMDeployment) -> Object:
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": llm.name}


def _hpa_targets(autoscaling: Autoscaling) -> Iterator[tuple[str, str]]:
    """Yield each metric with its target as a Kubernetes quantity, spelled as the API server would."""
    percent = autoscaling.target_running_percent
    yield endpoints.REQUESTS_WAITING, str(autoscaling.target_queue_depth)
    yield endpoints.REQUESTS_RUNNING_RATIO, "1" if percent == 100 else f"{percent * 10}m"


def _hpa_metric(llm: LLMDeployment, name: str, target: str) -> Object:
    average = {"type": "AverageValue", "averageValue": target}
    if llm.spec.autoscaling.hpa.metric_type == "Pods":
        return {"type": "Pods", "pods": {"metric": {"name": name}, "target": average}}
    metric = {"name": name, "selector": {"matchLabels": _series_labels(llm)}}
    return {"type": "External", "external": {"metric": metric, "target": average}}


def _scaled_object(llm: LLMDeployment) -> Object:
    autoscaling = llm.spec.autoscaling
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": names.metadata(llm.namespace, llm.name),
        "spec": {
            "scaleTargetRef": _scale_target(llm),
            "minReplicaCount": autoscaling.min_replicas,
            "maxReplicaCount": autoscaling.max_replicas,
            "pollingInterval": autoscaling.keda.polling_seconds,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _behavior(autoscaling)}},
            "triggers": [
                _trigger(llm, endpoints.REQUESTS_WAITING, str(autoscaling.target_queue_depth)),
                _trigger(llm, endpoints.REQUESTS_RUNNING_RATIO, f"{autoscaling.target_running_percent / 100:.2f}"),
            ],
        },
    }


def _trigger(llm: LLMDeployment, metric: str, target: str) -> Object:
    asked = _prometheus if llm.spec.autoscaling.keda.trigger == "Prometheus" else _metrics_api
    kind, settings = asked(llm, metric, target)
    name = metric.removeprefix("flyball_").replace("_", "-")
    return {"type": kind, "name": name, "metricType": "AverageValue", "useCachedMetrics": True, "metadata": settings}


def _metrics_api(llm: LLMDeployment, metric: str, target: str) -> tuple[str, dict[str, str]]:
    # KEDA takes service and namespace from the host, and asks each ready endpoint at the port given here: the pods', not
    # the Service's own.
    return "metrics-api", {
        "url": f"http://{llm.name}.{llm.namespace}.svc:{endpoints.API_PORT}{endpoints.METRICS_PATH}",
        "format": "prometheus",
        "valueLocation": metric,
        "targetValue": target,
        "aggregateFromKubeServiceEndpoints": "true",
        "aggregationType": "sum",
    }


def _prometheus(llm: LLMDeployment, metric: str, target: str) -> tuple[str, dict[str, str]]:
    labels = ",".join(f'{name}="{value}"' for name, value in _series_labels(llm).items())
    return "prometheus", {
        "serverAddress": llm.spec.autoscaling.keda.prometheus_address or "",
        "query": f"sum({metric}{{{labels}}})",
        "threshold": target,
        "ignoreNullValues": "false",  # nothing scraped is an error, which holds the replicas; it is no empty queue
    }


def _series_labels(llm: LLMDeployment) -> dict[str, str]:
    """Return the labels that the PodMonitor gives the pods' series."""
    return {"namespace": llm.namespace, names.INSTANCE_LABEL.translate(_PROMETHEUS_NAME): llm.name}


_PROMETHEUS_NAME = str.maketrans("./-", "___")


def _behavior(autoscaling: Autoscaling) -> Object:
    given: Object = plain(autoscaling.behavior)
    return _DEFAULT_BEHAVIOR | {direction: rules for direction, rules in given.items() if rules is not None}

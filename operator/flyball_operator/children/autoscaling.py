"""The object that scales: a HorizontalPodAutoscaler, or a ScaledObject from which KEDA makes one.

Both aim at the scale subresource of the LLMDeployment, so ``spec.replicas`` stays the one place that says how many. Both take
the largest of these wishes: waiting requests over their target, which adds replicas; the sum of the replicas' running ratios
over its target, which keeps them while the queue is empty; and, where the spec asks for it, the tuner's load over its target,
which adds them before anything waits. The ratio is of what a replica started with, and the load of what a replica can serve
within the objectives, so lowering a live limit raises neither.
"""

from collections.abc import Iterator
from typing import NamedTuple

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
            "metrics": [_hpa_metric(llm, one) for one in _wishes(llm)],
            "behavior": _behavior(autoscaling),
        },
    }


def _scale_target(llm: LLMDeployment) -> Object:
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": llm.name}


class _Wish(NamedTuple):
    """A metric, the labels by which a Prometheus knows its series, and its target for each replica, in thousandths."""

    metric: str
    labels: Object
    target: int


def _wishes(llm: LLMDeployment) -> Iterator[_Wish]:
    autoscaling, of_pods = llm.spec.autoscaling, _labels_of_pods(llm)
    yield _Wish(endpoints.REQUESTS_WAITING, of_pods, 1000 * autoscaling.target_queue_depth)
    yield _Wish(endpoints.REQUESTS_RUNNING_RATIO, of_pods, 10 * autoscaling.target_running_percent)
    if autoscaling.target_load_percent is not None:
        of_tuner = {"namespace": llm.namespace, "llmdeployment": llm.name}
        yield _Wish(names.TUNER_LOAD, of_tuner, 10 * autoscaling.target_load_percent)


def _hpa_metric(llm: LLMDeployment, wish: _Wish) -> Object:
    whole, thousandths = divmod(wish.target, 1000)
    quantity = f"{wish.target}m" if thousandths else str(whole)  # as the API server would spell it
    average = {"type": "AverageValue", "averageValue": quantity}
    if llm.spec.autoscaling.hpa.metric_type == "Pods":
        return {"type": "Pods", "pods": {"metric": {"name": wish.metric}, "target": average}}
    metric = {"name": wish.metric, "selector": {"matchLabels": wish.labels}}
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
            "triggers": [_trigger(llm, one) for one in _wishes(llm)],
        },
    }


def _trigger(llm: LLMDeployment, wish: _Wish) -> Object:
    asked = _prometheus if llm.spec.autoscaling.keda.trigger == "Prometheus" else _metrics_api
    kind, settings = asked(llm, wish)
    name = wish.metric.removeprefix("flyball_").replace("_", "-")
    return {"type": kind, "name": name, "metricType": "AverageValue", "useCachedMetrics": True, "metadata": settings}


def _metrics_api(llm: LLMDeployment, wish: _Wish) -> tuple[str, dict[str, str]]:
    # KEDA takes service and namespace from the host, and asks each ready endpoint at the port given here: the pods', not
    # the Service's own.
    return "metrics-api", {
        "url": f"http://{llm.name}.{llm.namespace}.svc:{endpoints.API_PORT}{endpoints.METRICS_PATH}",
        "format": "prometheus",
        "valueLocation": wish.metric,
        "targetValue": f"{wish.target / 1000:g}",
        "aggregateFromKubeServiceEndpoints": "true",
        "aggregationType": "sum",
    }


def _prometheus(llm: LLMDeployment, wish: _Wish) -> tuple[str, dict[str, str]]:
    labels = ",".join(f'{name}="{value}"' for name, value in wish.labels.items())
    return "prometheus", {
        "serverAddress": llm.spec.autoscaling.keda.prometheus_address or "",
        "query": f"sum({wish.metric}{{{labels}}})",
        "threshold": f"{wish.target / 1000:g}",
        "ignoreNullValues": "false",  # nothing scraped is an error, which holds the replicas; it is no empty queue
    }


def _labels_of_pods(llm: LLMDeployment) -> Object:
    """Return the labels that the PodMonitor gives the pods' series."""
    return {"namespace": llm.namespace, names.INSTANCE_LABEL.translate(_PROMETHEUS_NAME): llm.name}


_PROMETHEUS_NAME = str.maketrans("./-", "___")


def _behavior(autoscaling: Autoscaling) -> Object:
    given: Object = plain(autoscaling.behavior)
    return _DEFAULT_BEHAVIOR | {direction: rules for direction, rules in given.items() if rules is not None}

"""Autoscaling with the real HPA controller: it writes the scale of the LLMDeployment, and the operator follows."""

from collections.abc import Iterator
from typing import Any

import pytest

from cluster_kit import Cluster, ControlPlane
from cluster_kit.api import Api, until
from cluster_kit.fault_proxy import FaultProxy
from cluster_kit.kubelet import Kubelet
from cluster_kit.llm import condition, llm
from cluster_kit.metrics_adapter import CUSTOM, EXTERNAL, Question, metrics_adapter
from cluster_kit.operator_process import OperatorProcess, child_rules, grant
from cluster_kit.world import NAME, World
from flyball_operator.cluster.api_server import AUTOSCALER, DEPLOYMENT, LLM_DEPLOYMENT, SERVICE, Kind
from flyball_operator.names import TUNER_LOAD
from flyball_protocol.endpoints import REQUESTS_RUNNING_RATIO, REQUESTS_WAITING

pytestmark = pytest.mark.slow

Object = dict[str, Any]
AT_ONCE: Object = {
    "stabilizationWindowSeconds": 0,
    "policies": [{"type": "Pods", "value": 9, "periodSeconds": 1}],
    "selectPolicy": "Max",
}
BEHAVIOR = {"scaleUp": AT_ONCE, "scaleDown": AT_ONCE}
POD_LABELS = "app.kubernetes.io/component=runtime,app.kubernetes.io/instance=chat,app.kubernetes.io/name=flyball"
SERIES_LABELS = "app_kubernetes_io_instance=chat,namespace={namespace}"
HPA_REFERENCE = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "name": NAME}


@pytest.fixture
def kubelet(api: Api, namespace: str) -> Iterator[Kubelet]:
    with Kubelet(api, namespace) as running:
        yield running


def serves(world: World, replicas: int) -> None:
    """Wait until the spec, the Deployment and the status are all of this many replicas."""

    def found() -> bool:
        resource, deployment = world.get(LLM_DEPLOYMENT) or {}, world.get(DEPLOYMENT) or {}
        wanted = [obj.get("spec", {}).get("replicas") for obj in (resource, deployment)]
        counted = [resource.get("status", {}).get(counter) for counter in ("replicas", "readyReplicas")]
        return wanted + counted == [replicas] * 4

    until(found, f"{replicas} replicas; {world.says()}")


def autoscaling_is(world: World, status: str, reason: str, message: str, desired: int) -> None:
    """Wait until status.autoscaling and its condition are these; the message holds ``message``."""

    def found() -> bool:
        told = condition(world.get(LLM_DEPLOYMENT), "AutoscalingReady")
        wanted = world.says().get("autoscaling", {}).get("desiredReplicas")
        is_so = (told.get("status"), told.get("reason"), wanted) == (status, reason, desired)
        return is_so and message in told["message"]

    until(found, f"AutoscalingReady {status} {reason} {message!r} at {desired}; {world.says()}")


@pytest.mark.parametrize(
    ("metric_type", "asked_of", "selector"),
    [("Pods", CUSTOM, POD_LABELS), ("External", EXTERNAL, SERIES_LABELS)],
    ids=["Pods", "External"],
)
def test_a_queue_adds_replicas_and_its_end_takes_them_back(
    control_plane: ControlPlane,
    operator: OperatorProcess,
    kubelet: Kubelet,
    world: World,
    metric_type: str,
    asked_of: str,
    selector: str,
) -> None:
    unknown, works = f"FailedGet{metric_type}Metric", ("True", "Scaling", "HPA sets the replicas")
    hpa = {"mode": "HPA", "maxReplicas": 4, "targetQueueDepth": 4, "behavior": BEHAVIOR}
    world.create(autoscaling={**hpa, "hpa": {"metricType": metric_type}})
    serves(world, 1)
    autoscaling_is(world, "False", unknown, REQUESTS_WAITING, desired=1)
    assert world.says()["autoscaling"]["targetRef"] == HPA_REFERENCE
    with metrics_adapter(control_plane, world.api, world.namespace) as adapter:
        adapter.totals = {REQUESTS_WAITING: 12, REQUESTS_RUNNING_RATIO: 1}
        serves(world, 3)
        autoscaling_is(world, *works, desired=3)
        adapter.totals = {REQUESTS_WAITING: 0}  # nobody knows whether they are busy: they stay
        autoscaling_is(world, "False", unknown, f"could not find the metric {REQUESTS_RUNNING_RATIO}", desired=3)
        serves(world, 3)
        adapter.totals = {REQUESTS_WAITING: 0, REQUESTS_RUNNING_RATIO: 2.2}  # 73 % of three's limits: they are busy
        autoscaling_is(world, *works, desired=3)
        serves(world, 3)
        adapter.totals = {REQUESTS_WAITING: 0, REQUESTS_RUNNING_RATIO: 0}
        serves(world, 1)
        autoscaling_is(world, *works, desired=1)
    labels = selector.format(namespace=world.namespace)
    assert adapter.asked == {
        Question(asked_of, metric, labels) for metric in (REQUESTS_WAITING, REQUESTS_RUNNING_RATIO)
    }


def test_a_load_that_replicas_cannot_serve_within_the_objectives_adds_replicas(
    control_plane: ControlPlane, operator: OperatorProcess, kubelet: Kubelet, world: World
) -> None:
    hpa = {"mode": "HPA", "maxReplicas": 4, "hpa": {"metricType": "External"}, "behavior": BEHAVIOR}
    tuning = {"mode": "Recommend", "objectives": {"ttftP95Milliseconds": 500}}
    world.create(autoscaling={**hpa, "targetLoadPercent": 80}, tuning=tuning)
    serves(world, 1)
    with metrics_adapter(control_plane, world.api, world.namespace) as adapter:
        idle = {REQUESTS_WAITING: 0.0, REQUESTS_RUNNING_RATIO: 0.0}
        adapter.totals = {**idle, TUNER_LOAD: 1.9}
        serves(world, 3)
        adapter.totals = idle  # the operator restarts: what three replicas were needed for is not known to have ended
        autoscaling_is(world, "False", "FailedGetExternalMetric", f"could not find the metric {TUNER_LOAD}", desired=3)
        serves(world, 3)
        adapter.totals = {**idle, TUNER_LOAD: 0.7}
        serves(world, 1)
    assert Question(EXTERNAL, TUNER_LOAD, f"llmdeployment=chat,namespace={world.namespace}") in adapter.asked


def own_hpa(namespace: str) -> Object:
    """Return a user's HPA on a metric of theirs, with the name that ours would have: ``kubectl autoscale`` gives it."""
    metric = {"name": "tickets", "selector": {"matchLabels": {"team": "a"}}}
    external = {"metric": metric, "target": {"type": "AverageValue", "averageValue": "10"}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"namespace": namespace, "name": NAME},
        "spec": {
            "scaleTargetRef": {"apiVersion": "flyball.dev/v1alpha1", "kind": "LLMDeployment", "name": NAME},
            "minReplicas": 1,
            "maxReplicas": 4,
            "metrics": [{"type": "External", "external": external}],
            "behavior": BEHAVIOR,
        },
    }


def test_an_hpa_of_the_users_own_scales_and_is_left_alone(
    control_plane: ControlPlane, operator: OperatorProcess, kubelet: Kubelet, world: World
) -> None:
    hpa = own_hpa(world.namespace)
    world.create(autoscaling={"mode": "External"})
    serves(world, 1)
    with metrics_adapter(control_plane, world.api, world.namespace) as adapter:
        adapter.totals = {"tickets": 20}
        world.api.create(AUTOSCALER, hpa)
        serves(world, 2)
        autoscaling_is(world, "True", "External", "whoever writes to /scale", desired=2)
        adapter.totals = {"tickets": 0}
        serves(world, 1)
    assert adapter.asked == {Question(EXTERNAL, "tickets", "team=a")}
    left = world.appears(AUTOSCALER)
    assert (left["spec"], "ownerReferences" in left["metadata"]) == (hpa["spec"], False)


def test_replicas_that_somebody_else_wrote_stay(cluster: Cluster, namespace: str, world: World) -> None:
    """By ``kubectl scale``, through the repair of drift, new manifests without replicas, and lists of everything."""
    modes = {"by-hand": "Disabled", "by-others": "External"}

    def apply(**spec: Any) -> None:
        cluster.apply(*(llm(namespace, name, autoscaling={"mode": mode}, **spec) for name, mode in modes.items()))

    def wanted(kind: Kind) -> list[int]:
        return [obj["spec"]["replicas"] for obj in world.api.list(kind, namespace)]

    def scale(replicas: int) -> None:
        cluster.kubectl("-n", namespace, "scale", "llmdep", *modes, f"--replicas={replicas}")
        until(lambda: wanted(DEPLOYMENT) == [replicas] * 2, f"Deployments of {replicas} replicas")

    grant(cluster, namespace, child_rules())
    with (
        FaultProxy(cluster.kubeconfig) as proxy,
        OperatorProcess(cluster, namespace, "--resync-seconds=1", server=proxy.url),
    ):
        apply()
        until(lambda: wanted(DEPLOYMENT) == [1, 1], "Deployments")
        scale(3)
        for name in modes:
            world.api.merge(DEPLOYMENT, namespace, name, {"spec": {"replicas": 5}})
        until(lambda: wanted(DEPLOYMENT) == [3, 3], "the Deployments' repair")
        apply(service={"port": 80})
        for name in modes:
            world.appears(SERVICE, name, where=lambda obj: obj["spec"]["ports"][0]["port"] == 80)
        before = num_lists(proxy)
        until(lambda: num_lists(proxy) >= before + 2, "two more lists")
        assert wanted(LLM_DEPLOYMENT) == wanted(DEPLOYMENT) == [3, 3]
        scale(0)
        written = [path.partition("?")[0] for _, path in proxy.writes() if "/llmdeployments/" in path]
        assert {path.rpartition("/")[2] for path in written} == {"status"}


def num_lists(proxy: FaultProxy) -> int:
    """Return how often all pods were listed."""
    return sum("/pods?" in path and "watch=" not in path for _, path in [*proxy.seen])

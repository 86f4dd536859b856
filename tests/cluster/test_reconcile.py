"""The operator against a real API server: children come, follow the spec, heal and go; nothing else is touched."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster_kit import Cluster
from cluster_kit.api import until
from cluster_kit.fault_proxy import FaultProxy
from cluster_kit.llm import condition
from cluster_kit.operator_process import ACCOUNT, WRITES, OperatorProcess, attentive_options, child_rules, grant
from cluster_kit.world import NAME, World
from flyball_operator.cluster.api_server import (
    AUTOSCALER,
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    EVENT,
    LLM_DEPLOYMENT,
    POD_MONITOR,
    SECRET,
    SERVICE,
)
from flyball_operator.cluster.connection import Connection
from flyball_operator.cluster.monitoring import Metrics
from flyball_operator.cluster.operator import Operator

Object = dict[str, Any]


def test_a_resource_gets_its_children_and_says_so(operator: OperatorProcess, world: World) -> None:
    made = world.create(replicas=2)
    deployment = world.appears(DEPLOYMENT)
    assert deployment["spec"]["replicas"] == 2
    for kind in (SERVICE, DISRUPTION_BUDGET):
        (owner,) = world.appears(kind)["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (made["metadata"]["uid"], True)
    (reference,) = [
        variable["valueFrom"]["secretKeyRef"]
        for variable in deployment["spec"]["template"]["spec"]["containers"][0]["env"]
        if variable["name"] == "FLYBALL_ADMIN_TOKEN"
    ]
    secret = world.appears(SECRET, reference["name"])
    assert secret["immutable"] is True
    (owner,) = secret["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (made["metadata"]["uid"], True)
    status = world.appears(LLM_DEPLOYMENT, where=lambda obj: obj.get("status", {}).get("replicas") == 2)["status"]
    assert status["observedGeneration"] == 1
    assert condition({"status": status}, "Accepted")["status"] == "True"
    until(lambda: any(event["reason"] == "Created" for event in world.api.list(EVENT, world.namespace)), "an Event")
    assert "finalizers" not in (world.get(LLM_DEPLOYMENT) or {})["metadata"]


def test_a_change_of_the_spec_reaches_the_children_and_scaling_does_too(
    operator: OperatorProcess, world: World
) -> None:
    world.create()
    world.appears(DEPLOYMENT)
    world.change(runtime={"maxNumSeqs": 7})
    world.appears(DEPLOYMENT, where=lambda obj: "--max-num-seqs=7" in str(obj))
    world.api.merge(LLM_DEPLOYMENT, world.namespace, NAME, {"spec": {"replicas": 3}}, "scale")
    world.appears(DEPLOYMENT, where=lambda obj: obj["spec"]["replicas"] == 3)
    world.appears(
        LLM_DEPLOYMENT, where=lambda obj: obj["status"]["observedGeneration"] == obj["metadata"]["generation"]
    )


@pytest.mark.slow
def test_a_secret_with_api_keys_is_mounted_under_the_key_that_the_crd_fills_in(
    operator: OperatorProcess, world: World
) -> None:
    world.create(runtime={"apiKeysSecretRef": {"name": "clients"}})
    pod = world.appears(DEPLOYMENT)["spec"]["template"]["spec"]
    (volume,) = (one for one in pod["volumes"] if one["name"] == "api-keys")
    assert volume["secret"]["secretName"] == "clients"
    assert volume["secret"]["items"] == [{"key": "keys", "path": "keys"}]
    assert "--api-key-file=/etc/flyball/api-keys/keys" in pod["containers"][0]["args"]
    world.change(runtime={"apiKeysSecretRef": None})
    world.appears(DEPLOYMENT, where=lambda obj: "api-key" not in str(obj["spec"]))


@pytest.mark.slow
def test_a_child_that_is_no_longer_wanted_goes(operator: OperatorProcess, world: World) -> None:
    world.create(replicas=2, autoscaling={"mode": "HPA", "maxReplicas": 4})
    world.appears(AUTOSCALER)
    world.appears(LLM_DEPLOYMENT, where=lambda obj: condition(obj, "AutoscalingReady"))
    world.change(autoscaling=None)
    world.goes(AUTOSCALER)
    world.appears(LLM_DEPLOYMENT, where=lambda obj: not condition(obj, "AutoscalingReady"))
    assert world.get(SERVICE) is not None


def test_drift_is_repaired(operator: OperatorProcess, world: World) -> None:
    world.create()
    world.appears(DEPLOYMENT)
    before = world.appears(SERVICE)["metadata"]["uid"]
    world.api.merge(DEPLOYMENT, world.namespace, NAME, {"spec": {"replicas": 5}})
    world.appears(DEPLOYMENT, where=lambda obj: obj["spec"]["replicas"] == 1)
    world.api.merge(DEPLOYMENT, world.namespace, NAME, {"metadata": {"labels": None}})
    world.appears(DEPLOYMENT, where=lambda obj: "flyball-operator" in obj["metadata"].get("labels", {}).values())
    world.api.delete(SERVICE, world.namespace, NAME)
    world.appears(SERVICE, where=lambda obj: obj["metadata"]["uid"] != before)
    edit(world, {"op": "remove", "path": "/spec/template/spec/automountServiceAccountToken"})
    pod = "automountServiceAccountToken"
    world.appears(DEPLOYMENT, where=lambda obj: obj["spec"]["template"]["spec"].get(pod) is False)


@pytest.mark.slow
def test_what_others_add_stays_and_is_not_fought_over(operator: OperatorProcess, world: World) -> None:
    world.create()
    world.appears(DEPLOYMENT)
    restarted = {"kubectl.kubernetes.io/restartedAt": "2026-11-21T10:00:00Z"}
    world.api.merge(DEPLOYMENT, world.namespace, NAME, {"spec": {"template": {"metadata": {"annotations": restarted}}}})
    added = {"name": "ADDED", "value": "1"}
    edit(world, {"op": "add", "path": "/spec/template/spec/containers/0/env/-", "value": added})
    edit(world, {"op": "add", "path": "/spec/template/spec/containers/-", "value": {"name": "beside", "image": "x"}})
    operator.wait_at_rest()
    edit(world, {"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": "another"})
    deployment = world.appears(
        DEPLOYMENT, where=lambda obj: containers(obj)["runtime"]["image"] == "localhost/runtime:1"
    )
    assert deployment["spec"]["template"]["metadata"]["annotations"].items() >= restarted.items()
    assert added in containers(deployment)["runtime"]["env"]
    assert "beside" in containers(deployment)


def edit(world: World, change: Object) -> None:
    """Change the Deployment by hand."""
    world.api.patch(DEPLOYMENT, world.namespace, NAME, [change], "application/json-patch+json")


def containers(deployment: Object) -> dict[str, Object]:
    return {one["name"]: one for one in deployment["spec"]["template"]["spec"]["containers"]}


@pytest.mark.slow
def test_a_foreign_object_with_a_childs_name_is_left_alone_until_it_goes(
    operator: OperatorProcess, world: World
) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME, "namespace": world.namespace},
        "spec": {"ports": [{"port": 1}]},
    }
    made = world.api.create(SERVICE, foreign)
    world.create()
    assert "Service chat exists and is not this LLMDeployment's" in world.ready_is("NameConflict")["message"]
    assert condition(world.get(LLM_DEPLOYMENT), "Accepted")["reason"] == "NameConflict"
    assert world.get(SERVICE) == made
    assert world.get(DEPLOYMENT) is not None, "the other children are made all the same"
    world.api.delete(SERVICE, world.namespace, NAME)
    world.appears(SERVICE, where=lambda obj: obj["spec"]["ports"][0]["port"] == 8000)
    until(lambda: condition(world.get(LLM_DEPLOYMENT), "Accepted")["status"] == "True", "Accepted again")


@pytest.mark.slow
def test_a_foreign_object_with_our_labels_is_left_alone_too(operator: OperatorProcess, world: World) -> None:
    labels = {"app.kubernetes.io/managed-by": "flyball-operator", "app.kubernetes.io/instance": NAME}
    metadata = {"name": NAME, "namespace": world.namespace, "labels": labels}
    made = world.api.create(
        SERVICE, {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": [{"port": 1}]}}
    )
    other = world.api.create(
        CONFIG_MAP, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {**metadata, "name": "mine"}}
    )
    world.create()
    world.ready_is("NameConflict")
    assert (world.get(SERVICE), world.get(CONFIG_MAP, "mine")) == (made, other)


@pytest.mark.slow
def test_suspend_stops_all_writes_but_the_status(operator: OperatorProcess, world: World) -> None:
    world.create()
    world.appears(DEPLOYMENT)
    world.change(suspend=True)
    world.ready_is("Suspended")
    world.change(replicas=4)
    world.api.delete(SERVICE, world.namespace, NAME)
    world.appears(
        LLM_DEPLOYMENT, where=lambda obj: obj["status"]["observedGeneration"] == obj["metadata"]["generation"]
    )
    assert (world.get(SERVICE), (world.get(DEPLOYMENT) or {})["spec"]["replicas"]) == (None, 1)
    world.change(suspend=False)
    world.appears(SERVICE)
    world.appears(DEPLOYMENT, where=lambda obj: obj["spec"]["replicas"] == 4)


def test_a_deleted_resource_takes_its_children_along_and_may_come_back(operator: OperatorProcess, world: World) -> None:
    """Also while it is being reconciled: the second one meets what the garbage collector has not removed yet."""
    for _ in range(3):
        made = world.create()
        world.api.delete(LLM_DEPLOYMENT, world.namespace, NAME)
    made = world.create()
    uid = made["metadata"]["uid"]
    for kind in (DEPLOYMENT, SERVICE):
        world.appears(kind, where=lambda obj: obj["metadata"]["ownerReferences"][0]["uid"] == uid)
    until(lambda: condition(world.get(LLM_DEPLOYMENT), "Accepted").get("status") == "True", "Accepted")
    (token,) = [one["metadata"]["name"] for one in world.api.list(SECRET, world.namespace) if is_owned(one, uid)]
    world.api.delete(LLM_DEPLOYMENT, world.namespace, NAME)
    for kind in (DEPLOYMENT, SERVICE):
        world.goes(kind)
    world.goes(SECRET, token)
    assert operator.is_running


def is_owned(obj: Object, uid: str) -> bool:
    return any(owner["uid"] == uid for owner in obj["metadata"].get("ownerReferences", []))


@pytest.mark.slow
def test_at_rest_nothing_is_written(cluster: Cluster, namespace: str, world: World) -> None:
    """Counted on the way to the API server, with a list of everything each second on top."""
    grant(cluster, namespace, child_rules())
    with (
        FaultProxy(cluster.kubeconfig) as proxy,
        OperatorProcess(cluster, namespace, "--resync-seconds=1", server=proxy.url) as operator,
    ):
        for number in range(5):
            world.create(f"chat-{number}", replicas=2, autoscaling={"mode": "HPA", "maxReplicas": 4})
        world.appears(AUTOSCALER, "chat-4")
        operator.wait_at_rest()

        def writes_nothing() -> bool:
            proxy.seen.clear()
            until(lambda: sum("/pods" in path for _, path in proxy.seen) >= 5, "five more lists")
            return proxy.writes() == []

        until(writes_nothing, "five lists without a write")


@pytest.mark.slow
def test_a_restart_writes_nothing(cluster: Cluster, namespace: str, world: World) -> None:
    grant(cluster, namespace, child_rules())
    with OperatorProcess(cluster, namespace) as first:
        world.create(replicas=2, autoscaling={"mode": "HPA", "maxReplicas": 4})
        world.appears(AUTOSCALER)
        first.wait_at_rest()
        first.kill()
    with FaultProxy(cluster.kubeconfig) as proxy, OperatorProcess(cluster, namespace, server=proxy.url) as second:
        second.wait_at_rest()
        assert [path for _, path in proxy.writes() if "selfsubjectaccessreviews" not in path] == []
        assert second.calls("list")["list pods"] >= 1


@pytest.mark.slow
def test_one_of_two_operators_acts_and_the_other_takes_over(cluster: Cluster, namespace: str, world: World) -> None:
    grant(cluster, namespace, child_rules())
    with (
        OperatorProcess(cluster, namespace, "--lease-seconds=6", identity="one") as one,
        OperatorProcess(cluster, namespace, "--lease-seconds=6", identity="two") as two,
    ):
        world.create("first")
        world.appears(DEPLOYMENT, "first")
        assert (one.is_leader, two.is_leader) == (True, False)
        assert two.calls(*WRITES, "list") == {}
        one.kill()
        world.create("second")
        world.appears(DEPLOYMENT, "second")
        assert two.is_leader


@pytest.mark.slow
def test_a_leader_that_is_asked_to_go_hands_over_at_once(cluster: Cluster, namespace: str, world: World) -> None:
    grant(cluster, namespace, child_rules())
    long = "--lease-seconds=600"
    with (
        OperatorProcess(cluster, namespace, long, identity="one") as one,
    ):
        assert one.stop() == 0
        with OperatorProcess(cluster, namespace, long, identity="two") as two:
            until(lambda: two.is_leader, "the lease")


@pytest.mark.slow
def test_a_leader_that_loses_the_lease_ends_with_an_error(
    cluster: Cluster, namespace: str, operator: OperatorProcess
) -> None:
    cluster.kubectl(
        *("-n", namespace, "patch", "lease", "flyball-operator", "--type=merge"),
        *("-p", '{"spec": {"holderIdentity": "somebody-else"}}'),
    )
    assert operator.wait() != 0
    assert "was taken by somebody-else" in operator.log


@pytest.fixture
def install_pod_monitor(cluster: Cluster) -> Iterator[Callable[[], None]]:
    """Installs the kind PodMonitor, which goes with the test."""
    metadata = {"name": "podmonitors.monitoring.coreos.com"}
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    names = {"kind": "PodMonitor", "plural": "podmonitors"}
    spec = {"group": "monitoring.coreos.com", "scope": "Namespaced", "names": names, "versions": [version]}
    kind = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}

    def install() -> None:
        cluster.apply({**kind, "metadata": metadata, "spec": spec})
        cluster.wait_established(f"crd/{metadata['name']}")

    yield install
    cluster.kubectl("delete", "crd", metadata["name"], "--ignore-not-found")


@pytest.mark.slow
def test_kinds_that_not_every_cluster_has_are_used_where_they_are(
    cluster: Cluster, namespace: str, world: World, install_pod_monitor: Callable[[], None]
) -> None:
    grant(cluster, namespace, child_rules())
    with OperatorProcess(cluster, namespace):
        world.create("without", monitoring={"podMonitor": "Enabled"})
        assert "install the Prometheus operator" in world.ready_is("MissingKind", "without")["message"]
        assert world.appears(SERVICE, "without")
    install_pod_monitor()
    with OperatorProcess(cluster, namespace):
        world.create("with")
        world.appears(POD_MONITOR, "with")
        world.change("with", monitoring={"podMonitor": "Disabled"})
        world.goes(POD_MONITOR, "with")
        world.appears(POD_MONITOR, "without")


@pytest.mark.slow
def test_a_kind_that_comes_later_is_watched_from_then_on(
    cluster: Cluster,
    namespace: str,
    world: World,
    install_pod_monitor: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this process, because a look at what the cluster offers each minute is too seldom for a test."""
    grant(cluster, namespace, child_rules())
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig_of(namespace, ACCOUNT)))
    options = attentive_options(namespace)

    metrics = Metrics()
    watches = {"verb": "watch", "resource": "podmonitors.monitoring.coreos.com", "code": "200"}

    def user() -> None:
        world.create()
        world.appears(SERVICE)
        install_pod_monitor()
        before = world.appears(POD_MONITOR)["metadata"]["uid"]
        until(lambda: metrics.registry.get_sample_value("flyball_operator_api_calls_total", watches), "a watch")
        world.api.delete(POD_MONITOR, namespace, NAME)
        world.appears(POD_MONITOR, where=lambda obj: obj["metadata"]["uid"] != before)
        world.change(monitoring={"podMonitor": "Disabled"})
        world.goes(POD_MONITOR)

    async def scenario() -> None:
        running = asyncio.create_task(Operator(await Connection.find(metrics), metrics, options).run())
        try:
            await asyncio.to_thread(user)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())

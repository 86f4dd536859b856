"""Bad input and a bad API server: every trouble has a name, and ends when its cause does."""

import json
import random
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from cluster_kit import Cluster, ControlPlane
from cluster_kit.api import until
from cluster_kit.fault_proxy import Fault, FaultProxy
from cluster_kit.llm import condition
from cluster_kit.operator_process import OperatorProcess, child_rules, grant
from cluster_kit.world import NAME, World
from flyball_operator.cluster.api_server import DEPLOYMENT, LLM_DEPLOYMENT, POD, SECRET, SERVICE

pytestmark = pytest.mark.slow

Object = dict[str, Any]
LONGEST = "a" * 50


def without(resource: str) -> list[Object]:
    """The operator's rules but those on one resource."""
    return [
        {**rule, "resources": kept}
        for rule in child_rules()
        if (kept := [one for one in rule["resources"] if one != resource])
    ]


def rules_to_read(resource: str) -> list[Object]:
    """The operator's rules, but that it may only read one resource and those beside it."""
    return [
        {**rule, "verbs": ["get", "list", "watch"]} if resource in rule["resources"] else rule for rule in child_rules()
    ]


def test_a_pod_template_that_the_api_server_refuses(operator: OperatorProcess, world: World) -> None:
    world.create(podTemplate={"spec": {"priorityClassName": "none", "nodeSelektor": {"a": "b"}}})
    assert "nodeSelektor" in world.ready_is("InvalidPodTemplate")["message"]
    assert condition(world.get(LLM_DEPLOYMENT), "Accepted")["status"] == "False"
    world.change(podTemplate=None)
    world.appears(DEPLOYMENT)
    until(lambda: condition(world.get(LLM_DEPLOYMENT), "Accepted")["status"] == "True", "Accepted")


def test_errors_of_users_are_no_failures_of_the_operator(operator: OperatorProcess, world: World) -> None:
    """What operations.md says to alert on counts the operator's own trouble; errors of users have a number of their own."""
    foreign = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "taken", "namespace": world.namespace}}
    world.api.create(SERVICE, {**foreign, "spec": {"ports": [{"port": 1}]}})
    world.create("taken")
    world.create("typo", podTemplate={"spec": {"nodeSelektor": {"a": "b"}}})
    world.create("spec", podTemplate={"spec": {"securityContext": "none"}})
    world.create("kind", monitoring={"podMonitor": "Enabled"})
    for reason, name in (
        ("NameConflict", "taken"),
        ("InvalidPodTemplate", "typo"),
        ("InvalidSpec", "spec"),
        ("MissingKind", "kind"),
    ):
        world.ready_is(reason, name)
    operator.wait_at_rest()
    assert operator.metric("flyball_operator_queue_retries") == 0
    until(lambda: operator.metric("flyball_operator_refused") == 3, "three; a missing kind is no fault of the spec")
    world.change("typo", podTemplate=None)
    world.appears(DEPLOYMENT, "typo")
    until(lambda: operator.metric("flyball_operator_refused") == 2, "two")


def test_a_right_that_is_missing_counts_as_a_failure(cluster: Cluster, namespace: str, world: World) -> None:
    grant(cluster, namespace, rules_to_read("services"))
    with OperatorProcess(cluster, namespace) as operator:
        world.create()
        world.ready_is("MissingPermission")
        until(lambda: operator.metric("flyball_operator_queue_retries") == 1, "a retry")


def test_a_bad_value_in_the_pod_template_says_where(operator: OperatorProcess, world: World) -> None:
    world.create(podTemplate={"spec": {"terminationGracePeriodSeconds": 10, "dnsPolicy": "Sometimes"}})
    assert "dnsPolicy" in world.ready_is("InvalidPodTemplate")["message"]


def test_a_right_that_is_missing_is_named_and_the_rest_goes_on(cluster: Cluster, namespace: str, world: World) -> None:
    grant(cluster, namespace, rules_to_read("services"))
    with OperatorProcess(cluster, namespace):
        world.create()
        message = world.ready_is("MissingPermission")["message"]
        assert 'cannot patch resource "services"' in message
        assert message.endswith("Grant patch on services")
        assert world.get(DEPLOYMENT) is not None
        grant(cluster, namespace, child_rules())
        world.change(replicas=2)
        world.appears(SERVICE)


def test_a_right_to_watch_that_is_missing_is_waited_for(cluster: Cluster, namespace: str, world: World) -> None:
    grant(cluster, namespace, without("poddisruptionbudgets"))
    process = OperatorProcess(cluster, namespace).start()
    try:
        right = f"list poddisruptionbudgets.policy in namespace {namespace}"
        until(lambda: process.waits_for(right), f"the word of {right}")
        grant(cluster, namespace, child_rules())
        process.wait_ready()
    finally:
        process.kill()


def test_the_crd_may_come_later(control_plane: ControlPlane, namespace: str, world: World, crds: Any) -> None:
    grant(control_plane, namespace, child_rules())
    control_plane.kubectl("delete", "crd", "llmdeployments.flyball.dev")
    process = OperatorProcess(control_plane, namespace).start()
    try:
        until(
            lambda: process.waits_for("the CustomResourceDefinition llmdeployments.flyball.dev"), "the word of the CRD"
        )
        assert httpx.get(f"http://127.0.0.1:{process.port}/livez").status_code == 200
    finally:
        crds(control_plane)
    try:
        process.wait_ready()
        world.create()
        world.appears(DEPLOYMENT)
    finally:
        process.kill()


def test_the_api_server_may_be_gone_for_a_while(control_plane: ControlPlane, namespace: str, world: World) -> None:
    grant(control_plane, namespace, child_rules())
    with OperatorProcess(control_plane, namespace, "--lease-seconds=600") as operator:
        world.create("before")
        world.appears(DEPLOYMENT, "before")
        control_plane.stop_apiserver()
        try:
            time.sleep(3)
            assert operator.is_running
            assert httpx.get(f"http://127.0.0.1:{operator.port}/livez").status_code == 200
        finally:
            control_plane.start_apiserver()
        world.create("after")
        world.appears(DEPLOYMENT, "after")
        world.change("before", replicas=2)
        world.appears(DEPLOYMENT, "before", where=lambda obj: obj["spec"]["replicas"] == 2)


@pytest.mark.parametrize(
    "fault", [Fault(500), Fault(429, retry_after="1"), Fault(409), Fault(503), Fault(0, delay_s=0.3)]
)
def test_an_api_server_that_errs_is_asked_again(cluster: Cluster, namespace: str, world: World, fault: Fault) -> None:
    """One call in four fails, those of the start too. Not the lease's; and what only writes can be answered, reads are not."""
    grant(cluster, namespace, child_rules())
    rng = random.Random(1)

    def some(method: str, path: str) -> Fault | None:
        is_spared = "/leases" in path or (fault.status == 409 and method == "GET")
        return fault if not is_spared and rng.random() < 0.25 else None

    with FaultProxy(cluster.kubeconfig) as proxy:
        proxy.faults = some
        with OperatorProcess(cluster, namespace, server=proxy.url):
            for index in range(2):
                world.create(f"chat-{index}")
            for index in range(2):
                world.appears(SERVICE, f"chat-{index}")
                world.appears(LLM_DEPLOYMENT, f"chat-{index}", where=lambda obj: condition(obj, "Accepted"))


def test_an_api_server_that_asks_for_patience_gets_it(cluster: Cluster, namespace: str, world: World) -> None:
    grant(cluster, namespace, child_rules())
    refused: list[float] = []

    def refuse_services(method: str, path: str) -> Fault | None:
        if method == "PATCH" and "/services/" in path and len(refused) < 2:
            refused.append(time.monotonic())
            return Fault(429, retry_after="2")
        return None

    with FaultProxy(cluster.kubeconfig) as proxy, OperatorProcess(cluster, namespace, server=proxy.url):
        proxy.faults = refuse_services
        world.create()
        world.appears(SERVICE)
        assert refused[1] - refused[0] >= 2


@contextmanager
def watches_down(proxy: FaultProxy, part: str) -> Iterator[None]:
    """Expire every watch; until the end of the block, those whose list has ``part`` in its path do not come back."""
    until(lambda: proxy.num_watches == 9, "a watch for each kind")
    proxy.faults = lambda method, path: Fault(500) if method == "GET" and part in path else None
    proxy.expire_watches()
    yield
    proxy.faults = lambda method, path: None


def test_watches_that_expire_lose_nothing(cluster: Cluster, namespace: str, world: World) -> None:
    """What is deleted while a watch is down is told by no watch: the periodic list finds it."""
    grant(cluster, namespace, child_rules())
    with (
        FaultProxy(cluster.kubeconfig) as proxy,
        OperatorProcess(cluster, namespace, "--resync-seconds=2", server=proxy.url),
    ):
        world.create()
        before = world.appears(SERVICE)["metadata"]["uid"]
        with watches_down(proxy, "/services"):
            world.api.delete(SERVICE, world.namespace, NAME)
            world.create("second")
            world.appears(DEPLOYMENT, "second")
        world.appears(SERVICE, where=lambda obj: obj["metadata"]["uid"] != before)


def test_watches_that_break_are_opened_again(cluster: Cluster, namespace: str, world: World) -> None:
    """Each by itself, with a list of what was missed."""
    grant(cluster, namespace, child_rules())
    with FaultProxy(cluster.kubeconfig) as proxy, OperatorProcess(cluster, namespace, server=proxy.url) as operator:
        world.create()
        before = world.appears(SERVICE)["metadata"]["uid"]
        until(lambda: proxy.num_watches == 9, "a watch for each kind")
        proxy.faults = lambda method, path: Fault(500) if method == "GET" and "/services?" in path else None
        proxy.break_watches()
        until(lambda: "the watch of services in" in operator.log, "the word of the watch")
        world.api.delete(SERVICE, namespace, NAME)
        proxy.faults = lambda method, path: None
        world.appears(SERVICE, where=lambda obj: obj["metadata"]["uid"] != before)
        world.create("second")
        world.appears(DEPLOYMENT, "second")
        until(lambda: proxy.num_watches == 9, "all watches again")
        assert "injected by the test" in operator.log
        assert operator.stop() == 0, "Kopf's handlers of signals are not left behind"
        assert "Traceback" not in operator.log


def test_the_crd_may_go_and_come_again(control_plane: ControlPlane, namespace: str, world: World, crds: Any) -> None:
    grant(control_plane, namespace, child_rules())
    with OperatorProcess(control_plane, namespace) as operator:
        world.create()
        world.appears(SERVICE)
        try:
            control_plane.kubectl("delete", "crd", "llmdeployments.flyball.dev")
            missing = "the CustomResourceDefinition llmdeployments.flyball.dev"
            until(lambda: operator.waits_for(missing), "the word of the CRD")
            assert operator.metric("flyball_operator_llmdeployments") == 0
        finally:
            crds(control_plane)
        operator.wait_ready()
        world.goes(SERVICE)
        world.create()
        world.appears(SERVICE)
        assert "Traceback" not in operator.log


def test_a_resource_whose_end_no_watch_told_of_is_forgotten(cluster: Cluster, namespace: str, world: World) -> None:
    """At the first news of a child, and long before the next list."""
    grant(cluster, namespace, child_rules())
    with FaultProxy(cluster.kubeconfig) as proxy, OperatorProcess(cluster, namespace, server=proxy.url) as operator:
        world.create()
        world.appears(LLM_DEPLOYMENT, where=lambda obj: condition(obj, "Accepted"))
        with watches_down(proxy, "/llmdeployments?"):
            cluster.kubectl("-n", namespace, "delete", "llmdep", NAME, "--cascade=orphan")
        until(lambda: operator.metric("flyball_operator_llmdeployments") == 0, "an operator that forgot it")
        operator.wait_at_rest()


def test_a_child_whose_end_no_watch_told_of_is_missed_at_the_next_change(
    cluster: Cluster, namespace: str, world: World
) -> None:
    """Long before the next list."""
    grant(cluster, namespace, child_rules())
    with FaultProxy(cluster.kubeconfig) as proxy, OperatorProcess(cluster, namespace, server=proxy.url):
        world.create()
        world.appears(SERVICE)
        with watches_down(proxy, "/services?"):
            world.api.delete(SERVICE, world.namespace, NAME)
        world.change(service={"port": 9000})
        world.appears(SERVICE, where=lambda obj: obj["spec"]["ports"][0]["port"] == 9000)


def test_a_name_that_became_free_and_no_watch_told_is_taken(cluster: Cluster, namespace: str, world: World) -> None:
    """The same goes for a child of an earlier LLMDeployment of the name."""
    labels = {"app.kubernetes.io/managed-by": "flyball-operator", "app.kubernetes.io/instance": NAME}
    metadata = {"name": NAME, "namespace": namespace, "labels": labels}
    foreign = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": [{"port": 1}]}}
    grant(cluster, namespace, child_rules())
    world.api.create(SERVICE, foreign)
    with FaultProxy(cluster.kubeconfig) as proxy, OperatorProcess(cluster, namespace, server=proxy.url):
        world.create()
        world.ready_is("NameConflict")
        with watches_down(proxy, "/services?"):
            world.api.delete(SERVICE, namespace, NAME)
        world.appears(SERVICE, where=lambda obj: "ownerReferences" in obj["metadata"])


def test_a_change_that_a_status_write_learns_of_first_is_carried_out(
    cluster: Cluster, namespace: str, world: World
) -> None:
    """The answer to the write has the new spec, and the watch brings nothing newer."""
    grant(cluster, namespace, child_rules())
    with FaultProxy(cluster.kubeconfig) as proxy, OperatorProcess(cluster, namespace, server=proxy.url):
        world.create()
        world.appears(SERVICE)
        (pod,) = until(lambda: world.api.list(POD, world.namespace), "a pod")
        with watches_down(proxy, "/llmdeployments?"):
            world.change(service={"port": 9000})
            write_state(
                world, pod, {"waiting": {"reason": "CreateContainerConfigError", "message": "a missing secret"}}
            )
            world.ready_is("MissingReference")
        world.appears(SERVICE, where=lambda obj: obj["spec"]["ports"][0]["port"] == 9000)


def test_a_missing_secret_is_named_until_it_appears(operator: OperatorProcess, world: World) -> None:
    """There is no kubelet here, so the test writes what one would."""
    world.create(model={"uri": "hf://org/name", "secretRef": {"name": "hub"}})
    world.appears(DEPLOYMENT)
    (pod,) = until(lambda: world.api.list(POD, world.namespace), "a pod")
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}
    write_state(world, pod, {"waiting": waiting})
    assert 'secret "hub" not found' in world.ready_is("MissingReference")["message"]
    write_state(world, pod, {"running": {"startedAt": "2026-11-21T10:00:00Z"}})
    world.ready_is("ModelDownload")


def test_a_quota_that_leaves_no_room_for_the_admin_token_is_named(
    cluster: Cluster, operator: OperatorProcess, world: World
) -> None:
    metadata = {"name": "small", "namespace": world.namespace}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": {"secrets": "1"}}}
    cluster.apply(quota)  # the one is the operator's key
    cluster.wait("jsonpath={.status.used.secrets}=1", "resourcequota/small", "-n", world.namespace)
    world.create()
    assert "exceeded quota: small" in world.ready_is("Refused")["message"]
    assert world.get(DEPLOYMENT) is None, "its pods could not start"
    cluster.kubectl("-n", world.namespace, "delete", "resourcequota", "small")
    world.appears(DEPLOYMENT)


def test_a_webhook_of_the_cluster_that_gives_no_answer_is_named(
    cluster: Cluster, operator: OperatorProcess, world: World
) -> None:
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["services"]}
    webhook = {
        "name": "policy.example.com",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [rule],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": world.namespace}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration"}
    cluster.apply({**kind, "metadata": {"name": world.namespace}, "webhooks": [webhook]})
    try:
        until(lambda: is_stopped(world), "a webhook in force")
        world.create()
        assert '"policy.example.com"' in world.ready_is("WebhookFailed")["message"]
        assert condition(world.get(LLM_DEPLOYMENT), "Accepted")["status"] == "True"
        assert world.get(DEPLOYMENT) is not None
    finally:
        cluster.kubectl("delete", "validatingwebhookconfiguration", world.namespace)
    world.appears(SERVICE)


def is_stopped(world: World) -> bool:
    """Whether a Service cannot be made."""
    metadata = {"name": "probe", "namespace": world.namespace}
    try:
        world.api.create(
            SERVICE, {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": [{"port": 1}]}}
        )
    except AssertionError as refused:
        return "failed calling webhook" in str(refused)
    world.api.delete(SERVICE, world.namespace, "probe")
    return False


@pytest.fixture
def node(cluster: Cluster) -> Iterator[str]:
    """A node that takes only pods that tolerate everything. Nothing runs on it."""
    name = f"node-{uuid.uuid4().hex[:6]}"
    amounts = {"cpu": "8", "memory": "16Gi", "pods": "10", "ephemeral-storage": "1Gi"}
    taints = [{"key": "only-for-a-test", "effect": "NoSchedule"}]
    metadata = {"name": name}
    cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": taints}})
    status = {"status": {"capacity": amounts, "allocatable": amounts}}
    cluster.kubectl("patch", "node", name, "--subresource=status", "--type=merge", f"--patch={json.dumps(status)}")
    yield name
    cluster.kubectl("delete", "node", name)


TOLERANT = {"spec": {"tolerations": [{"operator": "Exists"}]}}


def test_a_gpu_that_nobody_has(operator: OperatorProcess, world: World, node: str) -> None:
    world.create(accelerator={"count": 1}, runtime={}, podTemplate=TOLERANT)
    assert "Insufficient nvidia.com/gpu" in world.ready_is("InsufficientGPU")["message"]
    assert condition(world.get(LLM_DEPLOYMENT), "Degraded")["reason"] == "InsufficientGPU"


def test_a_missing_claim_is_named_until_it_appears(
    cluster: Cluster, operator: OperatorProcess, world: World, node: str
) -> None:
    world.create(model={"uri": "pvc://weights/llama"}, podTemplate=TOLERANT)
    assert 'persistentvolumeclaim "weights" not found' in world.ready_is("MissingClaim")["message"]
    room = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}
    volume = {**room, "capacity": {"storage": "1Gi"}, "hostPath": {"path": "/nowhere"}}
    claim = {**room, "resources": {"requests": {"storage": "1Gi"}}, "volumeName": node}
    cluster.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": node}, "spec": volume},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "weights", "namespace": world.namespace},
            "spec": claim,
        },
    )
    world.ready_is("Starting")
    cluster.kubectl("delete", "pv", node, "--wait=false")


def test_the_admin_tokens_secret_is_made_again_when_a_pod_misses_it(operator: OperatorProcess, world: World) -> None:
    world.create()
    env = world.appears(DEPLOYMENT)["spec"]["template"]["spec"]["containers"][0]["env"]
    (name,) = (one["valueFrom"]["secretKeyRef"]["name"] for one in env if one["name"] == "FLYBALL_ADMIN_TOKEN")
    first = world.appears(SECRET, name)
    world.api.delete(SECRET, world.namespace, name)
    (pod,) = until(lambda: world.api.list(POD, world.namespace), "a pod")
    message = f'secret "{name}" not found'
    write_state(world, pod, {"waiting": {"reason": "CreateContainerConfigError", "message": message}})
    assert world.appears(SECRET, name)["data"] == first["data"]


def write_state(world: World, pod: Object, state: Object) -> None:
    image = {"image": "x", "imageID": "x", "restartCount": 0, "ready": False, "started": False}
    if "nodeName" not in pod["spec"]:
        world.api.bind(world.namespace, pod["metadata"]["name"], "node1")
        pod["spec"]["nodeName"] = "node1"
    status = {"phase": "Pending", "containerStatuses": [{"name": "runtime", "state": state, **image}]}
    world.api.merge(POD, world.namespace, pod["metadata"]["name"], {"status": status}, "status")


def test_the_longest_names_do_not_meet(operator: OperatorProcess, world: World) -> None:
    """They differ in the last character only, where a name that is cut to fit would lose it."""
    autoscaling = {"mode": "HPA", "maxReplicas": 3}
    names = [LONGEST[:-1] + end for end in "bc"]
    for name in names:
        world.create(
            name,
            replicas=2,
            autoscaling=autoscaling,
            model={"uri": "hf://a/b", "cache": {"mode": "Claim", "size": "1Gi"}},
        )
    for name in names:
        world.appears(DEPLOYMENT, name)
        until(lambda name=name: condition(world.get(LLM_DEPLOYMENT, name), "Accepted").get("status") == "True", name)
    owners = {child["metadata"]["ownerReferences"][0]["name"] for child in world.api.list(SERVICE, world.namespace)}
    assert owners == set(names)


def test_300_random_specs_end_in_children_or_in_a_reason(operator: OperatorProcess, world: World) -> None:
    rng = random.Random(4)
    taken: list[str] = []
    for number in range(3000):
        if try_to_create(world, name := f"chat-{number}", random_spec(rng)):
            taken.append(name)
        if len(taken) == 300:
            break
    assert len(taken) == 300, "specs that got past the CRD's own rules"
    for name in taken:
        until(lambda name=name: has_ended(world, name), f"an end of {name}: {world.says(name)}")
    operator.wait_at_rest()
    errors = [line for line in operator.log.splitlines() if "a bug in the operator" in line]
    assert errors == []


def has_ended(world: World, name: str) -> bool:
    """Children, or a reason why not."""
    accepted = condition(world.get(LLM_DEPLOYMENT, name), "Accepted")
    if accepted.get("status") == "True":
        return world.get(DEPLOYMENT, name) is not None and world.get(SERVICE, name) is not None
    return bool(accepted) and bool(accepted["message"])


def try_to_create(world: World, name: str, spec: Object) -> bool:
    """Return whether the API server let it through."""
    try:
        world.create(name, **spec)
    except AssertionError as refused:
        assert " 422 " in str(refused) or " 400 " in str(refused)
        return False
    return True


def random_spec(rng: random.Random) -> Object:
    """Valid values, values at the edge, and now and then nonsense."""
    choices: dict[str, list[Any]] = {
        "model": [
            {"uri": "hf://org/name"},
            {"uri": "hf://org/name", "revision": "main", "secretRef": {"name": "hub"}},
            {"uri": "pvc://claim/folder"},
            {"uri": "oci://registry/model:1"},
            {"uri": "hf://org/name", "cache": {"mode": "Claim", "size": "5Gi"}},
            {"uri": "hf://org/name", "cache": {"mode": "Claim", "claimName": "mine"}},
            {"uri": "pvc://UPPER/folder"},
            {"uri": "oci://bad reference"},
            {"uri": "hf://a/b/c/d"},
        ],
        "replicas": [0, 1, 2, 5],
        "resources": [
            {"limits": {"memory": "1Gi", "cpu": "500m"}},
            {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}},
            {"limits": {"ephemeral-storage": "1Gi"}},
            {"limits": {"no such/resource": "1"}},
        ],
        "autoscaling": [
            {"mode": "HPA", "maxReplicas": 3},
            {"mode": "KEDA", "maxReplicas": 3},
            {"mode": "External"},
            {"mode": "HPA", "minReplicas": 3, "maxReplicas": 2},
        ],
        "service": [{"type": "NodePort"}, {"port": 80}, {"annotations": {"a/b": "c"}}, {"annotations": {"a b": "c"}}],
        "rollout": [
            {"maxSurge": 0, "maxUnavailable": 1},
            {"drain": {"timeoutSeconds": 1}},
            {"progressDeadlineSeconds": 5},
        ],
        "networkPolicy": [{"mode": "Managed"}, {"mode": "Managed", "ingressFrom": [{"podSelector": {}}]}],
        "podTemplate": [
            {"spec": {"nodeSelector": {"a": "b"}}},
            {"spec": {"nodeSelector": {"a": 1}}},
            {"spec": {"containers": [{"name": "runtime", "env": [{"name": "A", "value": "b"}]}]}},
            {"spec": {"containers": [{"name": "runtime", "env": [{"name": "A", "valu": "b"}]}]}},
            {"spec": {"containers": [{"image": "nameless"}]}},
            {"spec": {"tolerations": "all"}},
            {"metadata": {"labels": {"app.kubernetes.io/instance": "other"}}},
            {"spec": {"volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory"}}]}},
            {"nonsense": 1},
        ],
        "startupTimeoutSeconds": [60, 14400],
        "monitoring": [{"podMonitor": "Enabled"}, {"podMonitor": "Disabled"}, {"labels": {"release": "prometheus"}}],
        "suspend": [False],
    }
    return {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.4}

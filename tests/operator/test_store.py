"""The store keeps what it is told, under the deployment it belongs to."""

from typing import Any

from msgspec import structs

from flyball_operator.cluster.store import MAX_ENDED, Store
from flyball_operator.observed import Child, Container, Key, Pod, Resource, Terminated, Waiting

KEY = Key("team", "chat")


def pod(node: str | None = "node1", **status: Any) -> Pod:
    labels = {"app.kubernetes.io/instance": "chat", "pod-template-hash": "5d9"}
    metadata = {
        "namespace": "team",
        "name": "chat-5d9-x",
        "uid": "u1",
        "resourceVersion": "1",
        "labels": labels,
        "creationTimestamp": "t0",
    }
    return Pod.of({"metadata": metadata, "spec": {"nodeName": node}, "status": status})


def child(kind: str, name: str = "chat") -> Child:
    metadata = {
        "namespace": "team",
        "name": name,
        "uid": f"u-{kind}",
        "resourceVersion": "7",
        "managedFields": [{"manager": "kubectl"}],
        "ownerReferences": [{"uid": "other"}, {"uid": "owner", "controller": True}],
    }
    return Child.of({"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": {"a": [1]}})


def test_a_pod_that_nobody_has_looked_at_is_pending_and_not_ready() -> None:
    new = pod()
    assert (new.phase, new.ready, new.ip, new.unschedulable, new.containers) == ("Pending", False, None, None, ())
    assert (new.node, new.template_hash, new.created, new.restarts) == ("node1", "5d9", "t0", 0)


def test_a_pod_keeps_the_states_of_its_containers() -> None:
    ended = {"reason": "OOMKilled", "exitCode": 137, "message": "out", "finishedAt": "t1"}
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 10s"}
    status = {"name": "runtime", "restartCount": 3, "state": {"waiting": waiting}, "lastState": {"terminated": ended}}
    seen = pod(containerStatuses=[status], initContainerStatuses=[{"name": "init", "state": {"terminated": {}}}])
    assert [container.name for container in seen.containers] == ["init", "runtime"]
    assert seen.containers[1] == Container(
        name="runtime",
        ready=False,
        started=False,
        restarts=3,
        waiting=Waiting("CrashLoopBackOff", "back-off 10s"),
        terminated=None,
        last=Terminated(reason="OOMKilled", message="out", exit_code=137, finished_at="t1"),
    )
    assert seen.restarts == 3


def test_only_the_schedulers_refusal_is_unschedulable() -> None:
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    assert pod(node=None, conditions=[refused]).unschedulable == "0/1 nodes"
    assert pod(node=None, conditions=[{**refused, "reason": "SchedulingGated"}]).unschedulable is None
    assert pod(conditions=[refused]).unschedulable is None, "it has a node: the refusal came late"
    assert pod(conditions=[{"type": "Ready", "status": "True"}]).ready


def test_a_child_knows_its_controller_and_forgets_managed_fields() -> None:
    seen = child("Service")
    assert seen.owner == "owner"
    assert seen.object["spec"] == {"a": [1]}
    assert "managedFields" not in seen.object["metadata"]


def test_children_and_pods_are_found_under_their_deployment_and_leave_nothing_behind() -> None:
    store = Store()
    store.put_child(KEY, child("Service"))
    store.put_child(KEY, child("Deployment"))
    store.put_pod(KEY, pod())
    assert {one.kind for one in store.children(KEY)} == {"Service", "Deployment"}
    assert [one.name for one in store.pods(KEY)] == ["chat-5d9-x"]
    assert store.children(Key("other", "chat")) == ()
    store.remove_child(KEY, "Service", "chat", "u-Service", "8")
    store.remove_child(KEY, "Service", "chat", "u-Service", "8")
    store.remove_pod(KEY, "chat-5d9-x", "u1", "2")
    assert [one.kind for one in store.children(KEY)] == ["Deployment"]
    assert store.pods(KEY) == ()


def test_what_has_ended_stays_so_whatever_is_learnt_of_it_later() -> None:
    store = Store()
    for version in ("9", "0"):
        store.remove_pod(KEY, "chat-5d9-x", "u1", version)
    assert not store.put_pod(KEY, structs.replace(pod(), resource_version="9"))
    assert store.put_pod(KEY, structs.replace(pod(), resource_version="10"))


def test_the_ended_that_are_remembered_are_some_thousand() -> None:
    store = Store()
    for number in range(MAX_ENDED + 1):
        store.remove_pod(KEY, "x", f"u{number}", "9")
    assert [bool(store.put_pod(KEY, structs.replace(pod(), uid=uid))) for uid in ("u1", "u0")] == [False, True]


def test_a_resource_is_the_object_again() -> None:
    metadata = {"namespace": "team", "name": "chat", "uid": "u", "generation": 2, "resourceVersion": "9"}
    seen = Resource.of({"metadata": metadata, "spec": {"model": {"uri": "hf://a/b"}}})
    assert (seen.key, seen.generation, seen.status, seen.deleting) == (KEY, 2, {}, False)
    assert seen.as_object()["spec"] == {"model": {"uri": "hf://a/b"}}
    assert Resource.of({"metadata": {**metadata, "deletionTimestamp": "t"}, "spec": {}}).deleting


def test_what_carries_no_instance_label_belongs_to_nobody() -> None:
    metadata = {"namespace": "team", "name": "x", "labels": {"app.kubernetes.io/instance": "chat"}}
    assert Key.of_owner({"metadata": metadata}) == KEY
    assert Key.of_owner({"metadata": {"namespace": "team", "name": "x"}}) is None
    assert str(KEY) == "team/chat"

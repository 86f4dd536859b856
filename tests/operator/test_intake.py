"""What watches and lists see ends in the store once, and calls for work only when it is news."""

from typing import Any

import pytest

from flyball_operator.cluster.api_server import LLM_DEPLOYMENT, POD, SERVICE, Kind, verb_and_resource
from flyball_operator.cluster.store import Intake, Store
from flyball_operator.observed import Key

KEY = Key("team", "chat")


def obj(name: str = "chat", version: int = 1, uid: str = "u1", **metadata: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/instance": "chat"}
    given = {
        "namespace": "team",
        "name": name,
        "uid": uid,
        "resourceVersion": str(version),
        "labels": labels,
        **metadata,
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": given, "spec": {}}


class Taken:
    def __init__(self) -> None:
        self.store = Store()
        self.changed: list[Key] = []
        self.intake = Intake(self.store, self.changed.append)


def test_the_same_state_twice_is_news_once() -> None:
    taken = Taken()
    for version in (5, 5, 4, 6):
        taken.intake.seen(SERVICE, obj(version=version))
    assert taken.changed == [KEY, KEY]
    assert taken.store.children(KEY)[0].resource_version == "6"


def test_the_end_of_an_earlier_object_does_not_take_its_successor_away() -> None:
    taken = Taken()
    for kind in (LLM_DEPLOYMENT, POD, SERVICE):
        taken.intake.seen(kind, obj(uid="old"))
        taken.intake.seen(kind, obj(uid="new", version=3))
        taken.intake.gone(kind, obj(uid="old", version=2))
    assert KEY in taken.store.resources
    assert len(taken.store.pods(KEY)) == len(taken.store.children(KEY)) == 1
    for kind in (LLM_DEPLOYMENT, POD, SERVICE):
        taken.intake.gone(kind, obj(uid="new", version=4))
    assert not taken.store.resources
    assert taken.store.pods(KEY) == taken.store.children(KEY) == ()


@pytest.mark.parametrize("label", ["quarantine", None])
def test_a_pod_that_is_given_another_label_leaves_its_deployment(label: str | None) -> None:
    """As people do to look into a pod while another takes its place."""
    taken = Taken()
    other = {"labels": {"app.kubernetes.io/instance": label} if label else {}}
    taken.intake.seen(POD, obj("chat-1"))
    taken.intake.seen(POD, obj("chat-1", version=3, **other))
    taken.intake.seen(POD, obj("chat-1", version=2))
    assert taken.store.pods(KEY) == ()
    assert set(taken.changed) == {KEY} | ({Key("team", label)} if label else set())
    taken.intake.seen(POD, obj("chat-1", version=4))
    assert [pod.name for pod in taken.store.pods(KEY)] == ["chat-1"]
    assert len(taken.store.known("Pod")) == 1


@pytest.mark.parametrize("kind", [LLM_DEPLOYMENT, POD, SERVICE])
def test_what_is_told_late_does_not_bring_back_what_has_ended(kind: Kind) -> None:
    """A page of a list or the answer to a write may be on its way while the watch tells of the end."""
    taken = Taken()
    taken.intake.seen(kind, obj(version=3))
    taken.intake.gone(kind, obj(version=5))
    taken.intake.seen(kind, obj(version=4))
    assert taken.store.known(kind.kind) == []
    taken.intake.seen(kind, obj(version=6))
    assert len(taken.store.known(kind.kind)) == 1, "it carries our label again"


def test_a_complete_list_removes_what_it_does_not_hold_but_nothing_younger_or_elsewhere() -> None:
    taken = Taken()
    for name, version in (("listed", 3), ("gone", 4), ("younger", 12)):
        taken.intake.seen(POD, obj(name, version, uid=name))
    taken.intake.seen(POD, obj("elsewhere", 5, uid="elsewhere", namespace="other"))
    taken.intake.only(POD, "team", {"listed"}, "10")
    assert {pod.name for pod in taken.store.pods(KEY)} == {"listed", "younger"}
    assert len(taken.store.pods(Key("other", "chat"))) == 1


def test_a_child_belongs_to_its_controller_whatever_its_label_says() -> None:
    taken = Taken()
    reference = {"kind": "LLMDeployment", "name": "real", "uid": "u", "controller": True}
    taken.intake.seen(SERVICE, obj(ownerReferences=[reference]))
    taken.intake.seen(POD, obj(labels={}))
    assert taken.changed == [Key("team", "real")]


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/api/v1/pods", ("list", "pods")),
        ("GET", "/api/v1/namespaces/team/services/chat", ("get", "services")),
        ("PATCH", "/apis/apps/v1/namespaces/team/deployments/chat", ("patch", "deployments.apps")),
        (
            "PATCH",
            "/apis/flyball.dev/v1alpha1/namespaces/team/llmdeployments/chat/status",
            ("patch", "llmdeployments.flyball.dev/status"),
        ),
        ("POST", "/api/v1/namespaces/team/events", ("create", "events")),
        ("GET", "/apis/apps/v1", ("get", "discovery")),
        ("GET", "/version", ("get", "discovery")),
    ],
)
def test_calls_are_counted_in_the_words_of_rbac(method: str, path: str, expected: tuple[str, str]) -> None:
    assert verb_and_resource(method, path, watch=False) == expected


def test_watches_are_counted_apart_from_lists() -> None:
    assert verb_and_resource("GET", "/api/v1/pods", watch=True) == ("watch", "pods")

"""Status and conditions from what was observed."""

from typing import Any

import pytest

from flyball_operator.observed import Child, Key, Pod, Resource
from flyball_operator.status import Condition, Observation, Problem, status_of
from flyball_operator.status.autoscaling import autoscaling_status

NOW, LATER = "2026-11-21T10:00:00Z", "2026-11-21T11:00:00Z"
LEAVING = {
    "metadata": {"namespace": "team", "name": "p", "uid": "p", "resourceVersion": "1", "deletionTimestamp": "t"},
    "status": {"containerStatuses": [{"name": "runtime", "state": {"running": {}}}]},
}
LOADING = {
    "metadata": {"namespace": "team", "name": "p", "uid": "p", "resourceVersion": "1"},
    "status": {
        "phase": "Running",
        "containerStatuses": [{"name": "runtime", "state": {"running": {}}, "started": False}],
    },
}
EVICTED = {
    "metadata": {"namespace": "team", "name": "old", "uid": "old", "resourceVersion": "1", "creationTimestamp": "t1"},
    "status": {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."},
}
CRASHED = {
    "metadata": {"namespace": "team", "name": "p", "uid": "p", "resourceVersion": "1"},
    "status": {"containerStatuses": [{"name": "runtime", "state": {"terminated": {"exitCode": 2, "message": "no"}}}]},
}


SERVING = {
    "metadata": {"namespace": "team", "name": "p", "uid": "p", "resourceVersion": "1"},
    "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
}


def created(at: str, pod: dict[str, Any]) -> dict[str, Any]:
    return {**pod, "metadata": {**pod["metadata"], "creationTimestamp": at}}


def observation(
    status: dict[str, Any] | None = None, *, replicas: int = 2, before: Any = None, **given: Any
) -> Observation:
    resource = Resource(
        key=Key("team", "chat"),
        uid="u",
        generation=3,
        resource_version="9",
        spec={},
        status=before or {},
        deleting=False,
    )
    deployment = (
        None if status is None else {"metadata": {"generation": 4}, "status": {"observedGeneration": 4, **status}}
    )
    pods = [Pod.of(one) for one in given.pop("pods", [])]
    return Observation(
        resource=resource,
        replicas=replicas,
        accelerator="nvidia.com/gpu",
        port=8000,
        pods=pods,
        deployment=deployment,
        **given,
    )


def counts(total: int, updated: int, ready: int) -> dict[str, Any]:
    conditions = [{"type": "Available", "status": "True" if ready >= 2 else "False"}]
    counted = {"replicas": total, "updatedReplicas": updated, "readyReplicas": ready, "availableReplicas": ready}
    return {**counted, "conditions": conditions}


DONE = counts(2, 2, 2)


def conditions(seen: Observation) -> dict[str, tuple[str, str]]:
    return {one["type"]: (one["status"], one["reason"]) for one in status_of(seen, NOW)["conditions"]}


@pytest.mark.parametrize(
    ("seen", "ready"),
    [
        (observation(DONE), ("True", "Serving")),
        (observation(DONE, pods=[LEAVING]), ("True", "Draining")),
        (observation(counts(3, 2, 2), pods=[LEAVING]), ("False", "Draining")),
        (observation(counts(3, 1, 2), pods=[LOADING]), ("False", "Updating")),
        (observation(counts(3, 1, 2), pods=[CRASHED]), ("False", "CrashLoop")),
        (observation(counts(2, 2, 0), pods=[LOADING]), ("False", "ModelDownload")),
        (observation(DONE, pods=[EVICTED]), ("True", "Serving")),
        (observation(counts(2, 2, 1), pods=[EVICTED, created("t2", LOADING)]), ("False", "ModelDownload")),
        (observation(counts(3, 2, 2), pods=[EVICTED, created("t2", SERVING), LEAVING]), ("False", "Draining")),
        (observation(counts(2, 2, 1), pods=[EVICTED, created("t0", SERVING)]), ("False", "Evicted")),
        (observation({"replicas": 0}, replicas=0, pods=[EVICTED]), ("True", "ScaledToZero")),
        (observation({**DONE, "observedGeneration": 3}), ("False", "Updating")),
        (observation({"replicas": 0}, replicas=0), ("True", "ScaledToZero")),
        (observation(None), ("False", "Updating")),
        (observation(DONE, suspended=True), ("False", "Suspended")),
        (observation(DONE, problem=Problem("NameConflict", "x", accepted=False)), ("False", "NameConflict")),
    ],
)
def test_ready_sums_up(seen: Observation, ready: tuple[str, str]) -> None:
    assert conditions(seen)["Ready"] == ready


def test_a_deployment_that_serves_stays_available_while_it_is_updated() -> None:
    found = conditions(observation(counts(3, 1, 2), pods=[LOADING]))
    assert found["Available"] == ("True", "MinimumReplicas")
    assert found["Progressing"] == ("True", "RollingOut")
    assert found["ModelReady"] == ("True", "Loaded")
    assert found["Degraded"] == ("False", "AsExpected")


def test_one_crashing_replica_of_several_degrades() -> None:
    found = conditions(observation(counts(3, 1, 2), pods=[CRASHED]))
    assert (found["Degraded"], found["Available"][0]) == (("True", "CrashLoop"), "True")


def test_a_pod_that_has_been_replaced_degrades_nothing() -> None:
    """Kubernetes keeps evicted pods for weeks."""
    assert conditions(observation(DONE, pods=[EVICTED]))["Degraded"] == ("False", "AsExpected")


def test_only_what_the_spec_says_makes_it_not_accepted() -> None:
    assert conditions(observation(DONE))["Accepted"] == ("True", "Valid")
    missing_right = observation(DONE, problem=Problem("MissingPermission", "x"))
    assert conditions(missing_right)["Accepted"][0] == "True"
    assert conditions(missing_right)["Ready"] == ("False", "MissingPermission")
    refused = observation(DONE, problem=Problem("InvalidPodTemplate", "x", accepted=False))
    assert conditions(refused)["Accepted"] == ("False", "InvalidPodTemplate")


def test_a_rollout_that_is_stuck_says_so() -> None:
    stuck = {
        **counts(3, 1, 2),
        "conditions": [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}],
    }
    found = conditions(observation(stuck))
    assert (found["Progressing"], found["Degraded"]) == (
        ("False", "ProgressDeadlineExceeded"),
        ("True", "ProgressDeadlineExceeded"),
    )


def test_features_that_are_off_have_no_condition() -> None:
    assert set(conditions(observation(DONE))) == {
        "Ready",
        "Accepted",
        "ModelReady",
        "Available",
        "Progressing",
        "Degraded",
    }
    on = observation(DONE, extra=[Condition("SLOMet", "False", "TooSlow", "x")], tuning={"state": "AtLimit"})
    assert conditions(on)["SLOMet"] == ("False", "TooSlow")
    assert status_of(on, NOW)["tuning"] == {"state": "AtLimit"}


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    before = status_of(observation(counts(2, 2, 0), pods=[LOADING]), NOW)
    times = lambda status: {one["type"]: one["lastTransitionTime"] for one in status["conditions"]}  # noqa: E731
    same = status_of(observation(counts(2, 2, 0), pods=[CRASHED], before=before), LATER)
    assert times(same)["Ready"] == NOW
    assert times(same)["Degraded"] == LATER
    assert status_of(observation(counts(2, 2, 0), pods=[LOADING], before=before), LATER) == before


@pytest.mark.parametrize(
    ("seen", "ready"),
    [
        (observation(None, replicas=1), "0/1"),
        (observation(counts(2, 2, 1)), "1/2"),
        (observation(counts(3, 1, 3)), "3/2"),  # an update has one more than is wanted, as in a Deployment's READY
        (observation({"replicas": 0}, replicas=0), "0/0"),
    ],
)
def test_ready_replicas_are_shown_beside_those_that_are_wanted(seen: Observation, ready: str) -> None:
    assert status_of(seen, NOW)["ready"] == ready


def test_scale_clients_find_their_fields() -> None:
    status = status_of(observation(DONE), NOW)
    assert (status["replicas"], status["observedGeneration"], status["url"]) == (2, 3, "http://chat.team.svc:8000")
    assert "app.kubernetes.io/instance=chat" in status["selector"]


def scaler(kind: str, *told: tuple[str, str], owner: str = "u", **status: Any) -> Child:
    reference = {"uid": owner, "controller": True}
    metadata = {"namespace": "team", "name": "chat", "uid": "h", "resourceVersion": "1", "ownerReferences": [reference]}
    conditions = [{"type": name, "status": status, "reason": f"{name}Why", "message": "m"} for name, status in told]
    return Child.of(
        {"apiVersion": "v", "kind": kind, "metadata": metadata, "status": {"conditions": conditions, **status}}
    )


HPA, SCALED_OBJECT = "HorizontalPodAutoscaler", "ScaledObject"


@pytest.mark.parametrize(
    ("mode", "children", "expected"),
    [
        ("External", [], ("True", "External")),
        ("HPA", [], ("False", "Starting")),
        ("HPA", [scaler(HPA)], ("Unknown", "Starting")),
        ("HPA", [scaler(HPA, ("AbleToScale", "True"), ("ScalingActive", "True"))], ("True", "Scaling")),
        ("HPA", [scaler(HPA, ("AbleToScale", "True"), ("ScalingActive", "False"))], ("False", "ScalingActiveWhy")),
        ("KEDA", [scaler(SCALED_OBJECT, ("Ready", "True"))], ("True", "Scaling")),
        ("KEDA", [scaler(SCALED_OBJECT, ("Ready", "False"))], ("False", "ReadyWhy")),
    ],
)
def test_autoscaling_passes_on_what_its_controller_says(
    mode: str, children: list[Child], expected: tuple[str, str]
) -> None:
    status, (condition,) = autoscaling_status(
        {"autoscaling": {"mode": mode}, "replicas": 1}, children, owner="u", keda=True
    )
    assert status is not None
    assert status["mode"] == mode
    assert status.get("targetRef") == (
        {"apiVersion": "v", "kind": children[0].kind, "name": "chat"} if children else None
    )
    assert (condition.status, condition.reason) == expected


@pytest.mark.parametrize(
    ("mode", "children", "desired"),
    [
        ("External", [], 1),
        ("HPA", [], 1),
        ("HPA", [scaler(HPA, desiredReplicas=3)], 3),
        ("HPA", [scaler(HPA, desiredReplicas=0)], 1),  # it could not compute it yet
        ("HPA", [scaler(HPA, desiredReplicas=5, owner="another")], 1),
        ("HPA", [scaler(HPA, desiredReplicas=3), scaler(HPA, desiredReplicas=5, owner="another")], 3),
        ("KEDA", [scaler(SCALED_OBJECT)], 1),
        ("KEDA", [scaler(SCALED_OBJECT), scaler(HPA, desiredReplicas=4, owner="h")], 4),
    ],
)
def test_what_is_desired_is_what_the_hpa_in_charge_says(mode: str, children: list[Child], desired: int) -> None:
    """In mode KEDA it is the one that KEDA makes."""
    spec = {"autoscaling": {"mode": mode}, "replicas": 1}
    status, _ = autoscaling_status(spec, children, owner="u", keda=True)
    assert status is not None
    assert (status["mode"], status["desiredReplicas"]) == (mode, desired)


def test_an_autoscaler_of_somebody_else_is_none() -> None:
    foreign = scaler(HPA, ("AbleToScale", "True"), ("ScalingActive", "True"), owner="somebody")
    spec = {"autoscaling": {"mode": "HPA"}, "replicas": 1}
    status, (condition,) = autoscaling_status(spec, [foreign], owner="u", keda=True)
    assert (condition.status, condition.reason) == ("False", "Starting")
    assert status == {"mode": "HPA", "desiredReplicas": 1}


def test_without_keda_the_condition_says_what_to_do() -> None:
    _, (condition,) = autoscaling_status({"autoscaling": {"mode": "KEDA"}, "replicas": 1}, [], owner="u", keda=False)
    assert (condition.status, condition.reason) == ("False", "NoKEDA")


def test_autoscaling_that_is_off_has_no_status() -> None:
    assert autoscaling_status({"autoscaling": {"mode": "Disabled"}}, [], owner="u", keda=True) == (None, [])

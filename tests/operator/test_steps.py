"""Desired and observed in, steps out."""

from typing import Any

import pytest

from flyball_operator import names
from flyball_operator.observed import Child, Key, Resource
from flyball_operator.steps import (
    HASH_ANNOTATION,
    Apply,
    Create,
    Delete,
    Leave,
    Step,
    differences,
    digest,
    find_steps,
    owned,
)

RESOURCE = Resource(
    key=Key("team", "chat"), uid="u1", generation=1, resource_version="1", spec={}, status={}, deleting=False
)


def service(port: int = 8000, **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "chat", "namespace": "team", "labels": {"a": "b"}, **metadata},
        "spec": {"ports": [{"port": port}], "selector": {"a": "b"}},
    }


def as_observed(manifest: dict[str, Any], **metadata: Any) -> Child:
    """What the API server makes of a manifest: more of everything."""
    server = {"uid": "c1", "resourceVersion": "5", "creationTimestamp": "t", **metadata}
    spec = {
        **manifest["spec"],
        "type": "ClusterIP",
        "ports": [{**port, "protocol": "TCP"} for port in manifest["spec"]["ports"]],
    }
    return Child.of({**manifest, "metadata": {**manifest["metadata"], **server}, "spec": spec})


WANTED = owned(service(), RESOURCE)
OTHERS = [{"kind": "LLMDeployment", "name": "chat", "uid": "u0", "controller": True}]


def steps(observed: list[Child], desired: dict[str, Any] | None = WANTED, settled: Any = None) -> list[Step]:
    return find_steps([desired] if desired else [], observed, RESOURCE, settled or {})


def test_what_is_not_there_is_created() -> None:
    assert steps([]) == [Create(WANTED, "there is no Service chat")]


def test_what_is_as_wanted_is_left_alone_whatever_the_server_added() -> None:
    assert steps([as_observed(WANTED)]) == []


def test_drift_is_applied_to_that_very_object_with_the_difference_as_reason() -> None:
    edited = as_observed(owned(service(port=9), RESOURCE) | {"metadata": WANTED["metadata"]})
    (step,) = steps([edited])
    assert isinstance(step, Apply)
    assert (step.uid, step.reason) == ("c1", "Service chat: spec.ports[0].port is 9, wanted 8000")


@pytest.mark.parametrize("field", ["env", "args", "command"])
@pytest.mark.parametrize(("before", "at"), [(["old"], "[0]"), (None, "")])
def test_what_may_be_a_key_is_not_told(field: str, before: Any, at: str) -> None:
    """Reasons go into the log and into Events."""
    wanted, edited = (owned(service() | {"spec": {"ports": [], field: key}}, RESOURCE) for key in (["new"], before))
    (step,) = steps([as_observed(edited | {"metadata": wanted["metadata"]})], wanted)
    assert isinstance(step, Apply)
    assert step.reason == f"Service chat: spec.{field}{at} is not as wanted"
    assert "'new'" in step.seen, "by which it is known again"


@pytest.mark.parametrize("field", ["note", "environment", "argsFile"])
def test_a_field_that_only_looks_like_one_is_told(field: str) -> None:
    wanted, edited = (owned(service() | {"spec": {"ports": [], field: text}}, RESOURCE) for text in ("x", "a.args y"))
    (step,) = steps([as_observed(edited | {"metadata": wanted["metadata"]})], wanted)
    assert isinstance(step, Apply)
    assert step.reason == f"Service chat: spec.{field} is 'a.args y', wanted 'x'"


def test_a_field_that_is_no_longer_wanted_is_noticed_by_the_hash() -> None:
    before = service() | {"spec": {**service()["spec"], "externalName": "x"}}
    (step,) = steps([as_observed(owned(before, RESOURCE))])
    assert isinstance(step, Apply)
    assert step.reason == "Service chat: what is wanted has changed"


def test_a_difference_that_an_apply_did_not_change_is_not_applied_again() -> None:
    edited = as_observed(owned(service(port=9), RESOURCE) | {"metadata": WANTED["metadata"]})
    (step,) = steps([edited])
    assert isinstance(step, Apply)
    assert steps([edited], settled={("Service", "chat"): step.seen}) == []
    assert steps([edited], settled={("Service", "chat"): "another difference"}) == [step]


def test_ours_that_is_no_longer_wanted_is_deleted_and_others_are_not() -> None:
    ours = as_observed(WANTED)
    assert steps([ours], desired=None) == [Delete(ours, "Service chat is no longer wanted")]
    assert steps([as_observed(service())], desired=None) == []
    assert steps([as_observed(WANTED, deletionTimestamp="t")], desired=None) == []


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"ownerReferences": [{"kind": "ReplicaSet", "name": "chat", "uid": "x", "controller": True}]},
        {"ownerReferences": [{"kind": "LLMDeployment", "name": "other", "uid": "x", "controller": True}]},
        {"ownerReferences": [{"kind": "LLMDeployment", "name": "chat", "uid": "u1"}]},
    ],
    ids=["nobody's", "another kind's", "another deployment's", "without a controller"],
)
def test_an_object_that_is_not_ours_is_left_with_a_reason(metadata: dict[str, Any]) -> None:
    (step,) = steps([as_observed(service(**metadata))])
    assert isinstance(step, Leave)
    assert step.foreign
    assert "give the LLMDeployment another name" in step.reason


def test_a_child_of_an_earlier_deployment_of_this_name_is_waited_for() -> None:
    why = "Service chat belongs to an earlier LLMDeployment of this name and is being removed"
    assert steps([as_observed(service(ownerReferences=OTHERS))]) == [Leave("Service", "chat", why, foreign=False)]


def test_what_belongs_to_nobody_is_left_and_named() -> None:
    why = "Service chat exists and is not this LLMDeployment's; delete it, or give the LLMDeployment another name"
    assert steps([as_observed(service())]) == [Leave("Service", "chat", why, foreign=True)]


def test_an_apply_carries_the_manifest_and_every_difference() -> None:
    edited = as_observed(owned(service(port=9, labels={"a": "c"}), RESOURCE))
    (step,) = steps([edited])
    assert isinstance(step, Apply)
    assert step.manifest == WANTED
    lines = step.seen.split("\n")
    assert sorted(line for line in lines if HASH_ANNOTATION not in line) == [
        "metadata.labels.a is 'c', wanted 'b'",
        "spec.ports[0].port is 9, wanted 8000",
    ]
    assert len(lines) == 3, "the label, the port and the hash"
    assert step.reason.endswith(" (and 1 more)")


def test_what_is_owned_keeps_its_metadata_and_says_whose_and_what_it_is() -> None:
    manifest = service(annotations={"mine": "x"})
    metadata = owned(manifest, RESOURCE)["metadata"]
    assert metadata["annotations"] == {"mine": "x", HASH_ANNOTATION: digest(manifest)}
    assert metadata["labels"] == {"a": "b"}
    assert metadata["ownerReferences"] == [
        {
            "apiVersion": names.API_VERSION,
            "kind": "LLMDeployment",
            "name": "chat",
            "uid": "u1",
            "controller": True,
            "blockOwnerDeletion": False,
        }
    ]


def test_a_digest_is_of_the_content_and_not_of_its_order() -> None:
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": [1, 2], "a": 1})
    assert digest({"a": 1}) != digest({"a": 2}) != digest({"a": [2]})
    assert len(digest({})) == 16, "short enough for a label"


def test_what_is_on_its_way_out_is_waited_for() -> None:
    assert steps([as_observed(WANTED, deletionTimestamp="t")]) == []


@pytest.mark.parametrize(
    ("wanted", "observed", "found"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, []),
        ({"a": {}}, {}, []),
        ({"a": 0}, {}, []),
        ({"a": 0}, {"a": 3}, ["a is 3, wanted 0"]),
        ({"a": 3}, {}, ["a is absent, wanted 3"]),
        ({"a": False}, {"a": None}, []),
        *(
            ({field: False}, {}, [f"{field} is True, wanted False"])
            for field in ("automountServiceAccountToken", "allowPrivilegeEscalation")
        ),
        ({"a": [1, 2]}, {"a": [1]}, ["a has 1 items, wanted 2"]),
        (
            {"a": [{"b": 1}]},
            {"a": [{"b": 2}, {"b": 3}]},
            ["a has 2 items, wanted 1", "a[0].b is 2, wanted 1"],
        ),
        ({"a": [{"b": 1}]}, {"a": [{"b": 2, "c": 3}]}, ["a[0].b is 2, wanted 1"]),
        ({"limits": {"memory": "1024Mi"}}, {"limits": {"memory": "1Gi"}}, []),
        ({"limits": {"cpu": 0.5}}, {"limits": {"cpu": "500m"}}, []),
        ({"limits": {"nvidia.com/gpu": 1}}, {"limits": {"nvidia.com/gpu": "1"}}, []),
        ({"limits": {"memory": "1Gi"}}, {"limits": {"memory": "1G"}}, ["limits.memory is '1G', wanted '1Gi'"]),
        ({"env": "1k"}, {"env": "1000"}, ["env is '1000', wanted '1k'"]),
        ({"a": "x" * 99}, {"a": "y"}, [f"a is 'y', wanted '{'x' * 56}..."]),
        ({"a": {"b": 1}}, {"a": "text"}, ["a is 'text', wanted {'b': 1}"]),
    ],
)
def test_differences(wanted: Any, observed: Any, found: list[str]) -> None:
    assert [*differences(wanted, observed)] == found

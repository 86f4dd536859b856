"""The Deployment built from an LLMDeployment, field by field."""

from pathlib import Path
from typing import Any

import pytest

from flyball_operator import children, manifest
from flyball_operator.quantity import to_bytes
from flyball_protocol import endpoints

TEXT = """
apiVersion: flyball.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat, namespace: team}
spec:
  model: {uri: "URI"}
"""


def build(uri: str = "hf://org/name", **spec: Any) -> dict[str, Any]:
    documents = manifest.read_documents(TEXT.replace("URI", uri), "chat.yaml")
    documents[0]["spec"] |= spec
    llm = manifest.parse_document(documents[0], source="chat.yaml", base=Path("/srv"))
    return children.deployment(llm, children.Platform(), admin_token_secret="chat-admin-token")


def container(built: dict[str, Any]) -> dict[str, Any]:
    (found,) = built["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_selector_matches_the_pods_and_replicas_are_the_specs() -> None:
    built = build(replicas=3)
    assert built["metadata"]["namespace"] == "team"
    assert built["spec"]["replicas"] == 3
    assert built["spec"]["selector"]["matchLabels"].items() <= built["spec"]["template"]["metadata"]["labels"].items()


def test_settings_become_arguments_one_word_each() -> None:
    runtime = {
        "dtype": "BFloat16",
        "maxModelLen": 512,
        "maxNumSeqs": 8,
        "maxNumBatchedTokens": 64,
        "kvCacheMemoryPercent": 85,
    }
    args = container(
        build(runtime={**runtime, "extraArgs": ["--seed=1"]}, model={"uri": "hf://org/name", "revision": "v2"})
    )["args"]
    assert args[:2] == ["serve", "org/name"]
    assert args[-1] == "--seed=1"
    expected = (
        "--revision=v2 --dtype=bfloat16 --max-model-len=512 --max-num-seqs=8 --max-num-batched-tokens=64 --device=cuda"
    )
    assert {*expected.split(), "--gpu-memory-utilization=0.85", "--served-model-name=chat"} <= set(args)


def test_settings_left_out_are_left_to_the_runtime() -> None:
    flags = {argument.partition("=")[0] for argument in container(build())["args"]}
    assert not flags & {"--revision", "--max-model-len", "--gpu-memory-utilization", "--kv-cache-memory-bytes"}


def test_without_accelerators_nothing_is_asked_of_the_node_but_the_given_resources() -> None:
    found = container(
        build(accelerator={"count": 0}, runtime={"kvCacheMemory": "1Gi"}, resources={"limits": {"memory": "4Gi"}})
    )
    assert found["resources"] == {"limits": {"memory": "4Gi"}}
    assert {"--device=cpu", f"--kv-cache-memory-bytes={2**30}"} <= set(found["args"])


def test_an_accelerator_is_a_limit_of_the_container() -> None:
    assert container(build())["resources"] == {"limits": {"nvidia.com/gpu": 1}}


def test_the_admin_token_comes_from_a_secret_and_never_from_arguments() -> None:
    found = container(build())
    reference = {"name": "chat-admin-token", "key": "token"}
    assert {"name": endpoints.ADMIN_TOKEN_ENV, "valueFrom": {"secretKeyRef": reference}} in found["env"]
    assert not any("token" in argument for argument in found["args"] if "batched" not in argument)


def test_the_pod_outlives_pre_stop_and_drain() -> None:
    built = build(rollout={"drain": {"preStopSeconds": 5, "timeoutSeconds": 30}})
    assert built["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 45
    assert container(built)["lifecycle"]["preStop"] == {"sleep": {"seconds": 5}}
    assert "--drain-timeout=30" in container(built)["args"]
    assert "lifecycle" not in container(build(rollout={"drain": {"preStopSeconds": 0}}))


def test_a_slow_start_is_allowed_for_as_long_as_the_spec_says() -> None:
    built = build(startupTimeoutSeconds=600)
    probe = container(built)["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 600
    assert built["spec"]["progressDeadlineSeconds"] > 600


def test_the_pod_runs_without_privileges_on_a_read_only_root() -> None:
    pod, found = build()["spec"]["template"]["spec"], container(build())
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert found["securityContext"]["readOnlyRootFilesystem"] is True
    assert {mount["name"] for mount in found["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize(
    ("uri", "volume", "mount", "argument"),
    [
        (
            "pvc://claim/llama",
            {"persistentVolumeClaim": {"claimName": "claim", "readOnly": True}},
            "/mnt/model",
            "/mnt/model/llama",
        ),
        (
            "oci://r/llama:8b",
            {"image": {"reference": "r/llama:8b", "pullPolicy": "IfNotPresent"}},
            "/mnt/model",
            "/mnt/model",
        ),
        ("file:llama", {"hostPath": {"path": "/srv/llama", "type": "Directory"}}, "/srv/llama", "/srv/llama"),
    ],
)
def test_models_on_volumes_are_mounted_read_only(uri: str, volume: dict[str, Any], mount: str, argument: str) -> None:
    built = build(uri)
    assert {"name": "model", **volume} in built["spec"]["template"]["spec"]["volumes"]
    assert {"name": "model", "mountPath": mount, "readOnly": True} in container(built)["volumeMounts"]
    assert container(built)["args"][1] == argument


@pytest.mark.parametrize(
    ("text", "size"), [("2Gi", 2**31), ("500m", 1), ("1.5k", 1500), ("7", 7), (7, 7), ("0.5Ki", 512), ("1T", 10**12)]
)
def test_quantities_of_memory(text: str | int, size: int) -> None:
    assert to_bytes(text) == size


@pytest.mark.parametrize("text", ["2GiB", "", "Gi", "two"])
def test_what_is_no_quantity_of_memory(text: str) -> None:
    with pytest.raises(ValueError, match="quantity"):
        to_bytes(text)

"""The control plane of the tests does what a Kubernetes does."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster_kit import Cluster, CommandFailed, ControlPlane

DEPLOYMENT: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "web"},
    "spec": {
        "replicas": 2,
        "selector": {"matchLabels": {"app": "web"}},
        "template": {
            "metadata": {"labels": {"app": "web"}},
            "spec": {"containers": [{"name": "web", "image": "localhost/web"}]},
        },
    },
}


def in_namespace(manifest: dict[str, Any], namespace: str) -> dict[str, Any]:
    return manifest | {"metadata": manifest["metadata"] | {"namespace": namespace}}


def test_a_deployment_becomes_pods(cluster: Cluster, namespace: str) -> None:
    cluster.apply(in_namespace(DEPLOYMENT, namespace))
    cluster.wait("create", "replicaset", "-l", "app=web", "-n", namespace)
    cluster.wait("jsonpath={.status.unavailableReplicas}=2", "deployment/web", "-n", namespace)
    assert len(cluster.get("pods", "-n", namespace)["items"]) == 2


def test_children_go_with_their_owner(cluster: Cluster, namespace: str) -> None:
    cluster.apply(in_namespace(DEPLOYMENT, namespace))
    cluster.wait("create", "replicaset", "-l", "app=web", "-n", namespace)
    cluster.kubectl("-n", namespace, "delete", "deployment/web")
    cluster.wait("delete", "replicaset", "-l", "app=web", "-n", namespace)


def test_the_crd_serves_llmdeployments(cluster: Cluster, namespace: str) -> None:
    spec = {"model": {"uri": "hf://org/name"}}
    cluster.apply(
        {
            "apiVersion": "flyball.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "chat", "namespace": namespace},
            "spec": spec,
        }
    )
    assert cluster.get("llmdep", "chat", "-n", namespace)["spec"]["model"]["uri"] == "hf://org/name"


def test_a_service_account_may_do_what_rbac_says(cluster: Cluster, namespace: str) -> None:
    account = f"{namespace}:reader"
    cluster.kubectl("-n", namespace, "create", "serviceaccount", "reader")
    cluster.kubectl("-n", namespace, "create", "role", "reader", "--verb=get,list", "--resource=pods")
    cluster.kubectl("-n", namespace, "create", "rolebinding", "reader", "--role=reader", f"--serviceaccount={account}")
    kubeconfig = cluster.kubeconfig_of(namespace, "reader")
    assert not json.loads(cluster.kubectl("-n", namespace, "get", "pods", "-o", "json", kubeconfig=kubeconfig))["items"]
    with pytest.raises(CommandFailed, match=f'"system:serviceaccount:{account}" cannot list resource "secrets"'):
        cluster.kubectl("-n", namespace, "get", "secrets", kubeconfig=kubeconfig)


@pytest.mark.slow
def test_objects_outlive_the_api_server(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.kubectl("-n", namespace, "create", "configmap", "kept", "--from-literal=a=b")
    control_plane.stop_apiserver()
    try:
        with pytest.raises(CommandFailed, match="refused"):
            control_plane.kubectl("-n", namespace, "get", "configmap", "kept")
    finally:
        control_plane.start_apiserver()
    assert control_plane.get("configmap", "kept", "-n", namespace)["data"] == {"a": "b"}


def test_a_manifest_that_is_refused_says_why(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    broken = in_namespace(DEPLOYMENT, namespace)
    broken["spec"] = broken["spec"] | {"selector": {"matchLabels": {"app": "other"}}}
    with pytest.raises(CommandFailed, match=r"`selector` does not match template `labels`"):
        cluster.apply(broken)

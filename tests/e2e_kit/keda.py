"""KEDA on the node, from its own manifests, with the images that the tests have built."""

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from e2e_kit import images
from e2e_kit.models import ROLLOUT_TIMEOUT
from e2e_kit.node import Node
from e2e_kit.programs import keda_config

NAMESPACE = "keda"
SERVED_NAMES = ("keda-operator.keda.svc.cluster.local", "keda-metrics-apiserver.keda.svc")
PARTS = ("crd", "general", "rbac", "manager", "metrics-server", "service_account")
"""Without webhooks: a third program, which only refuses mistakes in what is applied."""


def install(node: Node) -> None:
    """Install KEDA and wait until it serves external metrics."""
    for image in (images.KEDA_OPERATOR, images.KEDA_ADAPTER):
        node.import_image(image)
    folder = node.folder / "keda"
    shutil.copytree(keda_config(), folder / "config")  # kustomize takes no absolute paths
    subprocess.run(("chmod", "--recursive", "u+w", str(folder)), check=True)
    authority = _certificates(node, folder)
    (folder / "kustomization.yaml").write_text(json.dumps(_kustomization(authority)))
    manifests = node.kubectl("kustomize", str(folder))
    # Server-side: one CRD is too large for the annotation that a client-side apply leaves.
    node.kubectl("apply", "--server-side", "-f", "-", input=manifests)
    _wait_until_it_serves(node)


def stop(node: Node) -> None:
    """End both programs, and return when they are gone."""
    node.kubectl("-n", NAMESPACE, "scale", "deployment", "--all", "--replicas=0")
    node.kubectl("-n", NAMESPACE, "wait", "--for=delete", "pod", "--all", ROLLOUT_TIMEOUT)


def start(node: Node) -> None:
    """Start both programs again, and return when they serve."""
    node.kubectl("-n", NAMESPACE, "scale", "deployment", "--all", "--replicas=1")
    _wait_until_it_serves(node)


def _wait_until_it_serves(node: Node) -> None:
    node.kubectl("-n", NAMESPACE, "rollout", "status", "deployment", ROLLOUT_TIMEOUT)
    node.kubectl("wait", "--for=condition=Available", "apiservice/v1beta1.external.metrics.k8s.io", ROLLOUT_TIMEOUT)


def _certificates(node: Node, folder: Path) -> bytes:
    """Issue the certificate of both programs beforehand; KEDA's own comes later than the pods that mount it."""
    leaf = node.pki.authority.issue_cert(*SERVED_NAMES, common_name="keda")
    leaf.cert_chain_pems[0].write_to_path(folder / "tls.crt")
    leaf.private_key_pem.write_to_path(folder / "tls.key")
    shutil.copy(node.pki.ca, folder / "ca.crt")
    return node.pki.ca.read_bytes()


def _kustomization(authority: bytes) -> dict[str, Any]:
    bundle = {"op": "add", "path": "/spec/caBundle", "value": base64.b64encode(authority).decode()}
    arguments = {"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": ["--zap-encoder=console"]}
    return {
        "resources": [f"config/{part}" for part in PARTS],
        "generatorOptions": {"disableNameSuffixHash": True},
        "secretGenerator": [
            {"name": "kedaorg-certs", "namespace": NAMESPACE, "files": ["ca.crt", "tls.crt", "tls.key"]}
        ],
        "images": [
            _image("ghcr.io/kedacore/keda", images.KEDA_OPERATOR),
            _image("ghcr.io/kedacore/keda-metrics-apiserver", images.KEDA_ADAPTER),
        ],
        "patches": [
            {"target": {"kind": "Deployment"}, "patch": json.dumps(_for_tests())},
            {"target": {"kind": "Deployment", "name": "keda-operator"}, "patch": json.dumps([arguments])},
            {"target": {"kind": "APIService"}, "patch": json.dumps([bundle])},
        ],
    }


def _image(published: str, ours: str) -> dict[str, str]:
    name, tag = ours.split(":")
    return {"name": published, "newName": name, "newTag": tag}


def _for_tests() -> list[dict[str, Any]]:
    """Take our images, which name no user, and ask for readiness at once: the delay of 20 s is longer than a start."""
    container = "/spec/template/spec/containers/0"
    return [
        {"op": "add", "path": "/spec/template/spec/securityContext/runAsUser", "value": 65532},
        {"op": "replace", "path": f"{container}/imagePullPolicy", "value": "Never"},
        {"op": "replace", "path": f"{container}/readinessProbe/initialDelaySeconds", "value": 1},
        {"op": "add", "path": f"{container}/readinessProbe/periodSeconds", "value": 1},
    ]

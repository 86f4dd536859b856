"""kubectl apply brings tokens, wherever the model comes from."""

import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e_kit import images, network
from e2e_kit.models import SERVED_NAME, Model
from e2e_kit.node import Node
from hub_look_alike import HubLookAlike

REPO = "acme/demo"
TOKEN = "hf_of_the_test"


def tokens_by_curl(model: Model) -> int:
    body = {"model": SERVED_NAME, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 8}
    command = ("curl", "--silent", "--show-error", "--fail-with-body", "--max-time", "30")
    answer = subprocess.run(
        (*command, f"{model.url}/v1/chat/completions", "--json", json.dumps(body)), check=True, capture_output=True
    )
    return int(json.loads(answer.stdout)["usage"]["completion_tokens"])


@pytest.fixture
def hub() -> Iterator[HubLookAlike]:
    files = {path.name: path.read_bytes() for path in images.DEMO_MODEL.iterdir()}
    with HubLookAlike(network.NODE_IP, REPO, files, token=TOKEN) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def test_from_an_image(operator: Node, namespace: str) -> None:
    model = Model(operator, namespace)
    model.apply()
    model.wait_ready()
    assert tokens_by_curl(model) > 0


def test_from_the_hub_with_a_token(operator: Node, namespace: str, hub: HubLookAlike) -> None:
    operator.kubectl("-n", namespace, "create", "secret", "generic", "hub", f"--from-literal=HF_TOKEN={TOKEN}")
    source = {"uri": f"hf://{REPO}", "secretRef": {"name": "hub"}}
    environment = [{"name": "HF_ENDPOINT", "value": hub.url}, {"name": "HF_HUB_DISABLE_XET", "value": "1"}]
    model = Model(operator, namespace, model=source, runtime={"env": environment})
    model.apply()
    model.wait_ready()
    assert tokens_by_curl(model) > 0


def test_from_a_claim(operator: Node, namespace: str) -> None:
    operator.apply(volume(namespace, images.DEMO_MODEL.parent), claim(namespace))
    model = Model(operator, namespace, model={"uri": f"pvc://weights/{images.DEMO_MODEL.name}"})
    model.apply()
    model.wait_ready()
    assert tokens_by_curl(model) > 0


def volume(namespace: str, folder: Path) -> dict[str, Any]:
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadOnlyMany"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "hostPath": {"path": str(folder)},
        "claimRef": {"namespace": namespace, "name": "weights"},
    }
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": f"{namespace}-weights"}, "spec": spec}


def claim(namespace: str) -> dict[str, Any]:
    spec = {
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "",
        "volumeName": f"{namespace}-weights",
        "resources": {"requests": {"storage": "1Gi"}},
    }
    metadata = {"name": "weights", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}

"""LLMDeployments of the demo model, small and quick to start, and what tests do with them."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from cluster_kit.errors import ClusterError
from e2e_kit import images
from e2e_kit.node import Node

READY_TIMEOUT_S = 300
LONG_TIMEOUT_S = 600
"""For what waits for many streams to end, on a machine with other work too."""
ROLLOUT_TIMEOUT = f"--timeout={LONG_TIMEOUT_S}s"
MARK = "test/mark"
SERVED_NAME = "demo"
HUB_REPO, HUB_TOKEN = "acme/demo", "hf_of_the_test"
SMALL: dict[str, Any] = {
    "model": {"uri": f"oci://{images.MODEL}", "servedName": SERVED_NAME},
    "runtime": {
        "dtype": "float32",
        "maxNumSeqs": 16,
        "maxNumBatchedTokens": 256,
        "kvCacheMemory": "64Mi",
        "extraArgs": ["--num-threads=1"],
    },
    "accelerator": {"count": 0},
    "rollout": {"drain": {"preStopSeconds": 3, "timeoutSeconds": 60}},
}


T = TypeVar("T")


class NeverBecame(ClusterError):
    def __init__(self, what: str, timeout_s: float, last: object) -> None:
        super().__init__(f"did not come within {timeout_s:g} s: {what}; at last it was {last}")


class Model:
    """One LLMDeployment on the node."""

    def __init__(self, node: Node, namespace: str, name: str = "chat", **spec: Any) -> None:
        self.node = node
        self.namespace = namespace
        self.name = name
        self.spec = {key: {**SMALL.get(key, {}), **spec.get(key, {})} for key in SMALL} | {
            key: value for key, value in spec.items() if key not in SMALL
        }

    def apply(self) -> None:
        metadata = {"name": self.name, "namespace": self.namespace}
        self.node.apply(
            {"apiVersion": "flyball.dev/v1alpha1", "kind": "LLMDeployment", "metadata": metadata, "spec": self.spec}
        )

    def patch(self, **spec: Any) -> None:
        """Merge into the spec, as somebody with kubectl would."""
        self.kubectl("patch", "llmdep", self.name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def mark(self, mark: str, *, wait: bool = True) -> None:
        """Change the pods' template; wait until the operator has changed the Deployment."""
        self.patch(podTemplate={"metadata": {"annotations": {MARK: mark}}})
        if wait:
            path = f"{{.spec.template.metadata.annotations.{MARK}}}"
            self.kubectl("wait", f"--for=jsonpath={path}={mark}", f"deployment/{self.name}", ROLLOUT_TIMEOUT)

    @property
    def marks(self) -> set[str]:
        """Those of the ready pods' templates."""
        annotations = [pod["metadata"].get("annotations", {}) for pod in self.ready_pods()]
        return {one.get(MARK, "") for one in annotations}

    def kubectl(self, *arguments: str) -> str:
        return self.node.kubectl("-n", self.namespace, *arguments)

    @property
    def url(self) -> str:
        """Of the Service, by address: this machine does not ask the cluster's DNS."""
        service = self.node.get("service", self.name, "-n", self.namespace)["spec"]
        return f"http://{service['clusterIP']}:{service['ports'][0]['port']}"

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.node.get("llmdep", self.name, "-n", self.namespace).get("status", {})
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        """Return a condition of the status, {} while there is none."""
        found = (one for one in self.status.get("conditions", []) if one["type"] == kind)
        return next(found, {})

    def pods(self) -> list[dict[str, Any]]:
        selector = f"app.kubernetes.io/instance={self.name}"
        items: list[dict[str, Any]] = self.node.get("pods", "-n", self.namespace, "-l", selector)["items"]
        return items

    def ready_pods(self) -> list[dict[str, Any]]:
        """Return those that serve, and are not on their way out."""
        return [pod for pod in self.pods() if is_ready(pod)]

    def scale(self, replicas: int) -> None:
        """Scale with kubectl, and wait until as many replicas serve; others may still be on their way out."""
        self.kubectl("scale", f"llmdep/{self.name}", f"--replicas={replicas}")
        self.until(lambda: len(self.ready_pods()) == replicas, f"{replicas} ready replicas", LONG_TIMEOUT_S)

    def until(self, found: Callable[[], T | None], what: str, timeout_s: float = READY_TIMEOUT_S) -> T:
        """Return the first value of ``found`` that is true.

        Raises:
            NeverBecame: none was in time; the message has status, pods and log.
        """
        deadline_s = time.monotonic() + timeout_s
        while not (value := found()):
            if time.monotonic() > deadline_s:
                raise NeverBecame(what, timeout_s, self._summary())
            time.sleep(0.2)
        return value

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        self.wait_for("Ready", "status", "True", timeout_s)

    def wait_for(self, kind: str, key: str, value: str, timeout_s: float = READY_TIMEOUT_S) -> dict[str, Any]:
        """Wait for a field of a condition of the present generation, and return the condition."""

        def found() -> dict[str, Any] | None:
            condition = self.condition(kind)
            return condition if condition.get(key) == value else None

        return self.until(found, f"{kind} with {key} {value}", timeout_s)

    def _summary(self) -> str:
        try:
            log = self.kubectl("logs", f"deployment/{self.name}", "--tail=15")
        except ClusterError as error:
            log = str(error)
        pods = [pod["status"] for pod in self.pods()]
        return f"{self.status}\n{json.dumps(pods, indent=1)[:3000]}\n{log}"


def is_ready(pod: dict[str, Any]) -> bool:
    """Return whether a pod serves, and is not on its way out."""
    return "deletionTimestamp" not in pod["metadata"] and any(
        one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", [])
    )


@contextmanager
def serving(node: Node, **spec: Any) -> Iterator[Model]:
    """Make a model in a namespace of its own and wait until it serves. The namespace is deleted after the block."""
    with node.namespace() as namespace:
        model = Model(node, namespace, **spec)
        model.apply()
        model.wait_ready()
        yield model


def from_hub(node: Node, namespace: str, url: str) -> Model:
    """Return a model of the hub at that address, whose token a Secret has."""
    node.kubectl("-n", namespace, "create", "secret", "generic", "hub", f"--from-literal=HF_TOKEN={HUB_TOKEN}")
    source = {"uri": f"hf://{HUB_REPO}", "revision": "main", "secretRef": {"name": "hub"}}
    environment = [{"name": "HF_ENDPOINT", "value": url}, {"name": "HF_HUB_DISABLE_XET", "value": "1"}]
    return Model(node, namespace, model=source, runtime={"env": environment})


def from_folder(node: Node, namespace: str, folder: Path, **spec: Any) -> Model:
    """Return a model of a claim whose volume is a folder of this machine."""
    node.apply(_volume(namespace, folder.parent), _claim(namespace))
    return Model(node, namespace, model={"uri": f"pvc://weights/{folder.name}"}, **spec)


def _volume(namespace: str, folder: Path) -> dict[str, Any]:
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadOnlyMany"],
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "hostPath": {"path": str(folder)},
        "claimRef": {"namespace": namespace, "name": "weights"},
    }
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": f"{namespace}-weights"}, "spec": spec}


def _claim(namespace: str) -> dict[str, Any]:
    spec = {
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "",
        "volumeName": f"{namespace}-weights",
        "resources": {"requests": {"storage": "1Gi"}},
    }
    metadata = {"name": "weights", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}

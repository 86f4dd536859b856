"""The Kubernetes API for tests: quick enough to poll, and straight to the server."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import kopf
import yaml

from cluster_kit.cluster import PATIENCE_S
from flyball_operator.cluster.api_server import POD, Kind

T = TypeVar("T")
Object = dict[str, Any]
TIMEOUT_S = 60.0


class Refused(AssertionError):
    """The API server answered with an error."""

    def __init__(self, answer: httpx.Response) -> None:
        self.status = answer.status_code
        super().__init__(f"{answer.request.method} {answer.request.url}: {answer.status_code} {answer.text}")


class Api:
    """What the administrator may do, as JSON. Errors are raised, except that what is not there is None."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        info = kopf.ConnectionInfo(
            server=cluster["server"],
            ca_path=cluster.get("certificate-authority"),
            ca_data=cluster.get("certificate-authority-data"),
            certificate_path=user.get("client-certificate"),
            certificate_data=user.get("client-certificate-data"),
            private_key_path=user.get("client-key"),
            private_key_data=user.get("client-key-data"),
            token=user.get("token"),
        )
        self.client = httpx.Client(
            base_url=info.server, verify=info.as_ssl_context(), headers=info.as_http_headers(), timeout=TIMEOUT_S
        )

    def close(self) -> None:
        self.client.close()

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        answer = self.client.get(kind.path(namespace, name))
        return None if answer.status_code == 404 else _checked(answer)

    def list(self, kind: Kind, namespace: str, labels: str = "") -> list[Object]:
        answer = self.client.get(kind.path(namespace), params={"labelSelector": labels})
        items: list[Object] = _checked(answer)["items"]
        return items

    def watch(self, path: str, accept: str = "application/json") -> Iterator[Object]:
        """Yield the events of a collection from the beginning, until the API server ends the stream."""
        headers = {"Accept": accept}
        with self.client.stream("GET", path, params={"watch": "true"}, headers=headers, timeout=None) as answer:
            for line in answer.iter_lines():
                yield json.loads(line)

    def create(self, kind: Kind, obj: Object) -> Object:
        return _checked(self.client.post(kind.path(obj["metadata"]["namespace"]), json=obj))

    def bind(self, namespace: str, pod: str, node: str) -> None:
        """Put a pod on a node, which need not exist, before the scheduler says that there is none."""
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
        _checked(self.client.post(POD.path(namespace, pod, "binding"), json=binding))

    def merge(self, kind: Kind, namespace: str, name: str, change: Object, subresource: str = "") -> Object:
        return self.patch(kind, namespace, name, change, "application/merge-patch+json", subresource)

    def patch(self, kind: Kind, namespace: str, name: str, change: Any, how: str, subresource: str = "") -> Object:
        path = kind.path(namespace, name, subresource)
        return _checked(self.client.patch(path, content=json.dumps(change), headers={"Content-Type": how}))

    def delete(self, kind: Kind, namespace: str, name: str, grace_s: int | None = None) -> None:
        params = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        _checked(self.client.delete(kind.path(namespace, name), params=params))


def _checked(answer: httpx.Response) -> Object:
    if answer.is_error:
        raise Refused(answer)
    body: Object = answer.json()
    return body


def until(found: Callable[[], T | None], what: str, timeout_s: float = PATIENCE_S) -> T:
    """Return the first value of ``found`` that is true.

    Raises:
        AssertionError: none was in time; the message says ``what`` did not come.
    """
    end = time.monotonic() + timeout_s
    while not (value := found()):
        if time.monotonic() > end:
            raise AssertionError(f"did not come within {timeout_s:g} s: {what}; last seen: {value!r}")
        time.sleep(0.05)
    return value

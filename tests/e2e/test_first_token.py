"""How long it takes from nothing to a token, with the images on the node: helm install, kubectl apply, curl."""

import json
import time
import urllib.error
import urllib.request
from typing import Any

from cluster_kit.api import until
from e2e_kit import helm
from e2e_kit.models import READY_TIMEOUT_S, SERVED_NAME, Model
from e2e_kit.node import Node


class Stopwatch:
    """Notes how long each step took."""

    def __init__(self, figures: dict[str, Any]) -> None:
        self._figures = figures
        self._start_s = self._last_s = time.monotonic()

    def lap(self, name: str) -> None:
        now_s = time.monotonic()
        self._figures[f"{name}_s"] = now_s - self._last_s
        self._figures["total_s"] = now_s - self._start_s
        self._last_s = now_s


def is_running(model: Model) -> bool:
    states = [state for pod in model.pods() for state in pod["status"].get("containerStatuses", [])]
    return any("running" in state["state"] for state in states)


def first_token(model: Model) -> str:
    """Return it, "" while the Service is behind the first replica."""
    body = json.dumps({"model": SERVED_NAME, "prompt": "Hello.", "max_tokens": 8, "stream": True}).encode()
    request = urllib.request.Request(f"{model.url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(json.loads(answer.readline().decode().removeprefix("data: "))["choices"][0]["text"])
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ConnectionRefusedError):
            raise
        return ""


def test_from_helm_install_to_the_first_token(
    node_without_operator: Node, namespace: str, figures: dict[str, Any]
) -> None:
    model = Model(node_without_operator, namespace)
    watch = Stopwatch(figures)
    helm.install(node_without_operator)
    watch.lap("operator_ready")
    model.apply()
    until(model.pods, "a pod", READY_TIMEOUT_S)
    watch.lap("pod_made")
    until(lambda: is_running(model), "a running container", READY_TIMEOUT_S)
    watch.lap("container_started")
    model.wait_ready()
    watch.lap("model_ready")
    until(lambda: first_token(model), "a token", READY_TIMEOUT_S)
    watch.lap("first_token")

"""Prometheus beside the node, which scrapes replicas and the operator as monitors of ours have it do.

Debian's has no service discovery of Kubernetes, so a thread writes down what there is to scrape.
"""

import json
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chart_kit.helm import NAMESPACE
from e2e_kit import network
from e2e_kit.models import Model
from e2e_kit.node import Node
from flyball_protocol.endpoints import API_PORT, METRICS_PATH

PORT = 9090
URL = f"http://{network.NODE_IP}:{PORT}"
START_TIMEOUT_S = 30.0
PERIOD_S = 1.0
SCRAPE_INTERVAL = "2s"
REPLICAS, OPERATOR = "replicas.json", "operator.json"
METRICS_PORT = 8080
"""The chart's default."""


def start(node: Node) -> None:
    """Start it, and return when it answers."""
    config = node.folder / "prometheus.json"
    config.write_text(json.dumps(_config(node)))
    node.processes.start(
        "prometheus",
        shutil.which("prometheus") or "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={node.folder / 'prometheus'}",
        f"--web.listen-address={network.NODE_IP}:{PORT}",
    )
    node.processes.wait_until("prometheus", "ready", _answers, START_TIMEOUT_S)


@contextmanager
def scrapes(model: Model) -> Iterator[None]:
    """Have it scrape the operator, and the replicas of a model, those that come too."""
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(PERIOD_S):
            _write_whole(model.node.folder / REPLICAS, json.dumps(_replicas(model)))
            _write_whole(model.node.folder / OPERATOR, json.dumps(_operators(model.node)))

    thread = threading.Thread(target=follow, name="targets")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _config(node: Node) -> dict[str, object]:
    jobs = [
        {
            "job_name": file.removesuffix(".json"),
            "metrics_path": METRICS_PATH,
            "honor_labels": honors,
            "file_sd_configs": [{"files": [str(node.folder / file)], "refresh_interval": "1s"}],
        }
        for file, honors in (
            (REPLICAS, False),
            (OPERATOR, True),
        )  # whose metrics have the namespace of the LLMDeployment
    ]
    return {"global": {"scrape_interval": SCRAPE_INTERVAL, "scrape_timeout": SCRAPE_INTERVAL}, "scrape_configs": jobs}


def _operators(node: Node) -> list[dict[str, object]]:
    pods = node.get("pods", "-n", NAMESPACE)["items"]
    return [{"targets": [f"{ip}:{METRICS_PORT}"]} for pod in pods if (ip := pod["status"].get("podIP"))]


def _replicas(model: Model) -> list[dict[str, object]]:
    """Return each replica with the labels that the Prometheus operator gives it on the PodMonitor's word."""
    return [
        {
            "targets": [f"{pod['status']['podIP']}:{API_PORT}"],
            "labels": {
                "namespace": model.namespace,
                "pod": pod["metadata"]["name"],
                "app_kubernetes_io_instance": model.name,
            },
        }
        for pod in model.ready_pods()
    ]


def _write_whole(file: Path, content: str) -> None:
    beside = file.with_suffix(".new")
    beside.write_text(content)
    beside.rename(file)


def _answers() -> bool:
    try:
        with urllib.request.urlopen(f"{URL}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False

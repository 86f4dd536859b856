"""Prometheus beside the node, which scrapes replicas as a PodMonitor of ours has it do.

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

from e2e_kit import network
from e2e_kit.models import Model
from e2e_kit.node import Node
from flyball_protocol.endpoints import API_PORT, METRICS_PATH

PORT = 9090
URL = f"http://{network.NODE_IP}:{PORT}"
START_TIMEOUT_S = 30.0
PERIOD_S = 1.0
SCRAPE_INTERVAL = "2s"


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
    """Have it scrape the replicas of a model, those that come too."""
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(PERIOD_S):
            _write_whole(_targets_file(model.node), json.dumps(_targets(model)))

    thread = threading.Thread(target=follow, name="targets")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _config(node: Node) -> dict[str, object]:
    found = {"files": [str(_targets_file(node))], "refresh_interval": "1s"}
    job = {"job_name": "replicas", "metrics_path": METRICS_PATH, "file_sd_configs": [found]}
    return {"global": {"scrape_interval": SCRAPE_INTERVAL, "scrape_timeout": SCRAPE_INTERVAL}, "scrape_configs": [job]}


def _targets_file(node: Node) -> Path:
    return node.folder / "targets.json"


def _targets(model: Model) -> list[dict[str, object]]:
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

"""What a replica says of itself at /metrics."""

import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from flyball_protocol.endpoints import API_PORT, METRICS_PATH

REQUESTS = "flyball_requests_total"
RUNNING = "flyball_requests_running"
WAITING = "flyball_requests_waiting"


def outcomes(pod: dict[str, Any]) -> dict[str, float]:
    """Return how the requests of a pod ended since it started, by outcome."""
    return {one.labels["outcome"]: one.value for one in _samples(pod) if one.name == REQUESTS and one.value}


def gauge(pod: dict[str, Any], name: str) -> float:
    """Return a metric without labels."""
    (found,) = (one.value for one in _samples(pod) if one.name == name)
    return float(found)


def _samples(pod: dict[str, Any]) -> list[Any]:
    with urllib.request.urlopen(f"http://{pod['status']['podIP']}:{API_PORT}{METRICS_PATH}", timeout=30) as answer:
        return [one for family in text_string_to_metric_families(answer.read().decode()) for one in family.samples]

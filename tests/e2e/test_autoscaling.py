"""KEDA adds replicas while requests wait, takes them back when none do, and no request is lost on the way."""

import time
from typing import Any

import pytest

from e2e_kit import keda, prometheus
from e2e_kit.models import SERVED_NAME, Model
from e2e_kit.node import Node
from e2e_kit.traffic import Traffic

AT_ONCE = {"scaleUp": {"stabilizationWindowSeconds": 0}, "scaleDown": {"stabilizationWindowSeconds": 5}}
SCALE_TIMEOUT_S = 180.0
TRIGGERS = {
    "MetricsAPI": {"trigger": "MetricsAPI", "pollingSeconds": 2},
    "Prometheus": {"trigger": "Prometheus", "pollingSeconds": 2, "prometheusAddress": prometheus.URL},
}


@pytest.fixture(scope="module")
def scaled(operator: Node) -> Node:
    keda.install(operator)
    prometheus.start(operator)
    return operator


def seconds_until_replicas(model: Model, count: int) -> float:
    """Wait until that many replicas are ready, and no others are left; return how long it took."""
    started_s = time.monotonic()
    model.until(
        lambda: (len(model.pods()), model.status.get("readyReplicas")) == (count, count),
        f"{count} replicas",
        SCALE_TIMEOUT_S,
    )
    return time.monotonic() - started_s


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_a_burst_takes_one_to_three_and_back(
    scaled: Node, namespace: str, figures: dict[str, Any], trigger: str
) -> None:
    autoscaling = {
        "mode": "KEDA",
        "maxReplicas": 3,
        "targetQueueDepth": 2,
        "behavior": AT_ONCE,
        "keda": TRIGGERS[trigger],
    }
    model = Model(scaled, namespace, autoscaling=autoscaling, runtime={"maxNumSeqs": 1})
    model.apply()
    model.wait_ready()
    # More than one replica can do, and requests wait; they are patient.
    with (
        prometheus.scrapes(model),
        Traffic(model.url, SERVED_NAME, period_s=0.03, timeout_s=SCALE_TIMEOUT_S) as traffic,
    ):
        up_s = seconds_until_replicas(model, 3)
        traffic.end()
        down_s = seconds_until_replicas(model, 1)
    figures |= {**traffic.verdict.figures, "up_s": up_s, "down_s": down_s}
    assert not traffic.verdict.failed, traffic.verdict.failed[:5]
    assert not traffic.verdict.changed, traffic.verdict.changed[:5]

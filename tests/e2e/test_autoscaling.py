"""KEDA adds replicas while requests wait, or before they do, and takes them back when few run; neither that nor KEDA's end
loses a request."""

import time
from typing import Any

import pytest

from e2e_kit import keda, prometheus
from e2e_kit.disturbances import BUSY, Load, undisturbed, work_of
from e2e_kit.models import LONG_TIMEOUT_S, Model
from e2e_kit.node import Node
from e2e_kit.replica import WAITING, gauge

AT_ONCE = {"scaleUp": {"stabilizationWindowSeconds": 0}, "scaleDown": {"stabilizationWindowSeconds": 5}}
TRIGGERS = {
    "MetricsAPI": {"trigger": "MetricsAPI", "pollingSeconds": 2},
    "Prometheus": {"trigger": "Prometheus", "pollingSeconds": 2, "prometheusAddress": prometheus.URL},
}
MAX_NUM_SEQS, MOST_STREAMS, FEW_STREAMS = 16, 32, 10
MANY_SEATS, LONE_STREAM = 64, 1
"""Many streams keep one replica's queue long and three replicas busy; few are less than KEDA wants of one replica."""
WITHOUT_KEDA_S = 20.0


@pytest.fixture(scope="module")
def scaled(operator: Node) -> Node:
    keda.install(operator)
    prometheus.start(operator)
    return operator


def make_model(node: Node, namespace: str, trigger: str, max_num_seqs: int = MAX_NUM_SEQS, **fields: Any) -> Model:
    autoscaling = {"mode": "KEDA", "maxReplicas": 3, "targetQueueDepth": 2, "behavior": AT_ONCE}
    autoscaling |= {"keda": TRIGGERS[trigger]} | fields.pop("autoscaling", {})
    runtime = {**BUSY["runtime"], "maxNumSeqs": max_num_seqs}
    spec = {**BUSY, "runtime": runtime, "autoscaling": autoscaling, **fields}
    model = Model(node, namespace, **spec)
    model.apply()
    model.wait_ready()
    return model


def seconds_until_replicas(model: Model, count: int) -> float:
    """Wait until that many replicas are ready, and no others are left; return how long it took."""
    started_s = time.monotonic()
    model.until(
        lambda: (len(model.pods()), model.status.get("readyReplicas")) == (count, count),
        f"{count} replicas",
        LONG_TIMEOUT_S,
    )
    return time.monotonic() - started_s


def wait_for_scale_down(model: Model, load: Load) -> None:
    """Wait until a replica is told to end, and note what is in flight then."""
    before = len(model.ready_pods())
    model.until(lambda: len(model.ready_pods()) < before, "a replica less", LONG_TIMEOUT_S)
    load.note_in_flight()


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_a_burst_takes_one_to_three_and_back(
    scaled: Node, namespace: str, figures: dict[str, Any], trigger: str
) -> None:
    model = make_model(scaled, namespace, trigger)
    work = work_of(model)
    with prometheus.scrapes(model), undisturbed(model, work, figures, num_streams=MOST_STREAMS) as load:
        figures["up_s"] = seconds_until_replicas(model, 3)
        load.num_streams = FEW_STREAMS
        wait_for_scale_down(model, load)
        figures["down_s"] = seconds_until_replicas(model, 1)


@pytest.mark.usefixtures("takes_minutes")
def test_a_load_beyond_the_objectives_adds_replicas_before_any_request_waits(
    scaled: Node, namespace: str, figures: dict[str, Any]
) -> None:
    """Each replica has seats for everybody, so neither queue nor seats ask for more; the tuner's load does."""
    tuning = {"mode": "Recommend", "intervalSeconds": 5, "minSamples": 20}
    model = make_model(
        scaled,
        namespace,
        "Prometheus",
        MANY_SEATS,
        autoscaling={"targetQueueDepth": 1000, "targetRunningPercent": 100, "targetLoadPercent": 20},
        tuning={**tuning, "objectives": {"interTokenLatencyP95Milliseconds": 1000}},
    )
    work = work_of(model)
    with prometheus.scrapes(model), undisturbed(model, work, figures, num_streams=FEW_STREAMS) as load:
        figures["up_s"] = seconds_until_replicas(model, 3)
        assert sum(gauge(pod, WAITING) for pod in model.ready_pods()) == 0
        load.num_streams = LONE_STREAM
        model.until(lambda: len(model.ready_pods()) < 3, "a replica less", LONG_TIMEOUT_S)
        figures["down_s"] = seconds_until_replicas(model, 1)


def test_keda_is_gone_for_a_while(scaled: Node, namespace: str, figures: dict[str, Any]) -> None:
    """The replicas stay as they are, and KEDA goes on with them when it is back."""
    model = make_model(scaled, namespace, "MetricsAPI")
    work = work_of(model)
    with undisturbed(model, work, figures, num_streams=MOST_STREAMS) as load:
        seconds_until_replicas(model, 3)
        load.wait_until_in_flight()
        keda.stop(scaled)
        load.num_streams = FEW_STREAMS
        time.sleep(WITHOUT_KEDA_S)
        assert len(model.ready_pods()) == 3, "somebody scaled, and KEDA was gone"
        load.wait_until_in_flight()
        keda.start(scaled)
        wait_for_scale_down(model, load)
        seconds_until_replicas(model, 1)

"""An objective that is missed and can be met is met soon, and stays met; who meets them is left alone. Minutes each: --full."""

import itertools
import math
import statistics
import time
from typing import Any

import pytest
from msgspec import structs

from e2e_kit.admin import admin_ports
from e2e_kit.disturbances import BUSY, Load, undisturbed, work_of
from e2e_kit.models import Model
from e2e_kit.node import Node
from flyball_protocol import Limits

NUM_SEATS, FEW_SEATS, NUM_CLIENTS = 16, 4, 12
"""Two replicas have seats for all clients, and with the few seats that they begin with not for all."""
STREAM_S = 6.0
CALM_S, MET_WITHIN_S, STAYS_MET_S, LEFT_ALONE_S = 30, 120, 180, 600
WINDOW_S = 60
"""What evidence covers: a condition follows what clients see by so much."""
SETTLES_S = 120
"""Within it, a step target may come with the objectives, and follow what replicas learn of their steps."""
SLACK = 3.0
"""How many times what is seen while nobody waits an objective is."""
PACE = {"intervalSeconds": 5, "cooldownSeconds": 10, "minSamples": 20}


@pytest.fixture
def model(takes_minutes: None, operator: Node, namespace: str) -> Model:
    """Two replicas with a seat for everybody."""
    runtime = {**BUSY["runtime"], "maxNumSeqs": NUM_SEATS}
    model = Model(operator, namespace, **{**BUSY, "runtime": runtime}, replicas=2)
    model.apply()
    model.wait_ready()
    return model


def ttft_p95_ms(load: Load, since_s: float) -> float:
    """Return what clients have waited for the first text of streams that they have sent since."""
    answers = [one for one in load.verdict.of_streams if one.sent_s >= since_s]
    return 1000 * _p95([one.first_s - one.sent_s for one in answers if one.first_s is not None])


def last_miss_s(load: Load, objective_ms: float) -> float:
    """Return when the last stream was sent whose first text came too late."""
    answers = [one for one in load.verdict.of_streams if one.first_s is not None]
    return max(one.sent_s for one in answers if 1000 * ((one.first_s or 0.0) - one.sent_s) > objective_ms)


def itl_p95_ms(model: Model) -> float:
    """Return the time between two tokens as the replicas' evidence has it."""
    return 1000 * max(port.evidence().itl.p95_s or math.inf for port in admin_ports(model))


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def changes(model: Model) -> list[str]:
    """Return what the tuner has decided to change, the latest first."""
    decisions = model.status.get("tuning", {}).get("decisions", [])
    return [f"{one['action']}: {one['message']}" for one in decisions if one["action"] not in ("hold", "commit")]


def in_force(model: Model) -> list[Limits]:
    return [port.limits().target for port in admin_ports(model)]


def test_a_missed_objective_is_met_within_two_minutes_and_stays_met(model: Model, figures: dict[str, Any]) -> None:
    work = work_of(model, STREAM_S)
    with undisturbed(model, work, figures, NUM_CLIENTS) as load:
        began_s = time.monotonic()
        time.sleep(CALM_S)
        objective_ms = math.ceil(SLACK * ttft_p95_ms(load, began_s))
        figures["objective_ms"] = objective_ms
        began_s = time.monotonic()
        model.patch(
            tuning={
                "mode": "Auto",
                "limits": {"maxNumSeqs": FEW_SEATS},
                "objectives": {"ttftP95Milliseconds": objective_ms},
                **PACE,
            }
        )
        model.wait_for("SLOMet", "status", "False")
        figures["missed_after_s"] = time.monotonic() - began_s
        figures["missed_ttft_p95_ms"] = ttft_p95_ms(load, began_s)
        time.sleep(max(0.0, began_s + MET_WITHIN_S - time.monotonic()))
        since_s = time.monotonic()
        model.wait_for("SLOMet", "status", "True", WINDOW_S)
        figures["condition_after_s"] = time.monotonic() - began_s
        conditions = []
        while time.monotonic() < since_s + STAYS_MET_S:
            conditions.append(model.condition("SLOMet").get("status"))
            time.sleep(5)
        figures["ttft_p95_ms"] = ttft_p95_ms(load, since_s)
        figures["last_miss_s"] = last_miss_s(load, objective_ms) - began_s
        figures["num_seats"] = min(limits.max_num_seqs for limits in in_force(model))
    assert figures["ttft_p95_ms"] <= objective_ms, changes(model)
    assert set(conditions) == {"True"}, (list(itertools.groupby(conditions)), changes(model))


def test_who_meets_the_objectives_is_left_alone_for_ten_minutes(model: Model, figures: dict[str, Any]) -> None:
    work = work_of(model, STREAM_S)
    with undisturbed(model, work, figures, NUM_CLIENTS) as load:
        began_s = time.monotonic()
        time.sleep(CALM_S)
        objectives = {
            "ttftP95Milliseconds": math.ceil(SLACK * ttft_p95_ms(load, began_s)),
            "interTokenLatencyP95Milliseconds": math.ceil(SLACK * itl_p95_ms(model)),
        }
        figures |= objectives
        start = [structs.replace(limits, step_time_target_ms=None) for limits in in_force(model)]
        model.patch(tuning={"mode": "Auto", "objectives": objectives, **PACE})
        model.wait_for("SLOMet", "status", "True")
        time.sleep(SETTLES_S)
        since_s, settled = time.monotonic(), in_force(model)
        assert [structs.replace(limits, step_time_target_ms=None) for limits in settled] == start, changes(model)
        num_changes = len(changes(model))
        while time.monotonic() < since_s + LEFT_ALONE_S:
            assert in_force(model) == settled, changes(model)
            time.sleep(5)
        figures["ttft_p95_ms"] = ttft_p95_ms(load, since_s)
        figures["itl_p95_ms"] = itl_p95_ms(model)
        assert model.condition("SLOMet")["status"] == "True"
    assert len(changes(model)) == num_changes, changes(model)

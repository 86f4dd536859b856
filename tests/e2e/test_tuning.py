"""Limits follow what the pods measure, on real pods, and outlive operator and pods."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from e2e_kit import processes
from e2e_kit.admin import admin_ports
from e2e_kit.models import SERVED_NAME, Model, NeverBecame
from e2e_kit.node import Node
from e2e_kit.traffic import Traffic

TIMEOUT_S = 180.0
TUNING = {
    "mode": "Auto",
    "objectives": {"interTokenLatencyP95Milliseconds": 1},  # too little for this machine
    "bounds": {"maxNumSeqs": {"min": 2}, "maxNumBatchedTokens": {"min": 32}},
    "intervalSeconds": 2,
    "cooldownSeconds": 4,
    "minSamples": 20,
}


def wait_until(condition: Callable[[], bool], what: str, model: Model) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise NeverBecame(what, TIMEOUT_S, model.status)
        time.sleep(0.5)


def tuning(model: Model) -> dict[str, Any]:
    found: dict[str, Any] = model.status.get("tuning", {})
    return found


def actions(model: Model) -> list[str]:
    return [one["action"] for one in tuning(model).get("history", [])]


def test_limits_follow_the_objective_and_outlive_the_operator(
    operator: Node, namespace: str, figures: dict[str, Any]
) -> None:
    model = Model(operator, namespace, tuning=TUNING)
    model.apply()
    model.wait_ready()
    with Traffic(model.url, SERVED_NAME, period_s=0.1) as traffic:
        began_s = time.monotonic()
        wait_until(lambda: "try" in actions(model), "a change on trial", model)
        figures["first_change_s"] = time.monotonic() - began_s
        wait_until(lambda: "promote" in actions(model), "a change for good", model)
        (pid, *_) = processes.running("flyball-operator", "run")
        before = tuning(model)["revision"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: tuning(model)["revision"] > before, "the next change, by the next process", model)
    model.scale(2)
    assert all(port.limits().revision >= before for port in admin_ports(model)), (
        "a new pod starts with what served well"
    )
    figures |= traffic.verdict.figures
    print(model.kubectl("get", "llmdep", model.name, "-o", "yaml"))
    assert not traffic.verdict.failed, traffic.verdict.failed[:5]
    assert not traffic.verdict.changed, traffic.verdict.changed[:5]

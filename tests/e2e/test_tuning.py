"""Limits follow what real pods measure; a change on trial outlives the operator that began it."""

import time
from typing import Any

from e2e_kit import processes
from e2e_kit.admin import admin_ports
from e2e_kit.disturbances import BUSY, undisturbed, work_of
from e2e_kit.models import LONG_TIMEOUT_S, Model
from e2e_kit.node import Node
from flyball_protocol import Limits

MAX_NUM_SEQS, START_NUM_SEQS = 16, 8
NUM_REPLICAS = 2
STREAM_S = 6.0
TUNING = {
    "mode": "Auto",
    "objectives": {"ttftP95Milliseconds": 300_000},  # until the load is there
    "limits": {"maxNumSeqs": START_NUM_SEQS},
    "bounds": {"maxNumSeqs": {"min": 8}, "maxNumBatchedTokens": {"min": 32}},
    "intervalSeconds": 2,
    "cooldownSeconds": 4,
    "minSamples": 20,
}


def tuning(model: Model) -> dict[str, Any]:
    found: dict[str, Any] = model.status.get("tuning", {})
    return found


def last_action(model: Model) -> str:
    decisions = tuning(model).get("decisions", [])
    return str(decisions[0]["action"]) if decisions else ""


def in_force(model: Model) -> set[tuple[int, Limits]]:
    """Return the limits of all pods; one, if they agree."""
    reports = [port.limits() for port in admin_ports(model)]
    return {(report.revision, report.effective) for report in reports}


def test_limits_are_tried_then_judged_though_the_operator_was_killed_in_between(
    operator: Node, namespace: str, figures: dict[str, Any]
) -> None:
    runtime = {**BUSY["runtime"], "maxNumSeqs": MAX_NUM_SEQS}
    model = Model(operator, namespace, **{**BUSY, "runtime": runtime}, replicas=NUM_REPLICAS, tuning=TUNING)
    model.apply()
    model.wait_ready()
    work = work_of(model, STREAM_S, NUM_REPLICAS * START_NUM_SEQS)
    with undisturbed(model, work, figures, num_streams=3 * MAX_NUM_SEQS) as load:
        # missed by all that wait for one of the few seats
        model.patch(tuning={"objectives": {"ttftP95Milliseconds": 500}})
        began_s = time.monotonic()
        model.until(lambda: last_action(model) == "try", "a change on trial", LONG_TIMEOUT_S)
        figures["first_change_s"] = time.monotonic() - began_s
        assert len(in_force(model)) == 2, "one replica tries what the other does not have"
        load.wait_until_in_flight()
        processes.kill("flyball-operator", "run")
        model.until(
            lambda: last_action(model) in ("promote", "roll back"), "the next process's verdict", LONG_TIMEOUT_S
        )
        figures["verdict_s"] = time.monotonic() - began_s
        model.until(lambda: len(in_force(model)) == 1, "the same limits in all pods", LONG_TIMEOUT_S)
        load.wait_until_in_flight()
        model.scale(NUM_REPLICAS + 1)
        model.until(lambda: len(in_force(model)) == 1, "the same limits in the new pod too", LONG_TIMEOUT_S)

"""Limits follow what real pods measure; a change on trial outlives the operator that began it."""

import math
import time
from typing import Any

from e2e_kit import processes
from e2e_kit.admin import admin_ports
from e2e_kit.disturbances import BUSY, undisturbed
from e2e_kit.models import LONG_TIMEOUT_S, Model
from e2e_kit.node import Node
from e2e_kit.work import measure
from flyball_protocol import Limits

MAX_NUM_SEQS = 16
TUNING = {
    "mode": "Auto",
    "objectives": {"interTokenLatencyP95Milliseconds": 60_000},  # until the test knows what this machine can do
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


def just_missed_ms(model: Model) -> int | None:
    """Return an objective that most gaps of this load miss and fewer sequences may meet; None before there are gaps."""
    medians_s = [port.evidence().itl.p50_s for port in admin_ports(model)]
    return None if None in medians_s else max(1, math.floor(700 * min(one for one in medians_s if one)))


def test_limits_are_tried_then_judged_though_the_operator_was_killed_in_between(
    operator: Node, namespace: str, figures: dict[str, Any]
) -> None:
    runtime = {**BUSY["runtime"], "maxNumSeqs": MAX_NUM_SEQS}
    model = Model(operator, namespace, **{**BUSY, "runtime": runtime}, replicas=2, tuning=TUNING)
    model.apply()
    model.wait_ready()
    work = measure(model.url)
    with undisturbed(model, work, figures, num_streams=3 * MAX_NUM_SEQS) as load:
        model.until(lambda: just_missed_ms(model) is not None, "gaps between tokens", LONG_TIMEOUT_S)
        objectives = {"interTokenLatencyP95Milliseconds": just_missed_ms(model)}
        model.patch(tuning={"objectives": objectives})
        began_s = time.monotonic()
        model.until(lambda: last_action(model) == "try", "a change on trial", LONG_TIMEOUT_S)
        figures["first_change_s"] = time.monotonic() - began_s
        assert len(in_force(model)) == 2, "one replica tries what the other does not have"
        load.note_in_flight()
        processes.kill("flyball-operator", "run")
        model.until(
            lambda: last_action(model) in ("promote", "roll back"), "the next process's verdict", LONG_TIMEOUT_S
        )
        figures["verdict_s"] = time.monotonic() - began_s
        model.until(lambda: len(in_force(model)) == 1, "the same limits in all pods", LONG_TIMEOUT_S)
        load.note_in_flight()
        model.scale(3)
        model.until(lambda: len(in_force(model)) == 1, "the same limits in the new pod too", LONG_TIMEOUT_S)

"""What the status says about autoscaling. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from flyball_operator.cluster.store import Child, Object
from flyball_operator.status import Condition

READY = "AutoscalingReady"


def autoscaling_status(
    spec: Mapping[str, Any], children: Sequence[Child], *, keda: bool
) -> tuple[Object | None, list[Condition]]:
    """Return status.autoscaling and its condition; neither where the spec leaves autoscaling off.

    Args:
        spec: that of the LLMDeployment, with its defaults.
        keda: whether the cluster has KEDA.
    """
    mode = spec["autoscaling"]["mode"]
    if mode == "Disabled":
        return None, []
    by_kind = {child.kind: child.object for child in children}
    scaler = by_kind.get({"HPA": "HorizontalPodAutoscaler", "KEDA": "ScaledObject"}.get(mode, ""))
    desired = (scaler or {}).get("status", {}).get("desiredReplicas", spec["replicas"])
    return {"mode": mode, "desiredReplicas": desired}, [_condition(mode, scaler, keda=keda)]


def _condition(mode: str, scaler: Object | None, *, keda: bool) -> Condition:
    if mode == "External":
        return Condition(READY, "True", "External", "spec.replicas follows whoever writes to /scale")
    if mode == "KEDA" and not keda:
        return Condition(
            READY, "False", "NoKEDA", "the cluster has no KEDA; install it, or choose mode HPA or External"
        )
    if scaler is None:
        return Condition(READY, "False", "Starting", "the autoscaler has not been made yet")
    return _of_scaler(mode, {one["type"]: one for one in scaler.get("status", {}).get("conditions", [])})


def _of_scaler(mode: str, conditions: Mapping[str, Object]) -> Condition:
    """Pass on what the HPA's or KEDA's own controller says."""
    types = ("Ready",) if mode == "KEDA" else ("AbleToScale", "ScalingActive")
    told = [conditions[name] for name in types if name in conditions]
    bad = [one for one in told if one["status"] != "True"]
    if bad:
        return Condition(READY, "False", bad[0].get("reason") or "NotReady", bad[0].get("message", ""))
    if len(told) < len(types):
        return Condition(READY, "Unknown", "Starting", "the autoscaler's controller has not looked at it yet")
    return Condition(READY, "True", "Scaling", f"{mode} sets the replicas")

"""What the status says about autoscaling. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from flyball_operator.observed import Child, Object
from flyball_operator.status import Condition

READY = "AutoscalingReady"
_HPA = "HorizontalPodAutoscaler"
_SCALERS = {"HPA": _HPA, "KEDA": "ScaledObject"}


def autoscaling_status(
    spec: Mapping[str, Any], children: Sequence[Child], *, owner: str, keda: bool
) -> tuple[Object | None, list[Condition]]:
    """Return status.autoscaling and its condition; neither where the spec leaves autoscaling off.

    Args:
        spec: that of the LLMDeployment, with its defaults.
        children: objects with its labels. KEDA gives those to the HorizontalPodAutoscaler that it makes, too.
        owner: uid of the LLMDeployment.
        keda: whether the cluster has KEDA.
    """
    mode = spec["autoscaling"]["mode"]
    if mode == "Disabled":
        return None, []
    scaler = _controlled(children, owner, _SCALERS.get(mode))
    hpa = _controlled(children, scaler.uid, _HPA) if mode == "KEDA" and scaler is not None else scaler
    # An HPA says 0 until it has been able to compute a number; what it wants then is what there is.
    desired = _status(hpa).get("desiredReplicas") or spec["replicas"]
    status = {"mode": mode, "desiredReplicas": desired, **_target_reference(scaler)}
    return status, [_condition(mode, scaler, keda=keda)]


def _target_reference(scaler: Child | None) -> Object:
    if scaler is None:
        return {}
    return {"targetRef": {"apiVersion": scaler.object["apiVersion"], "kind": scaler.kind, "name": scaler.name}}


def _controlled(children: Sequence[Child], owner: str, kind: str | None) -> Child | None:
    return next((child for child in children if (child.owner, child.kind) == (owner, kind)), None)


def _status(child: Child | None) -> Object:
    status: Object = {} if child is None else child.object.get("status", {})
    return status


def _condition(mode: str, scaler: Child | None, *, keda: bool) -> Condition:
    if mode == "External":
        return Condition(READY, "True", "External", "spec.replicas follows whoever writes to /scale")
    if mode == "KEDA" and not keda:
        return Condition(
            READY, "False", "NoKEDA", "the cluster has no KEDA; install it, or choose mode HPA or External"
        )
    if scaler is None:
        return Condition(READY, "False", "Starting", "the autoscaler has not been made yet")
    return _of_scaler(mode, {one["type"]: one for one in _status(scaler).get("conditions", [])})


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

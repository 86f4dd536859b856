"""What the status says about autoscaling. Pure."""

from collections.abc import Mapping, Sequence

from flyball_operator.cluster.store import Child, Object, Resource
from flyball_operator.status import Condition

READY = "AutoscalingReady"


def autoscaling_status(
    resource: Resource, children: Sequence[Child], *, keda: bool
) -> tuple[Object | None, list[Condition]]:
    """Return status.autoscaling and its condition; neither where the spec leaves autoscaling off.

    Args:
        keda: whether the cluster has KEDA.
    """
    mode = resource.spec.get("autoscaling", {}).get("mode", "Disabled")
    if mode == "Disabled":
        return None, []
    scaler = _scaler(mode, resource, children)
    # An HPA says 0 until it has been able to compute a number; what it wants then is what there is.
    desired = (scaler or {}).get("status", {}).get("desiredReplicas") or resource.spec.get("replicas", 1)
    status: Object = {"mode": mode, "desiredReplicas": desired}
    if scaler is not None:
        reference = {"apiVersion": scaler["apiVersion"], "kind": scaler["kind"], "name": scaler["metadata"]["name"]}
        status["targetRef"] = reference
    return status, [_condition(mode, scaler, keda=keda)]


def _scaler(mode: str, resource: Resource, children: Sequence[Child]) -> Object | None:
    """Return the HorizontalPodAutoscaler or ScaledObject, if it is ours: another's says nothing about this resource."""
    kind = {"HPA": "HorizontalPodAutoscaler", "KEDA": "ScaledObject"}.get(mode)
    ours = (child.object for child in children if child.kind == kind and child.owner == resource.uid)
    return next(ours, None)


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

"""The status of an LLMDeployment: counters, and conditions with their reasons. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flyball_operator import names
from flyball_operator.observed import Object, Pod, Resource
from flyball_operator.status import diagnosis
from flyball_operator.status.diagnosis import Diagnosis

MAX_MESSAGE = 2000
"""The API allows 32768 characters, but people read conditions."""


class Problem(NamedTuple):
    """Why the children cannot be made to match the spec. ``accepted`` is true if the spec itself is valid."""

    reason: str
    message: str
    accepted: bool = True


class Condition(NamedTuple):
    """A condition without its time. ``status`` is "True", "False" or "Unknown"."""

    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Everything that the status is computed from.

    Attributes:
        replicas, accelerator, port: of the spec.
        deployment: the child Deployment, None while there is none.
        problem: why the operator cannot make the children match the spec.
        autoscaling: status.autoscaling, None if it is off in the spec.
        tuning: status.tuning, None if it is off in the spec.
        extra: conditions of the features that are on.
    """

    resource: Resource
    replicas: int
    accelerator: str
    port: int
    pods: Sequence[Pod]
    deployment: Object | None = None
    problem: Problem | None = None
    suspended: bool = False
    autoscaling: Mapping[str, Any] | None = None
    tuning: Mapping[str, Any] | None = None
    extra: Sequence[Condition] = field(default=())


def status_of(seen: Observation, now: str) -> Object:
    """Return the whole status. A condition keeps its time while its status stays.

    Args:
        now: RFC 3339, in seconds.
    """
    key, rollout = seen.resource.key, _Rollout.of(seen)
    labels = ",".join(f"{label}={value}" for label, value in names.selector_labels(key.name).items())
    status: Object = {
        "observedGeneration": seen.resource.generation,
        "replicas": rollout.total,
        "readyReplicas": rollout.ready,
        "ready": f"{rollout.ready}/{rollout.wanted}",
        "updatedReplicas": rollout.updated,
        "availableReplicas": rollout.available,
        "selector": labels,
        "url": f"http://{key.name}.{key.namespace}.svc:{seen.port}",
        "conditions": with_times(_conditions(seen, rollout), seen.resource.status.get("conditions", []), now),
    }
    optional = {"autoscaling": seen.autoscaling, "tuning": seen.tuning}
    return status | {name: value for name, value in optional.items() if value is not None}


class _Rollout(NamedTuple):
    """The Deployment's counters. ``current`` is true if its controller has seen the latest generation."""

    wanted: int
    total: int
    ready: int
    updated: int
    available: int
    current: bool
    conditions: Mapping[str, Object]

    @classmethod
    def of(cls, seen: Observation) -> "_Rollout":
        child = seen.deployment or {}
        status = child.get("status", {})
        current = status.get("observedGeneration", 0) >= child.get("metadata", {}).get("generation", 1)
        conditions = {condition["type"]: condition for condition in status.get("conditions", [])}
        return cls(
            wanted=seen.replicas,
            total=status.get("replicas", 0),
            ready=status.get("readyReplicas", 0),
            updated=status.get("updatedReplicas", 0),
            available=status.get("availableReplicas", 0),
            current=current,
            conditions=conditions,
        )

    @property
    def complete(self) -> bool:
        return self.current and self.wanted == self.updated == self.available == self.total

    @property
    def stuck(self) -> bool:
        return self.conditions.get("Progressing", {}).get("reason") == "ProgressDeadlineExceeded"


def _conditions(seen: Observation, rollout: _Rollout) -> Iterator[Condition]:
    found = diagnosis.diagnose(diagnosis.telling(seen.pods, complete=rollout.complete), seen.accelerator)
    yield _ready(seen, rollout, found)
    yield _accepted(seen.problem)
    yield _model_ready(seen, rollout, found)
    yield _available(rollout, found)
    yield _progressing(rollout)
    yield _degraded(seen.problem, rollout, found)
    yield from seen.extra


def _ready(seen: Observation, rollout: _Rollout, found: Diagnosis | None) -> Condition:
    if seen.problem is not None:
        return Condition("Ready", "False", seen.problem.reason, seen.problem.message)
    if seen.suspended:
        message = "spec.suspend is true: the operator changes nothing, and the replicas keep running"
        return Condition("Ready", "False", "Suspended", message)
    if rollout.complete and found is None:
        return _complete(rollout, seen.pods)
    if found is not None and (found.failing or not _is_replacing(rollout)):
        return Condition("Ready", "False", found.reason, found.message)
    return Condition("Ready", "False", *_updating(rollout, seen.pods))


def _complete(rollout: _Rollout, pods: Sequence[Pod]) -> Condition:
    leaving = sum(1 for _ in diagnosis.draining(pods))
    if leaving:
        message = f"{_replicas(leaving)} on the way out: running requests are finished first"
        return Condition("Ready", "True" if rollout.wanted else "False", "Draining", message)
    if not rollout.wanted:
        return Condition("Ready", "True", "ScaledToZero", "no replicas are wanted")
    return Condition("Ready", "True", "Serving", f"{_replicas(rollout.available)} ready")


def _is_replacing(rollout: _Rollout) -> bool:
    """Return whether replicas of an older template are still there."""
    return rollout.total > rollout.updated > 0


def _updating(rollout: _Rollout, pods: Sequence[Pod]) -> tuple[str, str]:
    leaving = sum(1 for _ in diagnosis.draining(pods))
    if leaving and rollout.updated >= rollout.wanted and rollout.total <= rollout.wanted + leaving:
        return "Draining", f"{_replicas(leaving)} on the way out: running requests are finished first"
    return "Updating", (
        f"{rollout.updated} of {_replicas(rollout.wanted)} up to date, {rollout.available} serve"
        if rollout.current
        else "the Deployment's change has just been made"
    )


def _accepted(problem: Problem | None) -> Condition:
    if problem is None:
        return Condition("Accepted", "True", "Valid", "the spec is complete and consistent")
    if problem.accepted:
        return Condition("Accepted", "True", "Valid", "the spec is complete and consistent; see Ready")
    return Condition("Accepted", "False", problem.reason, problem.message)


def _model_ready(seen: Observation, rollout: _Rollout, found: Diagnosis | None) -> Condition:
    if rollout.ready:
        return Condition("ModelReady", "True", "Loaded", f"loaded by {_replicas(rollout.ready)}")
    if not seen.replicas:
        return Condition("ModelReady", "Unknown", "ScaledToZero", "no replica has been asked to load it")
    if found is None:
        return Condition("ModelReady", "False", "Starting", "no replica has started yet")
    return Condition("ModelReady", "False", found.reason, found.message)


def _available(rollout: _Rollout, found: Diagnosis | None) -> Condition:
    theirs = rollout.conditions.get("Available")
    if theirs is not None and theirs["status"] == "True" and (rollout.available or not rollout.wanted):
        return Condition("Available", "True", "MinimumReplicas", f"{_replicas(rollout.available)} serving")
    reason = "Starting" if found is None else found.reason
    message = f"{rollout.available} of {_replicas(rollout.wanted)} serving"
    return Condition("Available", "False", reason, message)


def _progressing(rollout: _Rollout) -> Condition:
    if rollout.complete:
        return Condition("Progressing", "False", "Complete", "every replica runs the present template")
    if rollout.stuck:
        message = "the rollout made no progress within spec.rollout.progressDeadlineSeconds; Ready says why"
        return Condition("Progressing", "False", "ProgressDeadlineExceeded", message)
    return Condition(
        "Progressing", "True", "RollingOut", f"{rollout.updated} of {_replicas(rollout.wanted)} up to date"
    )


def _degraded(problem: Problem | None, rollout: _Rollout, found: Diagnosis | None) -> Condition:
    if problem is not None:
        return Condition("Degraded", "True", problem.reason, problem.message)
    if found is not None and found.failing:
        return Condition("Degraded", "True", found.reason, found.message)
    if rollout.stuck:
        return Condition("Degraded", "True", "ProgressDeadlineExceeded", "the rollout makes no progress; see Ready")
    return Condition("Degraded", "False", "AsExpected", "nothing fails")


def _replicas(number: int) -> str:
    return f"{number} replica" if number == 1 else f"{number} replicas"


def with_times(conditions: Iterator[Condition], before: Sequence[Object], now: str) -> list[Object]:
    """Return the conditions as objects. If a status is the same as in ``before``, so is its lastTransitionTime."""
    known = {condition["type"]: condition for condition in before}
    return [
        {
            "type": one.type,
            "status": one.status,
            "reason": one.reason,
            "message": one.message[:MAX_MESSAGE],
            "lastTransitionTime": _since(one, known.get(one.type), now),
        }
        for one in conditions
    ]


def _since(condition: Condition, before: Object | None, now: str) -> str:
    unchanged = before is not None and before["status"] == condition.status
    return str(before["lastTransitionTime"]) if before is not None and unchanged else now

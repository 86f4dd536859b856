"""What the API server showed of an LLMDeployment, its child objects and its pods, as small frozen values. Pure."""

from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from flyball_operator import names

Object = dict[str, Any]
"""A Kubernetes object as JSON: apiVersion, kind, metadata, spec, status."""

TEMPLATE_HASH_LABEL = "pod-template-hash"


class Key(NamedTuple):
    """Names one LLMDeployment."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @classmethod
    def of(cls, obj: Object) -> "Key":
        """Return the key of an LLMDeployment."""
        return cls(obj["metadata"]["namespace"], obj["metadata"]["name"])

    @classmethod
    def of_owner(cls, obj: Object) -> "Key | None":
        """Return the key of the LLMDeployment that controls a child, or that a child or pod names in its label."""
        metadata = obj["metadata"]
        owner = controller_of(obj) or {}
        is_ours = owner.get("kind") == names.KIND
        instance = owner["name"] if is_ours else metadata.get("labels", {}).get(names.INSTANCE_LABEL)
        return cls(metadata["namespace"], instance) if instance else None


class Resource(Struct, frozen=True, kw_only=True):
    """One LLMDeployment as the API server has it. ``spec`` and ``status`` are not to be written to."""

    key: Key
    uid: str
    generation: int
    resource_version: str
    spec: Object
    status: Object
    deleting: bool

    @classmethod
    def of(cls, obj: Object) -> "Resource":
        metadata = obj["metadata"]
        return cls(
            key=Key.of(obj),
            uid=metadata["uid"],
            generation=metadata.get("generation", 0),
            resource_version=metadata["resourceVersion"],
            spec=obj.get("spec", {}),
            status=obj.get("status", {}),
            deleting="deletionTimestamp" in metadata,
        )

    @property
    def is_refused(self) -> bool:
        """Whether its status says that a user has to change something."""
        conditions = self.status.get("conditions", [])
        return any((one["type"], one["status"]) == ("Accepted", "False") for one in conditions)

    def as_object(self) -> Object:
        """Return the object again, with as much metadata as is kept."""
        metadata = {"namespace": self.key.namespace, "name": self.key.name, "uid": self.uid}
        return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "spec": self.spec}


class Waiting(Struct, frozen=True):
    """Why a container does not run yet."""

    reason: str
    message: str


class Terminated(Struct, frozen=True, kw_only=True):
    """How a container ended. ``message`` is the end of its log when it wrote no message of its own."""

    reason: str
    message: str
    exit_code: int
    finished_at: str


class Container(Struct, frozen=True, kw_only=True):
    """One container of a pod: what it is doing now (at most one of waiting and terminated), and how it last ended.

    ``started``: its startup probe has succeeded since it was last started.
    """

    name: str
    ready: bool
    started: bool
    restarts: int
    waiting: Waiting | None
    terminated: Terminated | None
    last: Terminated | None


class Pod(Struct, frozen=True, kw_only=True):
    """One pod, as far as anybody here asks.

    Attributes:
        ip, node: None until the kubelet or the scheduler has said.
        ready: the Ready condition.
        created: creationTimestamp, RFC 3339.
        template_hash: names the ReplicaSet's revision of the pod template; "" for a pod without one.
        unschedulable: the scheduler's message while no node fits, else None.
        reason, message: of the pod itself (``Evicted``, ``DeadlineExceeded``), mostly empty.
        containers: init containers first.
    """

    namespace: str
    name: str
    uid: str
    resource_version: str
    ip: str | None
    node: str | None
    phase: str
    ready: bool
    deleting: bool
    created: str
    template_hash: str
    unschedulable: str | None
    reason: str
    message: str
    containers: tuple[Container, ...]

    @property
    def restarts(self) -> int:
        return sum(container.restarts for container in self.containers)

    @classmethod
    def of(cls, obj: Object) -> "Pod":
        metadata, status = obj["metadata"], obj.get("status", {})
        conditions = {condition["type"]: condition for condition in status.get("conditions", [])}
        containers = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
        node = obj.get("spec", {}).get("nodeName")
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            resource_version=metadata["resourceVersion"],
            ip=status.get("podIP"),
            node=node,
            phase=status.get("phase", "Pending"),
            ready=conditions.get("Ready", {}).get("status") == "True",
            deleting="deletionTimestamp" in metadata,
            created=metadata.get("creationTimestamp", ""),
            template_hash=metadata.get("labels", {}).get(TEMPLATE_HASH_LABEL, ""),
            unschedulable=None if node else _unschedulable(conditions.get("PodScheduled", {})),
            reason=status.get("reason", ""),
            message=status.get("message", ""),
            containers=tuple(_container(container) for container in containers),
        )


def _unschedulable(condition: Object) -> str | None:
    refused = condition.get("status") == "False" and condition.get("reason") == "Unschedulable"
    return condition.get("message", "") if refused else None


def _container(status: Object) -> Container:
    state = status.get("state", {})
    waiting = state.get("waiting")
    return Container(
        name=status["name"],
        ready=status.get("ready", False),
        started=status.get("started") or False,
        restarts=status.get("restartCount", 0),
        waiting=None if waiting is None else Waiting(waiting.get("reason", ""), waiting.get("message", "")),
        terminated=_terminated(state.get("terminated")),
        last=_terminated(status.get("lastState", {}).get("terminated")),
    )


def _terminated(state: Object | None) -> Terminated | None:
    if state is None:
        return None
    return Terminated(
        reason=state.get("reason", ""),
        message=state.get("message", ""),
        exit_code=state.get("exitCode", 0),
        finished_at=state.get("finishedAt") or "",
    )


class Child(Struct, frozen=True, kw_only=True):
    """One child object. It is kept as JSON text: as dicts and strings a Deployment takes ten times the memory.

    Attributes:
        owner: uid of its controller, None when it has none.
    """

    kind: str
    name: str
    uid: str
    resource_version: str
    owner: str | None
    deleting: bool
    text: bytes

    @classmethod
    def of(cls, obj: Object) -> "Child":
        metadata = obj["metadata"]
        kept = {**obj, "metadata": {field: value for field, value in metadata.items() if field != "managedFields"}}
        return cls(
            kind=obj["kind"],
            name=metadata["name"],
            uid=metadata["uid"],
            resource_version=metadata["resourceVersion"],
            owner=(controller_of(obj) or {}).get("uid"),
            deleting="deletionTimestamp" in metadata,
            text=msgspec.json.encode(kept),
        )

    @property
    def object(self) -> Object:
        """The whole object but its managedFields, as a new value."""
        decoded: Object = msgspec.json.decode(self.text)
        return decoded

    def owner_is(self, kind: str, name: str) -> bool:
        """Return whether its controller has this kind and name, whatever its uid."""
        owner = controller_of(self.object) or {}
        return (owner.get("kind"), owner.get("name")) == (kind, name)


def controller_of(obj: Object) -> Object | None:
    """Return the reference to the object's controller, None when it has none."""
    references: list[Object] = obj["metadata"].get("ownerReferences", [])
    return next((reference for reference in references if reference.get("controller")), None)


def is_newer(new: Resource | Pod | Child, known: Resource | Pod | Child | None) -> bool:
    """Return whether ``new`` is another state of the object than ``known``, and no earlier one."""
    return known is None or int(new.resource_version) > int(known.resource_version)

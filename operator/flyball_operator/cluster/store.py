"""What the watches have seen so far: LLMDeployments, their child objects and their pods, as small frozen values."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from flyball_operator import names

Object = dict[str, Any]
"""A Kubernetes object as JSON: apiVersion, kind, metadata, spec, status."""

TEMPLATE_HASH_LABEL = "pod-template-hash"

MAX_ENDED = 4096
"""Far more objects than end while one answer or list is under way."""


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


Name = TypeVar("Name")
Value = TypeVar("Value", Pod, Child)


class _ByOwner(Generic[Name, Value]):
    """Values under the LLMDeployment that they belong to."""

    def __init__(self) -> None:
        self._values: dict[Key, dict[Name, Value]] = {}
        self._owners: dict[str, Key] = {}

    def put(self, key: Key, name: Name, value: Value) -> None:
        if (replaced := self.get(key, name)) is not None:
            del self._owners[replaced.uid]
        self._values.setdefault(key, {})[name] = value
        self._owners[value.uid] = key

    def remove(self, key: Key, name: Name) -> None:
        values = self._values.get(key, {})
        if (value := values.pop(name, None)) is not None:
            del self._owners[value.uid]
        if not values:
            self._values.pop(key, None)

    def owner(self, uid: str) -> Key | None:
        """Return where the object with this uid is kept."""
        return self._owners.get(uid)

    def get(self, key: Key, name: Name) -> Value | None:
        return self._values.get(key, {}).get(name)

    def of(self, key: Key) -> tuple[Value, ...]:
        return tuple(self._values.get(key, {}).values())

    def __iter__(self) -> Iterator[tuple[Key, Value]]:
        return ((key, value) for key, values in self._values.items() for value in values.values())


class _Ended:
    """The objects that ended last, and as of which resource version: what is told late must not bring them back."""

    def __init__(self) -> None:
        self._versions: OrderedDict[str, int] = OrderedDict()

    def add(self, uid: str, resource_version: str) -> None:
        self._versions[uid] = max(int(resource_version), self._versions.pop(uid, 0))
        if len(self._versions) > MAX_ENDED:
            self._versions.popitem(last=False)

    def has(self, told: Resource | Pod | Child) -> bool:
        """Return whether the object had ended by then; one that got our labels back is younger."""
        return int(told.resource_version) <= self._versions.get(told.uid, -1)


class Store:
    """The operator's picture of the cluster, written by the watches, by the periodic lists and by what writes return.

    These overtake each other, so what is older than what is known is dropped: resource versions of a kind grow.
    """

    def __init__(self) -> None:
        self._ended = _Ended()
        self._resources: dict[Key, Resource] = {}
        self._pods: _ByOwner[str, Pod] = _ByOwner()
        self._children: _ByOwner[tuple[str, str], Child] = _ByOwner()

    @property
    def resources(self) -> Mapping[Key, Resource]:
        """Every LLMDeployment that exists, those on their way out too."""
        return self._resources

    def pods(self, key: Key) -> tuple[Pod, ...]:
        """Return the pods that carry the deployment's label, whatever their state."""
        return self._pods.of(key)

    def children(self, key: Key) -> tuple[Child, ...]:
        """Return the child objects that carry the deployment's label, whoever owns them."""
        return self._children.of(key)

    def child(self, key: Key, kind: str, name: str) -> Child | None:
        return self._children.get(key, (kind, name))

    def put_resource(self, resource: Resource) -> bool:
        """Keep it; returns whether it is news."""
        if not self._is_news(resource, self._resources.get(resource.key)):
            return False
        self._resources[resource.key] = resource
        return True

    def remove_resource(self, key: Key, uid: str, resource_version: str) -> None:
        """Forget it as of a resource version, unless the name stands for a newer object by now."""
        self._ended.add(uid, resource_version)
        if (known := self._resources.get(key)) is not None and known.uid == uid:
            del self._resources[key]

    def put_pod(self, key: Key | None, pod: Pod) -> Collection[Key]:
        """Keep it under its deployment, None where it has none (any more); returns for which deployments it is news."""
        return self._put(self._pods, key, pod.name, pod)

    def remove_pod(self, key: Key, name: str, uid: str, resource_version: str) -> None:
        """Forget it as of a resource version, unless the name stands for a newer object by now."""
        self._ended.add(uid, resource_version)
        if (known := self._pods.get(key, name)) is not None and known.uid == uid:
            self._pods.remove(key, name)

    def put_child(self, key: Key | None, child: Child) -> Collection[Key]:
        """Like ``put_pod``."""
        return self._put(self._children, key, (child.kind, child.name), child)

    def remove_child(self, key: Key, kind: str, name: str, uid: str, resource_version: str) -> None:
        """Forget it as of a resource version, unless the name stands for a newer object by now."""
        self._ended.add(uid, resource_version)
        if (known := self.child(key, kind, name)) is not None and known.uid == uid:
            self._children.remove(key, (kind, name))

    def known(self, kind: str) -> list[tuple[Key, str, str, str]]:
        """Return key, name, uid and resource version of every object of a kind."""
        if kind == names.KIND:
            return [(key, key.name, one.uid, one.resource_version) for key, one in self._resources.items()]
        objects: Iterable[tuple[Key, Pod | Child]] = self._pods if kind == "Pod" else self._children
        return [
            (key, one.name, one.uid, one.resource_version)
            for key, one in objects
            if kind == ("Pod" if isinstance(one, Pod) else one.kind)
        ]

    def _put(self, values: _ByOwner[Name, Value], key: Key | None, name: Name, value: Value) -> Collection[Key]:
        former = values.owner(value.uid)  # another one than key when somebody changed the label
        concerned = {one for one in (former, key) if one is not None}
        if not all(self._is_news(value, values.get(one, name)) for one in concerned):
            return ()
        if former is not None and former != key:
            values.remove(former, name)
        if key is not None:
            values.put(key, name, value)
        elif former is not None:
            self._ended.add(value.uid, value.resource_version)
        return concerned

    def _is_news(self, told: Resource | Pod | Child, known: Resource | Pod | Child | None) -> bool:
        return is_newer(told, known) and not self._ended.has(told)


def is_newer(new: Resource | Pod | Child, known: Resource | Pod | Child | None) -> bool:
    """Return whether ``new`` is another state of the object than ``known``, and no earlier one."""
    return known is None or int(new.resource_version) > int(known.resource_version)

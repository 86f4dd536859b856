"""What watches and lists have seen so far: LLMDeployments, their child objects and their pods."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from flyball_operator import names
from flyball_operator.cluster.api_server import LLM_DEPLOYMENT, POD, Kind
from flyball_operator.cluster.client import Client
from flyball_operator.observed import Child, Key, Object, Pod, Resource, is_newer

MAX_ENDED = 4096
"""Far more objects than end while one answer or list is under way."""

Name = TypeVar("Name")
Value = TypeVar("Value", Pod, Child)

CHILD_LABELS = f"{names.MANAGED_BY_LABEL}={names.MANAGER}"


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


def selector_of(kind: Kind) -> str:
    """Return the label selector under which objects of the kind are watched and listed."""
    return "" if kind == LLM_DEPLOYMENT else CHILD_LABELS


class Intake:
    """``changed`` is called with the key of each LLMDeployment that has news of its own, of a child or of a pod."""

    def __init__(self, store: Store, changed: Callable[[Key], None]) -> None:
        self._store = store
        self._changed = changed

    def seen(self, kind: Kind, obj: Object) -> None:
        """Take an object as it is now; what is known already is no news."""
        for key in self._take(kind, obj):
            self._changed(key)

    def _take(self, kind: Kind, obj: Object) -> Collection[Key]:
        """Return for which deployments it is news."""
        if kind == LLM_DEPLOYMENT:
            resource = Resource.of(obj)
            return (resource.key,) if self._store.put_resource(resource) else ()
        key = Key.of_owner(obj)
        return self._store.put_pod(key, Pod.of(obj)) if kind == POD else self._store.put_child(key, Child.of(obj))

    def gone(self, kind: Kind, obj: Object) -> None:
        """Take note that an object is no longer there, or no longer carries the labels."""
        key = Key.of(obj) if kind == LLM_DEPLOYMENT else Key.of_owner(obj)
        if key is not None:
            metadata = obj["metadata"]
            self._forget(kind, key, metadata["name"], metadata["uid"], metadata["resourceVersion"])

    def only(self, kind: Kind, namespace: str | None, uids: Collection[str], resource_version: str) -> None:
        """Forget what a complete list of the kind, as of ``resource_version``, did not hold."""
        for key, name, uid, version in self._store.known(kind.kind):
            is_listed = namespace in (None, key.namespace) and int(version) <= int(resource_version)
            if is_listed and uid not in uids:
                self._forget(kind, key, name, uid, resource_version)

    def forget(self, kind: Kind) -> None:
        """Forget every object of a kind that the cluster no longer has."""
        for key, name, uid, version in self._store.known(kind.kind):
            self._forget(kind, key, name, uid, version)

    def _forget(self, kind: Kind, key: Key, name: str, uid: str, resource_version: str) -> None:
        if kind == LLM_DEPLOYMENT:
            self._store.remove_resource(key, uid, resource_version)
        elif kind == POD:
            self._store.remove_pod(key, name, uid, resource_version)
        else:
            self._store.remove_child(key, kind.kind, name, uid, resource_version)
        self._changed(key)


async def read_all(client: Client, intake: Intake, kind: Kind, namespace: str | None) -> None:
    """Read a kind as it is now. Watches alone would miss what is deleted while they are interrupted.

    Raises:
        ClusterError: the list failed; what was read until then is taken in.
    """
    uids: set[str] = set()
    async for page in client.pages(kind, namespace, labels=selector_of(kind)):
        for obj in page.items:
            uids.add(obj["metadata"]["uid"])
            intake.seen(kind, obj)
    intake.only(kind, namespace, uids, page.resource_version)

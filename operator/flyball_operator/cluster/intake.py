"""Takes in what watches and lists see: into the store, and the deployment it concerns into the queue."""

from collections.abc import Callable, Collection

from flyball_operator import names
from flyball_operator.cluster.client import Client
from flyball_operator.cluster.kinds import LLM_DEPLOYMENT, POD, Kind
from flyball_operator.cluster.store import Store
from flyball_operator.observed import Child, Key, Object, Pod, Resource

CHILD_LABELS = f"{names.MANAGED_BY_LABEL}={names.MANAGER}"


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

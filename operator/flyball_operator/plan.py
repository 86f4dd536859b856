"""What to do so that the children are as wanted: desired and observed in, steps with their reasons out. Pure."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from flyball_operator import names
from flyball_operator.differences import differences
from flyball_operator.observed import Child, Object, Resource

HASH_ANNOTATION = f"{names.GROUP}/spec-hash"
"""Hash of what was applied. It tells what drift alone does not: that a field is no longer wanted."""

_PRIVATE = re.compile(r"[.](env|args|command)\b")


@dataclass(frozen=True)
class Create:
    """Make a child, provided that nothing has its name."""

    manifest: Object
    reason: str


@dataclass(frozen=True)
class Apply:
    """Bring the child with this uid to the manifest. ``seen`` is what differs, as ``settled`` wants it."""

    manifest: Object
    uid: str
    reason: str
    seen: str


@dataclass(frozen=True)
class Delete:
    """Remove a child that is no longer wanted."""

    child: Child
    reason: str


@dataclass(frozen=True)
class Leave:
    """An object has a child's name and is not ours to touch. ``foreign``: nor will it go away by itself."""

    kind: str
    name: str
    reason: str
    foreign: bool


Step = Create | Apply | Delete | Leave
Settled = Mapping[tuple[str, str], str]
"""By kind and name: a difference that an apply did not change, because it is one of spelling only."""


def plan(desired: Sequence[Object], observed: Sequence[Child], resource: Resource, settled: Settled) -> list[Step]:
    """Return the steps, in the order of ``desired`` and then the deletions; none when all is as wanted.

    Args:
        desired: complete manifests, as ``owned`` returns them.
    """
    by_name = {(child.kind, child.name): child for child in observed}
    wanted = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in desired}
    steps = [*_steps(desired, by_name, resource, settled)]
    for name, child in by_name.items():
        if child.owner == resource.uid and name not in wanted and not child.deleting:
            steps.append(Delete(child, f"{child.kind} {child.name} is no longer wanted"))
    return steps


def _steps(
    desired: Sequence[Object], observed: Mapping[tuple[str, str], Child], resource: Resource, settled: Settled
) -> Iterator[Step]:
    for manifest in desired:
        name = (manifest["kind"], manifest["metadata"]["name"])
        child = observed.get(name)
        step = (
            Create(manifest, f"there is no {name[0]} {name[1]}")
            if child is None
            else compare(manifest, child, resource)
        )
        if step is not None and not (isinstance(step, Apply) and settled.get(name) == step.seen):
            yield step


def compare(manifest: Object, child: Child, resource: Resource) -> Apply | Leave | None:
    """Return what to do about an object that exists; None when it is as wanted, or on its way out and ours."""
    if child.owner != resource.uid:
        return _leave(child, resource)
    if child.deleting:
        return None
    found = [*differences(manifest, child.object)]
    if not found:
        return None
    return Apply(manifest, child.uid, f"{child.kind} {child.name}: {_first(found)}", "\n".join(found))


def _leave(child: Child, resource: Resource) -> Leave:
    what = f"{child.kind} {child.name}"
    if child.owner_is(names.KIND, resource.key.name):
        reason = f"{what} belongs to an earlier {names.KIND} of this name and is being removed"
        return Leave(child.kind, child.name, reason, foreign=False)
    reason = f"{what} exists and is not this {names.KIND}'s; delete it, or give the {names.KIND} another name"
    return Leave(child.kind, child.name, reason, foreign=True)


def _first(found: Sequence[str]) -> str:
    changed = [line for line in found if HASH_ANNOTATION not in line] or ["what is wanted has changed"]
    first = _without_secrets(changed[0])
    return first if len(changed) == 1 else f"{first} (and {len(changed) - 1} more)"


def _without_secrets(line: str) -> str:
    """Return the difference as everybody may read it: variables and arguments may hold keys, so only where they are."""
    path = line.partition(" ")[0]
    return f"{path} is not as wanted" if _PRIVATE.search(path) else line


def owned(manifest: Object, resource: Resource) -> Object:
    """Return the manifest with owner reference and hash, ready to be applied."""
    reference = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": resource.key.name,
        "uid": resource.uid,
        "controller": True,
        "blockOwnerDeletion": False,  # True needs a right on our finalizers, and we have none
    }
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), HASH_ANNOTATION: digest(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations, "ownerReferences": [reference]}}


def digest(manifest: Object) -> str:
    """Return a short hash of a manifest."""
    return hashlib.sha256(msgspec.json.encode(manifest, order="sorted")).hexdigest()[:16]

"""What to do so that the children are as wanted: desired and observed in, steps with their reasons out. Pure."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from flyball_operator import names
from flyball_operator.observed import Child, Object, Resource
from flyball_operator.spec import number_of

HASH_ANNOTATION = f"{names.GROUP}/spec-hash"
"""Hash of what was applied. It tells what drift alone does not: that a field is no longer wanted."""

QUANTITIES = frozenset({"limits", "requests", "sizeLimit", "averageValue"})
"""Fields that hold quantities, themselves or in a map: the API server spells 1024Mi as 1Gi."""

TRUE_WHEN_ABSENT = frozenset({"automountServiceAccountToken", "allowPrivilegeEscalation"})
"""Fields without a default of their own that allow something unless they are False."""

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


def find_steps(
    desired: Sequence[Object], observed: Sequence[Child], resource: Resource, settled: Settled
) -> list[Step]:
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


def differences(wanted: Any, observed: Any, path: str = "", *, is_quantity: bool = False) -> Iterator[str]:
    """Yield one line for each place where ``observed`` lacks ``wanted``: ``spec.replicas is 5, wanted 3``.

    The API server fills in defaults, so an observed object always has more than was applied: wanted has to be a part of it.
    Maps may have more keys than wanted, lists may not have more items. Empty, zero and absent are the same, because
    the API server drops what is empty, but for ``TRUE_WHEN_ABSENT``.
    """
    if not wanted and not observed:
        return
    if isinstance(wanted, dict) and isinstance(observed, dict):
        for key, value in wanted.items():
            below = is_quantity or key in QUANTITIES
            seen = observed.get(key, True if key in TRUE_WHEN_ABSENT else None)
            yield from differences(value, seen, f"{path}.{key}".lstrip("."), is_quantity=below)
    elif isinstance(wanted, list) and isinstance(observed, list):
        yield from _list_differences(wanted, observed, path, is_quantity)
    elif wanted != observed and not (is_quantity and _same_quantity(wanted, observed)):
        yield f"{path} is {_short(observed)}, wanted {_short(wanted)}"


def _list_differences(wanted: list[Any], observed: list[Any], path: str, is_quantity: bool) -> Iterator[str]:
    if len(wanted) != len(observed):
        yield f"{path} has {len(observed)} items, wanted {len(wanted)}"
    # Also then: what somebody added may stay, and must not hide what changes beside it.
    for index, (one, other) in enumerate(zip(wanted, observed, strict=False)):
        yield from differences(one, other, f"{path}[{index}]", is_quantity=is_quantity)


def _same_quantity(one: Any, other: Any) -> bool:
    try:
        return number_of(one) == number_of(other)
    except ValueError:
        return False


def _short(value: Any) -> str:
    text = "absent" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

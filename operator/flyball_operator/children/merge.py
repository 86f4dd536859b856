"""Merging a user's pod template over ours, as ``kubectl patch --type strategic`` merges."""

from collections.abc import Mapping
from typing import Any

from flyball_operator.errors import SpecError
from flyball_operator.spec.schema import path_of_entry
from flyball_protocol.quoting import one_line, quoted

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "topologySpreadConstraints": "topologyKey",
}
"""Lists of a PodTemplateSpec that are merged by a key of their entries (Kubernetes' patchMergeKey); others are replaced."""

_REPLACED_ENTRIES = frozenset({"volumes"})
"""Lists whose entries replace their namesakes whole (retainKeys): a volume has one source, and two cannot be merged."""


def merge(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return ``ours`` with ``theirs`` over it; a null removes the field.

    Raises:
        SpecError: a mapping or a list stands against something else; ``path`` begins the message.
    """
    merged = {key: value for key, value in ours.items() if theirs.get(key, value) is not None}
    for key, value in theirs.items():
        if value is not None:
            merged[key] = _merge_value(ours.get(key), value, key, path_of_entry(path, key))
    return merged


def _merge_value(ours: Any, theirs: Any, key: str, path: str) -> Any:
    if isinstance(ours, dict):
        return merge(ours, _expect(theirs, dict, "a mapping", path), path)
    if key in _MERGE_KEYS and isinstance(ours, list):
        return _merge_list(ours, _expect(theirs, list, "a list", path), key, path)
    return merge({}, theirs, path) if isinstance(theirs, dict) else theirs


def _merge_list(ours: list[Any], theirs: list[Any], field: str, path: str) -> list[Any]:
    """Entries that both have keep their place; further ones come after them."""
    key = _MERGE_KEYS[field]
    merged = {entry[key]: entry for entry in ours}
    for i, entry in enumerate(theirs):
        name = _merge_key(entry, key, f"{path}[{i}]")
        base = {} if field in _REPLACED_ENTRIES else merged.get(name, {})
        merged[name] = merge(base, entry, f"{path}[{one_line(str(name))}]")
    return list(merged.values())


def _merge_key(entry: Any, key: str, path: str) -> str | int:
    name = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(name, str | int):
        raise SpecError(path, [f"is {quoted(entry)}; expected a mapping with {key}, by which it is merged"])
    return name


def _expect(value: Any, kind: type, expected: str, path: str) -> Any:
    if not isinstance(value, kind):
        raise SpecError(path, [f"is {quoted(value)}; expected {expected}, as in a Pod"])
    return value

"""A Kubernetes object as plain data."""

from typing import Any

import msgspec

from flyball_operator import names
from flyball_operator.spec import LLMDeployment

Manifest = dict[str, Any]


def plain(value: object) -> Any:
    """Return a part of a spec as JSON would have it: mappings, lists and scalars, and no tuples."""
    return msgspec.json.decode(msgspec.json.encode(value))


def metadata(llm: LLMDeployment, name: str | None = None) -> Manifest:
    """Return the metadata of a child; its name is the deployment's own unless ``name`` is given."""
    return {"name": name or llm.name, "namespace": llm.namespace, "labels": names.labels(llm.name)}


def scale_target(llm: LLMDeployment) -> Manifest:
    """Return the reference by which an autoscaler finds the scale subresource of the LLMDeployment itself."""
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": llm.name}

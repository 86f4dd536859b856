"""LLMDeployments as tests write them."""

from typing import Any

Object = dict[str, Any]

SPEC: Object = {
    "model": {"uri": "hf://org/name"},
    "accelerator": {"count": 0},
    "runtime": {"kvCacheMemory": "64Mi", "image": "localhost/runtime:1"},
}


def llm(namespace: str, name: str = "chat", **spec: Any) -> Object:
    """Return a small valid LLMDeployment; ``spec`` takes the place of its fields."""
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "flyball.dev/v1alpha1", "kind": "LLMDeployment", "metadata": metadata, "spec": SPEC | spec}


def condition(obj: Object | None, type: str) -> Object:
    """Return a condition, an empty one while there is none."""
    conditions = (obj or {}).get("status", {}).get("conditions", [])
    return next((one for one in conditions if one["type"] == type), {})

"""The PersistentVolumeClaim that keeps downloads."""

from flyball_operator import names
from flyball_operator.children.manifest import Manifest, metadata
from flyball_operator.spec import LLMDeployment, size_as_quantity


def cache_claim(llm: LLMDeployment) -> Manifest | None:
    """Return the v1 PersistentVolumeClaim, or None when none is to be made."""
    cache = llm.spec.model.cache
    if cache.mode != "Claim" or cache.size is None:
        return None
    spec: Manifest = {
        "accessModes": [cache.access_mode or "ReadWriteMany"],
        "resources": {"requests": {"storage": size_as_quantity(cache.size)}},
    }
    if cache.storage_class_name is not None:
        spec["storageClassName"] = cache.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata(llm, names.cache_claim(llm.name)),
        "spec": spec,
    }

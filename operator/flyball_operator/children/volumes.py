"""The pod's volumes, and where the runtime container sees them."""

from collections.abc import Iterator

from flyball_operator import names
from flyball_operator.children.manifest import Manifest
from flyball_operator.spec import (
    ClaimModel,
    FolderModel,
    HubModel,
    ImageModel,
    LLMDeployment,
    ModelSource,
    size_as_quantity,
)


def volumes(llm: LLMDeployment) -> list[Manifest]:
    """Return the volumes of the pod."""
    boot_prior = {"name": names.boot_prior_map(llm.name), "optional": True}
    return [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "run", "emptyDir": {"medium": "Memory"}},
        {"name": "cache", **_cache(llm)},
        {"name": "boot-prior", "configMap": boot_prior},
        *_model(llm.model_source),
    ]


def volume_mounts(llm: LLMDeployment) -> list[Manifest]:
    """Return the mounts of the runtime container; there is one for each volume."""
    return [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "run", "mountPath": names.RUN_MOUNT},
        {"name": "cache", "mountPath": names.CACHE_MOUNT},
        {"name": "boot-prior", "mountPath": names.BOOT_PRIOR_MOUNT, "readOnly": True},
        *_model_mount(llm.model_source),
    ]


def _cache(llm: LLMDeployment) -> Manifest:
    cache = llm.spec.model.cache
    if cache.mode == "Claim":
        return {"persistentVolumeClaim": {"claimName": cache.claim_name or names.cache_claim(llm.name)}}
    return {"emptyDir": {} if cache.size is None else {"sizeLimit": size_as_quantity(cache.size)}}


def _model(source: ModelSource) -> Iterator[Manifest]:
    match source:
        case HubModel():
            return
        case ClaimModel(claim=claim):
            volume: Manifest = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        case ImageModel(reference=reference):
            volume = {"image": {"reference": reference, "pullPolicy": "IfNotPresent"}}
        case FolderModel(path=path):
            volume = {"hostPath": {"path": str(path), "type": "Directory"}}
    yield {"name": "model", **volume}


def _model_mount(source: ModelSource) -> Iterator[Manifest]:
    if not isinstance(source, HubModel):
        # A folder is mounted under its own path, so the same argument is right in a pod and on this machine.
        path = str(source.path) if isinstance(source, FolderModel) else names.MODEL_MOUNT
        yield {"name": "model", "mountPath": path, "readOnly": True}

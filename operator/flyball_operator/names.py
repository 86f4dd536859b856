"""Names that Kubernetes objects, pods and local processes carry; spelled here and nowhere else."""

import hashlib
from typing import Any

from flyball_protocol import installed_version

GROUP = "flyball.dev"
API_VERSION = f"{GROUP}/v1alpha1"
KIND = "LLMDeployment"

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGER = "flyball-operator"
"""Value of the label above, and name of the field manager and of the lease."""

RUNTIME_CONTAINER = "runtime"
LISTENER_CONTAINER = "listener"
API_PORT_NAME = "http"
ADMIN_PORT_NAME = "admin"

ADMIN_TOKEN_KEY = "token"
"""Key of the admin token inside its Secret."""

HUB_TOKEN_ENV = "HF_TOKEN"
BOOT_PRIOR_FILE = "limits.json"

MODEL_MOUNT = "/mnt/model"
CACHE_MOUNT = "/var/cache/flyball"
BOOT_PRIOR_MOUNT = "/etc/flyball/boot-prior"
API_KEYS_MOUNT = "/etc/flyball/api-keys"
API_KEYS_FILE = "keys"
API_KEYS_VOLUME = "api-keys"
RUN_MOUNT = "/run/flyball"
"""Where the containers of a pod meet."""

INSTANCE_LABEL = "app.kubernetes.io/instance"
OPERATOR_LABELS = {"app.kubernetes.io/name": "flyball", "app.kubernetes.io/component": "operator"}
"""Labels of the operator's own pods, by which NetworkPolicies know them."""
TUNER_LOAD = "flyball_tuner_load_replicas"
"""Metric of the operator's by which a deployment can be scaled."""
OPERATOR_NAMESPACE = "flyball-system"
"""Where the operator is installed unless somebody chose otherwise."""


def runtime_image() -> str:
    """Return the runtime image of this operator's own version; ``dev`` when it runs from a source tree, not installed."""
    return f"flyball-runtime:{installed_version(otherwise='dev')}"


def admin_token_secret(name: str, uid: str, key_fingerprint: str) -> str:
    """Return the name of the Secret with the admin token of deployment ``name``.

    The token is made from ``uid`` and the operator's key, and the Secret cannot change, so either one makes another name.
    """
    return f"{name}-admin-{hashlib.sha256(f'{uid}{key_fingerprint}'.encode()).hexdigest()[:10]}"


def rendered_admin_token_secret(name: str) -> str:
    """Return a name for that Secret where there is no cluster, so neither uid nor key."""
    return f"{name}-admin-token"


def boot_prior_map(name: str) -> str:
    """Return the name of the ConfigMap with the limits that new pods of deployment ``name`` start from."""
    return f"{name}-boot-prior"


def cache_claim(name: str) -> str:
    """Return the name of the PersistentVolumeClaim that the operator makes for deployment ``name``."""
    return f"{name}-cache"


def selector_labels(name: str) -> dict[str, str]:
    """Return the labels that select the pods of deployment ``name``; they never change during its life."""
    return {
        "app.kubernetes.io/name": "flyball",
        INSTANCE_LABEL: name,
        "app.kubernetes.io/component": "runtime",
    }


def labels(name: str) -> dict[str, str]:
    """Return the labels of every child object of deployment ``name``."""
    return {**selector_labels(name), MANAGED_BY_LABEL: MANAGER}


def metadata(namespace: str, name: str, child: str | None = None) -> dict[str, Any]:
    """Return the metadata of a child of deployment ``name``. It has the deployment's own name unless ``child`` names it."""
    return {"name": child or name, "namespace": namespace, "labels": labels(name)}

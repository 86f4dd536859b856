"""Names that Kubernetes objects, pods and local processes carry; spelled here and nowhere else."""

from importlib.metadata import PackageNotFoundError, version

GROUP = "flyball.dev"
API_VERSION = f"{GROUP}/v1alpha1"
KIND = "LLMDeployment"

RUNTIME_CONTAINER = "runtime"
API_PORT_NAME = "http"
ADMIN_PORT_NAME = "admin"

ADMIN_TOKEN_KEY = "token"
"""Key of the admin token inside its Secret."""

MODEL_MOUNT = "/mnt/model"
CACHE_MOUNT = "/var/cache/flyball"


def runtime_image() -> str:
    """Return the runtime image of this operator's own version; ``dev`` when it runs from a source tree, not installed."""
    try:
        tag = version("flyball")
    except PackageNotFoundError:
        tag = "dev"
    return f"flyball-runtime:{tag}"


def admin_token_secret(name: str) -> str:
    """Return the name of the Secret that holds the admin token of deployment ``name``."""
    return f"{name}-admin-token"


def selector_labels(name: str) -> dict[str, str]:
    """Return the labels that select the pods of deployment ``name``; they never change during its life."""
    return {
        "app.kubernetes.io/name": "flyball",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": "runtime",
    }


def labels(name: str) -> dict[str, str]:
    """Return the labels of every child object of deployment ``name``."""
    return {**selector_labels(name), "app.kubernetes.io/managed-by": "flyball-operator"}

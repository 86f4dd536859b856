"""The container that keeps the API port open while the runtime's is restarted."""

from flyball_operator import names
from flyball_operator.children.manifest import Manifest
from flyball_operator.children.platform import Platform
from flyball_operator.children.program import program
from flyball_operator.spec import LLMDeployment
from flyball_protocol import endpoints

_SOCKET = f"{names.RUN_MOUNT}/listener.sock"


def listener(llm: LLMDeployment, platform: Platform) -> Manifest:
    """Return the container that runs ``flyball listener``: it starts before the runtime's and ends after it."""
    return {
        "name": names.LISTENER_CONTAINER,
        **program(llm, platform),
        "restartPolicy": "Always",
        "args": [
            "listener",
            "--host=0.0.0.0",
            f"--port={endpoints.API_PORT}",
            f"--socket={_SOCKET}",
            f"--service={llm.name}:{llm.spec.service.port}",
        ],
        # Most of the memory is for the requests that are held while no replica takes them.
        "resources": {"requests": {"cpu": "10m", "memory": "48Mi"}, "limits": {"memory": "192Mi"}},
        "volumeMounts": [{"name": "run", "mountPath": names.RUN_MOUNT}],
    }


def listener_env() -> Manifest:
    """Return the variable by which the runtime takes the port from that container."""
    return {"name": endpoints.LISTENER_ENV, "value": _SOCKET}

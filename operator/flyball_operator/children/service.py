"""The Service in front of the ready replicas. The admin port is not in it."""

from flyball_operator import names
from flyball_operator.children.manifest import Manifest, metadata
from flyball_operator.spec import LLMDeployment


def service(llm: LLMDeployment) -> Manifest:
    """Return the v1 Service."""
    spec = llm.spec.service
    port = {"name": names.API_PORT_NAME, "port": spec.port, "targetPort": names.API_PORT_NAME, "protocol": "TCP"}
    found = metadata(llm)
    if spec.annotations:
        found["annotations"] = dict(spec.annotations)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": found,
        "spec": {
            "type": spec.type,
            "selector": names.selector_labels(llm.name),
            "ports": [{**port, "appProtocol": "http"}],
        },
    }

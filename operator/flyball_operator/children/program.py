"""What the containers that run ``flyball`` have in common."""

from flyball_operator.children.manifest import Manifest
from flyball_operator.children.platform import Platform
from flyball_operator.spec import LLMDeployment


def program(llm: LLMDeployment, platform: Platform) -> Manifest:
    """Return the fields of a container that say what runs, and what it may do."""
    runtime = llm.spec.runtime
    pull_policy = {"imagePullPolicy": runtime.image_pull_policy} if runtime.image_pull_policy else {}
    return {
        "image": runtime.image or platform.runtime_image,
        **pull_policy,
        "command": ["flyball"],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # What cannot start says why in its last lines; so the container's status says it too.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }

"""The Deployment that runs the replicas."""

from flyball_operator import names
from flyball_operator.children.manifest import Manifest, metadata
from flyball_operator.children.platform import Platform
from flyball_operator.children.pod import pod_template
from flyball_operator.spec import LLMDeployment

SLOW_START_MARGIN_S = 60
"""A replica that loads for the whole of its allowance is slow, not stuck."""


def deployment(llm: LLMDeployment, platform: Platform, *, admin_token_secret: str) -> Manifest:
    """Return the apps/v1 Deployment. Raises SpecError when ``spec.podTemplate`` cannot be merged."""
    rollout = llm.spec.rollout
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(llm),
        "spec": {
            "replicas": llm.spec.replicas,
            "selector": {"matchLabels": names.selector_labels(llm.name)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable},
            },
            "progressDeadlineSeconds": rollout.progress_deadline_seconds
            or llm.spec.startup_timeout_seconds + SLOW_START_MARGIN_S,
            "template": pod_template(llm, platform, admin_token_secret),
        },
    }

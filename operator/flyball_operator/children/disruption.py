"""The PodDisruptionBudget."""

from flyball_operator import names
from flyball_operator.children.manifest import Manifest, metadata
from flyball_operator.spec import LLMDeployment


def disruption_budget(llm: LLMDeployment) -> Manifest | None:
    """Return the policy/v1 PodDisruptionBudget, or None: with less than two replicas there is nothing to keep in service."""
    disruption = llm.spec.disruption
    if disruption.mode == "Disabled" or llm.spec.replicas < 2:
        return None
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(llm),
        "spec": {
            "maxUnavailable": disruption.max_unavailable,
            "selector": {"matchLabels": names.selector_labels(llm.name)},
            # Replicas that serve nobody must not keep a node from being drained.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }

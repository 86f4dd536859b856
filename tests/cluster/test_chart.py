"""The chart on a real API server: what it renders is accepted, its rights hold, the CRD comes, changes and stays."""

from collections.abc import Iterator

import pytest

from cluster_kit import ControlPlane, find_assets

pytestmark = pytest.mark.cluster
CRD = "llmdeployments.flyball.dev"
CHAT = {
    "apiVersion": "flyball.dev/v1alpha1",
    "kind": "LLMDeployment",
    "metadata": {"name": "chat", "namespace": "default"},
    "spec": {"model": {"uri": "hf://Qwen/Qwen3-0.6B"}},
}


@pytest.fixture(scope="module")
def bare() -> Iterator[ControlPlane]:
    """A control plane of our own without the CRD: it is for Helm to bring, change and leave."""
    with ControlPlane(find_assets()) as ours:
        yield ours

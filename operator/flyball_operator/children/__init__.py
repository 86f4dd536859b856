"""The Kubernetes objects that an LLMDeployment stands for. Pure: the cluster applies them, local mode runs the Deployment.

One file per kind of child. Every one carries ``names.labels``; the reconciler adds what depends on the cluster (owner, hash).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from flyball_operator.children.autoscaling import autoscaler
from flyball_operator.children.boot_prior import boot_prior_map
from flyball_operator.children.cache_claim import cache_claim
from flyball_operator.children.deployment import deployment
from flyball_operator.children.disruption import disruption_budget
from flyball_operator.children.manifest import Manifest
from flyball_operator.children.network_policy import network_policy
from flyball_operator.children.platform import Platform, lacking
from flyball_operator.children.pod_monitor import pod_monitor
from flyball_operator.children.service import service
from flyball_operator.spec import LLMDeployment

__all__ = ["Manifest", "Platform", "build", "deployment", "lacking"]


def build(
    llm: LLMDeployment,
    platform: Platform,
    *,
    admin_token_secret: str,
    boot_prior: Mapping[str, Any] | None = None,
) -> list[Manifest]:
    """Return every child of ``llm``, but the Secret with its admin token (see ``admin_token``).

    Args:
        admin_token_secret: name of that Secret.
        boot_prior: what new pods start from, as ``limits.json`` holds it; None when nothing is known yet.

    Raises:
        SpecError: ``spec.podTemplate`` cannot be merged.
    """
    return [*_always(llm, platform, admin_token_secret), *_optional(llm, platform, boot_prior)]


def _always(llm: LLMDeployment, platform: Platform, admin_token_secret: str) -> list[Manifest]:
    return [deployment(llm, platform, admin_token_secret=admin_token_secret), service(llm)]


def _optional(llm: LLMDeployment, platform: Platform, boot_prior: Mapping[str, Any] | None) -> Iterator[Manifest]:
    found = (
        cache_claim(llm),
        boot_prior_map(llm, boot_prior),
        autoscaler(llm, platform),
        disruption_budget(llm),
        network_policy(llm, platform),
        pod_monitor(llm, platform),
    )
    return (child for child in found if child is not None)

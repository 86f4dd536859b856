"""The pod template: what the spec's fields make, with ``spec.podTemplate`` merged over it."""

from flyball_operator import names
from flyball_operator.children.container import container
from flyball_operator.children.listener import listener
from flyball_operator.children.manifest import Manifest
from flyball_operator.children.merge import merge
from flyball_operator.children.platform import Platform
from flyball_operator.children.volumes import volumes
from flyball_operator.spec import LLMDeployment

GRACE_MARGIN_S = 10
"""Between the runtime's drain deadline and SIGKILL, so that the runtime itself ends what is left and says so."""

_NON_ROOT_ID = 65532


def pod_template(llm: LLMDeployment, platform: Platform, admin_token_secret: str) -> Manifest:
    """Return the PodTemplateSpec. Raises SpecError when ``spec.podTemplate`` cannot be merged."""
    metadata = {
        "labels": names.labels(llm.name),
        "annotations": {
            "kubectl.kubernetes.io/default-container": names.RUNTIME_CONTAINER
        },  # of `kubectl logs` and `exec`
    }
    ours = {"metadata": metadata, "spec": _pod(llm, platform, admin_token_secret)}
    return merge(ours, llm.spec.pod_template, "spec.podTemplate")


def _pod(llm: LLMDeployment, platform: Platform, admin_token_secret: str) -> Manifest:
    drain = llm.spec.rollout.drain
    pod: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": drain.pre_stop_seconds + drain.timeout_seconds + GRACE_MARGIN_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _NON_ROOT_ID,
            "runAsGroup": _NON_ROOT_ID,
            "fsGroup": _NON_ROOT_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [_spread_over_nodes(llm)],
        "initContainers": [listener(llm, platform)],
        "containers": [container(llm, platform, admin_token_secret)],
        "volumes": volumes(llm),
    }
    if llm.spec.runtime.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret.name} for secret in llm.spec.runtime.image_pull_secrets]
    return pod


def _spread_over_nodes(llm: LLMDeployment) -> Manifest:
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": names.selector_labels(llm.name)},
        "matchLabelKeys": ["pod-template-hash"],  # the pods of an old template do not count: they leave
    }

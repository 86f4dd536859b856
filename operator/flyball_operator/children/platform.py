"""What the cluster offers beyond Kubernetes itself."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from flyball_operator import names
from flyball_operator.spec import LLMDeployment


@dataclass(frozen=True)
class Platform:
    """What children may count on; the defaults are those of ``render``, which knows no cluster.

    Attributes:
        runtime_image: for whoever names none in ``spec.runtime.image``.
        keda: ScaledObjects of keda.sh/v1alpha1 can be made.
        pod_monitor: PodMonitors of monitoring.coreos.com/v1 can be made.
        operator_namespace: where the operator's own pods are.
    """

    runtime_image: str = field(default_factory=names.runtime_image)
    keda: bool = True
    pod_monitor: bool = True
    operator_namespace: str = names.OPERATOR_NAMESPACE


def lacking(llm: LLMDeployment, platform: Platform) -> Iterator[str]:
    """Yield one line for each child that the spec asks for by name and the cluster has no kind for."""
    if llm.spec.autoscaling.mode == "KEDA" and not platform.keda:
        yield (
            "spec.autoscaling.mode is KEDA, and the cluster has no ScaledObject (keda.sh/v1alpha1); "
            "install KEDA, or choose HPA, External or Disabled"
        )
    if llm.spec.monitoring.pod_monitor == "Enabled" and not platform.pod_monitor:
        yield (
            "spec.monitoring.podMonitor is Enabled, and the cluster has no PodMonitor (monitoring.coreos.com/v1); "
            "install the Prometheus operator, or choose Auto or Disabled"
        )

"""CRDs that children and examples need and other projects define."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster_kit import Cluster
from cluster_kit.go_module import GoModule

KEDA = GoModule("github.com/kedacore/keda/v2", "v2.21.0")
PROMETHEUS_OPERATOR = GoModule("github.com/prometheus-operator/prometheus-operator", "v0.90.1")
GATEWAY_API = GoModule("sigs.k8s.io/gateway-api", "v1.6.0")
INFERENCE_EXTENSION = GoModule("sigs.k8s.io/gateway-api-inference-extension", "v1.6.0")


def crd_files() -> list[Path]:
    """Return the files of ScaledObject, PodMonitor, Gateway, HTTPRoute and InferencePool."""
    standard = "config/crd/standard/gateway.networking.k8s.io"
    return [
        KEDA.file("config/crd/bases/keda.sh_scaledobjects.yaml"),
        PROMETHEUS_OPERATOR.file("example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml"),
        GATEWAY_API.file(f"{standard}_gateways.yaml"),
        GATEWAY_API.file(f"{standard}_httproutes.yaml"),
        INFERENCE_EXTENSION.file("config/crd/bases/inference.networking.k8s.io_inferencepools.yaml"),
    ]


@contextmanager
def installed(cluster: Cluster) -> Iterator[None]:
    """Have the CRDs on a cluster for a while: other tests count on their absence."""
    files = [f"--filename={path}" for path in crd_files()]
    cluster.kubectl("apply", "--server-side", *files)
    cluster.wait_established(*files)
    try:
        yield
    finally:
        cluster.kubectl("delete", *files)

"""The PodMonitor: what the Prometheus operator is told to scrape."""

from flyball_operator import names
from flyball_operator.children.manifest import Manifest, metadata
from flyball_operator.children.platform import Platform
from flyball_operator.spec import LLMDeployment
from flyball_protocol import endpoints


def pod_monitor(llm: LLMDeployment, platform: Platform) -> Manifest | None:
    """Return the monitoring.coreos.com/v1 PodMonitor, or None when it is disabled or the cluster does not know the kind."""
    monitoring = llm.spec.monitoring
    if monitoring.pod_monitor == "Disabled" or not platform.pod_monitor:
        return None
    interval = f"{monitoring.interval_seconds}s"
    common = metadata(llm)
    endpoint = {"port": names.API_PORT_NAME, "path": endpoints.METRICS_PATH, "interval": interval}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {**common, "labels": {**monitoring.labels, **common["labels"]}},
        "spec": {
            "selector": {"matchLabels": names.selector_labels(llm.name)},
            "podTargetLabels": [names.INSTANCE_LABEL],
            "podMetricsEndpoints": [{**endpoint, "scrapeTimeout": interval}],
        },
    }

"""The runtime container's probes."""

from flyball_operator import names
from flyball_operator.children.manifest import Manifest
from flyball_protocol import endpoints

STARTUP_PERIOD_S = 1
READINESS_PERIOD_S = 2
LIVENESS_PERIOD_S = 10
STUCK_GRACE_S = 10
"""What fails start-up or liveness is stuck and has nothing to drain, so it is not given the pod's whole grace period."""


def probes(startup_timeout_s: int) -> Manifest:
    """Return the three probes by their names in a container."""
    stuck = {"terminationGracePeriodSeconds": STUCK_GRACE_S}
    return {
        "startupProbe": _probe(endpoints.READYZ_PATH, STARTUP_PERIOD_S, startup_timeout_s // STARTUP_PERIOD_S) | stuck,
        "readinessProbe": _probe(endpoints.READYZ_PATH, READINESS_PERIOD_S, 2),
        "livenessProbe": _probe(endpoints.LIVEZ_PATH, LIVENESS_PERIOD_S, 3) | stuck,
    }


def _probe(path: str, period_s: int, failure_threshold: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": names.API_PORT_NAME},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failure_threshold,
    }

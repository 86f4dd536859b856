"""The kinds of Kubernetes objects that the operator deals with, and where the API server has them."""

from typing import NamedTuple

from flyball_operator import names


class Kind(NamedTuple):
    """One kind. ``plural`` is its name in URLs and in RBAC rules."""

    api_version: str
    kind: str
    plural: str

    @property
    def group(self) -> str:
        """The API group, "" for core."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]

    @property
    def resource(self) -> str:
        """The name that ``kubectl`` and error messages use: ``deployments.apps``, ``pods``."""
        return f"{self.plural}.{self.group}".rstrip(".")

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """Return the URL's path of one object or, without a name, of the collection."""
        prefix = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        scope = f"/namespaces/{namespace}" if namespace else ""
        parts = "".join(f"/{part}" for part in (name, subresource) if part)
        return f"{prefix}{scope}/{self.plural}{parts}"


LLM_DEPLOYMENT = Kind(names.API_VERSION, names.KIND, "llmdeployments")
POD = Kind("v1", "Pod", "pods")
SECRET = Kind("v1", "Secret", "secrets")
EVENT = Kind("v1", "Event", "events")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
ACCESS_REVIEW = Kind("authorization.k8s.io/v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews")

DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
SERVICE = Kind("v1", "Service", "services")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
DISRUPTION_BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
AUTOSCALER = Kind("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
SCALED_OBJECT = Kind("keda.sh/v1alpha1", "ScaledObject", "scaledobjects")
POD_MONITOR = Kind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors")

BUILT_IN_CHILDREN = (DEPLOYMENT, SERVICE, CONFIG_MAP, CLAIM, DISRUPTION_BUDGET, NETWORK_POLICY, AUTOSCALER)
"""Kinds of children that every cluster has. The admin token's Secret is none of them: it is created and never read."""

OPTIONAL_CHILDREN = (SCALED_OBJECT, POD_MONITOR)
"""Kinds of children that a cluster has when KEDA or the Prometheus operator is installed."""

CHILD_KINDS = {kind.kind: kind for kind in (*BUILT_IN_CHILDREN, *OPTIONAL_CHILDREN)}

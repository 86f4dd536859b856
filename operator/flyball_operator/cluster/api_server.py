"""The Kubernetes API in its own words: kinds and their paths, calls, and the errors that come back."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from flyball_operator import names
from flyball_operator.errors import OperatorError

_PATH = re.compile(
    r"/apis?/(?:(?P<group>[a-z0-9.-]+\.?[a-z0-9-]*)/)??(?P<version>v\d+[a-z0-9]*)"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+)(?:/(?P<subresource>[a-z]+))?)?"
)
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}

MAX_RETRY_AFTER_S = 60.0
"""The API server asks for a second or so; a proxy in maintenance may ask for a day."""


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


class ApiCall(NamedTuple):
    """An API call: ``patch``, ``deployments.apps``, ``team/chat``. RBAC speaks of verb and resource in these words."""

    verb: str
    resource: str
    target: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource} {self.target}".rstrip()


def verb_and_resource(method: str, path: str, *, watch: bool) -> tuple[str, str]:
    """Return verb and resource of a request: ``patch``, ``deployments.apps``. Paths that are no object's are discovery."""
    matched = _PATH.fullmatch(path)
    if matched is None:
        return ("get", "discovery")
    resource = matched["plural"] + (f".{matched['group']}" if matched["group"] else "")
    if matched["subresource"]:
        resource += f"/{matched['subresource']}"
    read = "watch" if watch else "get" if matched["name"] else "list"
    return (_VERBS.get(method, read), resource)


class ClusterError(OperatorError):
    """A call to the API server failed."""


class Unreachable(ClusterError):
    """No answer came: no connection, or not in time."""

    def __init__(self, call: ApiCall, cause: Exception) -> None:
        super().__init__(
            f"{call}: the API server does not answer ({type(cause).__name__}: {cause})".replace(": )", ")")
        )
        self.call = call


class NoObject(ClusterError):
    """Success was answered, and no object: something between here and the API server spoke in its place."""

    def __init__(self, call: ApiCall, text: str) -> None:
        super().__init__(f"{call}: the answer is no JSON object; is a proxy in between? It begins: {text}")


class ApiError(ClusterError):
    """The API server answered with an error.

    Attributes:
        reason: the machine-readable one, such as ``AlreadyExists``; "" when it gave none.
        message: the API server's own words.
        causes: machine-readable details, such as ``NamespaceTerminating``.
    """

    def __init__(self, call: ApiCall, status: int, body: Mapping[str, Any]) -> None:
        self.call = call
        self.status = status
        self.reason = str(body.get("reason", ""))
        self.message = str(body.get("message", "no message"))
        details = body.get("details") or {}
        self.causes = frozenset(str(cause.get("reason", "")) for cause in details.get("causes") or [])
        super().__init__(f"{call}: {status} {self.reason}: {self.message}")


class NotFound(ApiError):
    """404: no such object, or no such kind."""


class Conflict(ApiError):
    """409: the object exists already, is another one than thought, or changed meanwhile."""


class Expired(ApiError):
    """410: a resource version or a list's continuation that the API server no longer has."""


class Invalid(ApiError):
    """400, 422 and some 500s: the API server refuses the object as it is; sending it again would change nothing."""


class Forbidden(ApiError):
    """403: RBAC, a quota or an admission plugin says no."""

    @property
    def is_missing_rule(self) -> bool:
        """Whether the operator's role lacks a rule (a quota or an admission plugin words it otherwise)."""
        return " cannot " in self.message and " resource " in self.message

    @property
    def is_terminating_namespace(self) -> bool:
        return "NamespaceTerminating" in self.causes


class TooManyRequests(ApiError):
    """429: the API server sheds load. ``retry_after_s`` is what it asks for."""

    retry_after_s: float = 1.0


class Unavailable(ApiError):
    """5xx: the API server, its etcd or a webhook has a problem of its own."""


class WebhookFailed(ApiError):
    """500: an admission webhook of the cluster gives no answer, and nothing passes without it."""


_CLASSES: dict[int, type[ApiError]] = {
    400: Invalid,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Expired,
    422: Invalid,
    429: TooManyRequests,
}


def from_answer(call: ApiCall, status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> ApiError:
    """Return the error that an answer with a status of 400 and above stands for."""
    error = _class_of(status, body)(call, status, body)
    if isinstance(error, TooManyRequests):
        error.retry_after_s = _retry_after_s(headers.get("Retry-After"), error.retry_after_s)
    return error


def _class_of(status: int, body: Mapping[str, Any]) -> type[ApiError]:
    if status == 500:
        # Server-side apply of a field that the kind does not have is the client's mistake, and answered so.
        if "failed to create typed patch object" in str(body.get("message")):
            return Invalid
        if "failed calling webhook" in str(body.get("message")):
            return WebhookFailed
    return _CLASSES.get(status, Unavailable if status >= 500 else ApiError)


def _retry_after_s(header: str | None, default_s: float) -> float:
    try:
        return min(MAX_RETRY_AFTER_S, max(0.0, float(header))) if header else default_s
    except ValueError:  # an HTTP date: the API server sends seconds only, a proxy before it may not
        return default_s

"""The operator's own metrics."""

import re
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from flyball_operator.cluster.tuner_metrics import TunerMetrics

RECONCILE_BUCKETS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """One set of metrics in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.queue_depth = Gauge(
            "flyball_operator_queue_depth",
            "LLMDeployments that wait to be reconciled, those that wait for a retry not counted.",
            registry=self.registry,
        )
        self.queue_retries = Gauge(
            "flyball_operator_queue_retries",
            "LLMDeployments that wait for a retry after a failure. Those that are refused are not counted.",
            registry=self.registry,
        )
        self.refused = Gauge(
            "flyball_operator_refused",
            "LLMDeployments whose condition Accepted is False: a user has to change something.",
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "flyball_operator_reconcile_seconds",
            "Time of one reconcile, from the start to the last write.",
            buckets=RECONCILE_BUCKETS_S,
            registry=self.registry,
        )
        self.reconcile_errors = Counter(
            "flyball_operator_reconcile_errors_total",
            "Reconciles that failed and will be tried again, by kind of error.",
            ["error"],
            registry=self.registry,
        )
        self.api_calls = Counter(
            "flyball_operator_api_calls_total",
            "Calls to the API server, the watches among them. code is the HTTP status, or error where none came.",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self.resources = Gauge(
            "flyball_operator_llmdeployments", "LLMDeployments that this operator sees.", registry=self.registry
        )
        self.leader = Gauge(
            "flyball_operator_leader",
            "1 while this process holds the lease (or needs none) and acts, else 0.",
            registry=self.registry,
        )
        self.tuner = TunerMetrics(self.registry)


class Target(NamedTuple):
    """What a call is about, in the words of RBAC."""

    verb: str
    resource: str


_PATH = re.compile(
    r"/apis?/(?:(?P<group>[a-z0-9.-]+\.?[a-z0-9-]*)/)??(?P<version>v\d+[a-z0-9]*)"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+)(?:/(?P<subresource>[a-z]+))?)?"
)
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def target_of(method: str, path: str, *, watch: bool) -> Target:
    """Return verb and resource of a request: ``patch``, ``deployments.apps``. Paths that are no object's are discovery."""
    matched = _PATH.fullmatch(path)
    if matched is None:
        return Target("get", "discovery")
    resource = matched["plural"] + (f".{matched['group']}" if matched["group"] else "")
    if matched["subresource"]:
        resource += f"/{matched['subresource']}"
    read = "watch" if watch else "get" if matched["name"] else "list"
    return Target(_VERBS.get(method, read), resource)

"""A metrics adapter's look-alike: custom.metrics.k8s.io and external.metrics.k8s.io, as an HPA asks for them."""

import base64
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import msgspec

from cluster_kit.api import Api
from cluster_kit.control_plane import LOOPBACK, ControlPlane
from flyball_operator.cluster.api_server import POD

Object = dict[str, Any]
CUSTOM = "custom.metrics.k8s.io/v1beta2"
EXTERNAL = "external.metrics.k8s.io/v1beta1"
NAME = "metrics-adapter"


class Question(NamedTuple):
    """What an HPA asked. ``selector``: of the pods in the custom API, of the series in the external one."""

    api: str
    metric: str
    selector: str


class MetricsAdapter(ThreadingHTTPServer):
    """Knows the metrics of one namespace, as a test sets them.

    Attributes:
        totals: by metric, the sum over all pods; each has an equal share of it. A metric that is not here is not known.
        asked: all questions so far.
    """

    def __init__(self, api: Api, namespace: str) -> None:
        super().__init__((LOOPBACK, 0), _Handler)
        self.totals: dict[str, float] = {}
        self.asked: set[Question] = set()
        self._api = api
        self._namespace = namespace

    def answer(self, path: str, selector: str) -> Object | None:
        """Return the answer to a GET, None for what is not there."""
        match path.split("/"):
            case ["", "apis", group, version]:
                return self._discovery(f"{group}/{version}")
            case ["", "apis", group, version, "namespaces", self._namespace, *_, metric]:
                self.asked.add(Question(f"{group}/{version}", metric, selector))
                return self._values(f"{group}/{version}", metric, selector) if metric in self.totals else None
        return None

    def _discovery(self, api: str) -> Object:
        kind, prefix = ("MetricValueList", "pods/") if api == CUSTOM else ("ExternalMetricValueList", "")
        one = {"singularName": "", "namespaced": True, "kind": kind, "verbs": ["get"]}
        resources = [{"name": f"{prefix}{metric}", **one} for metric in self.totals]
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api, "resources": resources}

    def _values(self, api: str, metric: str, selector: str) -> Object:
        if api == EXTERNAL:
            items = [{"metricName": metric, "metricLabels": {}, **_measured(self.totals[metric])}]
            return {"kind": "ExternalMetricValueList", "apiVersion": api, "metadata": {}, "items": items}
        running = [pod for pod in self._api.list(POD, self._namespace, selector) if pod["status"]["phase"] == "Running"]
        items = [_of_pod(pod, metric, self.totals[metric] / len(running)) for pod in running]
        return {"kind": "MetricValueList", "apiVersion": api, "metadata": {}, "items": items}


def _of_pod(pod: Object, metric: str, value: float) -> Object:
    described = {"kind": "Pod", "apiVersion": "v1", **{key: pod["metadata"][key] for key in ("namespace", "name")}}
    return {"describedObject": described, "metric": {"name": metric}, **_measured(value)}


def _measured(value: float) -> Object:
    return {"timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "value": f"{round(value * 1000)}m"}


class _Handler(BaseHTTPRequestHandler):
    server: MetricsAdapter

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        answer = self.server.answer(url.path, parse_qs(url.query).get("labelSelector", [""])[0])
        self._send(404, _unknown(url.path)) if answer is None else self._send(200, answer)

    def _send(self, code: int, body: Object) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(msgspec.json.encode(body))

    def log_message(self, *_: object) -> None:
        pass


def _unknown(path: str) -> Object:
    message = f"the server could not find the metric {path.rpartition('/')[2]}"
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "code": 404,
        "reason": "NotFound",
        "message": message,
    }


@contextmanager
def metrics_adapter(control_plane: ControlPlane, api: Api, namespace: str) -> Iterator[MetricsAdapter]:
    """Give the cluster its one metrics adapter, for as long as this lasts.

    The two APIServices go before the server does: without an answer, they would hold up the end of every namespace.
    """
    with MetricsAdapter(api, namespace) as server:
        _encrypt(server, control_plane, f"{NAME}.{namespace}.svc")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            with _registered(control_plane, namespace, server.server_port):
                yield server
        finally:
            server.shutdown()
            thread.join()


def _encrypt(server: MetricsAdapter, control_plane: ControlPlane, host: str) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    control_plane.pki.authority.issue_cert(host).configure_cert(context)
    # Hands are shaken in the thread of the request: one caller that does not must not stop the others.
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)


@contextmanager
def _registered(control_plane: ControlPlane, namespace: str, port: int) -> Iterator[None]:
    """The aggregator follows the name of an ExternalName; any other Service would need an endpoint, never on loopback."""
    service = {"name": NAME, "namespace": namespace}
    spec = {"type": "ExternalName", "externalName": "localhost"}
    authority = base64.b64encode(control_plane.pki.ca.read_bytes()).decode()
    api_services = [_api_service(api, {**service, "port": port}, authority) for api in (CUSTOM, EXTERNAL)]
    names = [f"apiservice/{one['metadata']['name']}" for one in api_services]
    control_plane.apply({"apiVersion": "v1", "kind": "Service", "metadata": service, "spec": spec}, *api_services)
    try:
        control_plane.wait("condition=Available", *names)
        yield
    finally:
        control_plane.kubectl("delete", *names)


def _api_service(api: str, service: Object, authority: str) -> Object:
    group, _, version = api.partition("/")
    return {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"{version}.{group}"},
        "spec": {
            "group": group,
            "version": version,
            "service": service,
            "caBundle": authority,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
        },
    }

"""Dashboard and alerts of the chart, held to what our processes export, and to Prometheus itself."""

import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from msgspec import structs
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import prometheus_kit
from chart_kit import dashboard, goldens
from flyball_operator.cluster.monitoring import Metrics as OperatorMetrics
from flyball_operator.observed import Key
from flyball_operator.tuning.decide import decide
from flyball_operator.tuning.decision import Findings
from flyball_operator.tuning.loop import Round
from flyball_operator.tuning.state import Forecast, TunerState
from flyball_runtime.api import MetricsCollector
from flyball_runtime.core.clock import FakeClock
from flyball_runtime.core.measurements import RequestTimes
from operator_kit.evidence import TUNING, make_evidence, pods
from runtime.fake_engine import LIMITS, STEP_MODEL, FakeEngine, step_stats

VARIABLES = {"$__rate_interval": "1m", "$namespace": ".*", "$deployment": ".*"}
REPLICA = {"namespace": "team-a", "pod": "chat-1", "app_kubernetes_io_instance": "chat"}
OPERATOR = {"namespace": "flyball-system", "pod": "flyball-operator-1", "service": "flyball-operator"}
EVIDENCE = tuple(pods(make_evidence(itl_over=4000)))
UNIT_TESTS = Path(__file__).parents[1] / "chart" / "alerts_test.yaml"


class Replica:
    """The metrics of a runtime in which something happens before each scrape."""

    def __init__(self) -> None:
        self._clock = FakeClock()
        self._metrics = MetricsCollector(model_name="chat", clock=self._clock)
        self._metrics.attach(FakeEngine(vocab_size=384))

    def scrape(self) -> bytes:
        measured, request = self._metrics.measured, RequestTimes(self._clock.now(), 10)
        self._clock.advance(0.1)
        measured.step(
            step_stats(
                num_tokens=8,
                num_prefix_queried_tokens=10,
                num_prefix_hit_tokens=4,
                num_preemptions=1,
                blocked_by="kv",
                effective=structs.replace(LIMITS, step_time_target_ms=25.0),
                step_model=STEP_MODEL,
                predicted_s=0.02,
            )
        )
        for _ in range(3):
            measured.tokens([request])
            self._clock.advance(0.02)
        measured.ended(request, "stop", 3)
        measured.rejected("queue_full")
        return self._metrics.exposition("")[0]


class Operator:
    """The metrics of an operator in which something happens before each scrape."""

    def __init__(self) -> None:
        self._metrics = OperatorMetrics()

    @property
    def registry(self) -> CollectorRegistry:
        return self._metrics.registry

    def scrape(self) -> bytes:
        self._tune()
        self._metrics.reconcile_seconds.observe(0.02)
        self._metrics.reconcile_errors.labels("ApiError").inc()
        self._metrics.api_calls.labels("patch", "deployments.apps", "200").inc()
        return generate_latest(self.registry)

    def _tune(self) -> None:
        decision = structs.replace(
            decide(TUNING, TunerState(), EVIDENCE, now_s=1000.0),
            forecast=Forecast(what="itl", before=0.2, predicted=0.04),
            observed=0.03,
            findings=Findings(capacity_per_s=2.0, arrivals_per_s=1.5),
        )
        self._metrics.tuner.observe(Key("team-a", "chat"), TUNING, Round(EVIDENCE, decision, (), True), "Adjusting")


def exported() -> set[str]:
    """Names of all samples that replica and operator show."""
    texts = (Replica().scrape(), Operator().scrape())
    families = [one for text in texts for one in text_string_to_metric_families(text.decode())]
    return {sample.name for family in families for sample in family.samples}


def alerts() -> list[dict[str, object]]:
    groups = yaml.safe_load(goldens.ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    return [*dashboard.queries(), *(str(rule["expr"]) for rule in alerts())]


@pytest.mark.parametrize("expr", expressions())
def test_no_query_names_a_metric_that_is_not_exported(expr: str) -> None:
    named = set(re.findall(r"\b(?:flyball|vllm)[a-z_:]+", re.sub(r'"[^"]*"', "", expr)))
    assert named <= exported() and (named or expr == "vector(0.05)")


def test_the_alerts_fire_as_their_unit_tests_say() -> None:
    done = subprocess.run(
        [prometheus_kit.find("promtool"), "test", "rules", UNIT_TESTS.name],
        cwd=UNIT_TESTS.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_unit_test_in_which_it_fires() -> None:
    tests = yaml.safe_load(UNIT_TESTS.read_text())["tests"]
    fired = {one["alertname"] for test in tests for one in test["alert_rule_test"] if one.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in alerts()}


def test_every_alert_is_documented() -> None:
    page = (goldens.ROOT / "docs" / "operations.md").read_text()
    documented = re.findall(r"^\| `(Flyball\w+)` \|", page, re.MULTILINE)
    assert documented == [rule["alert"] for rule in alerts()]


@contextmanager
def served(source: "Replica | Operator") -> Iterator[str]:
    """Serve /metrics on loopback; yields HOST:PORT."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = source.scrape()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.slow
def test_a_real_prometheus_has_an_answer_to_every_query(tmp_path: Path) -> None:
    with served(Replica()) as replica, served(Operator()) as operator:
        targets = {replica: REPLICA, operator: OPERATOR}
        with prometheus_kit.scraping(targets, tmp_path) as prometheus:
            for name in ("flyball_requests_total", "flyball_operator_api_calls_total"):
                prometheus.wait_for(f"count_over_time({name}[5m]) >= 3")
            unanswered = [expr for expr in dashboard.queries() if not prometheus.query(with_values(expr))]
            for rule in alerts():
                prometheus.query(str(rule["expr"]))
    assert unanswered == []


def with_values(expr: str) -> str:
    """Return a query of the dashboard with values in place of Grafana's variables."""
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    return expr

"""What a trial should bring and what it brought: in the status, in the metrics, and in words."""

from typing import Any

import msgspec
import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry
from rich.console import Console

from flyball_operator.cluster.tuner_metrics import TunerMetrics
from flyball_operator.commands.explanation import BECAUSE, of_status, render
from flyball_operator.observed import Key
from flyball_operator.status.tuning import MadeDecision
from flyball_operator.tuning import Decision, Reason
from flyball_operator.tuning.decide import decide
from flyball_operator.tuning.decision import Findings
from flyball_operator.tuning.loop import Round
from flyball_operator.tuning.state import Forecast, TunerState
from operator_kit.evidence import TUNING, make_evidence, pods

KEY = Key("team", "chat")
EVIDENCE = tuple(pods(make_evidence(itl_over=4000)))
MADE = {
    "time": "2026-01-01T10:00:00Z",
    "action": "try",
    "verdict": "tried",
    "reason": "InterTokenLatencyOver",
    "message": "max_num_batched_tokens 512 -> 358: 20% took longer than 40 ms",
}
FORECAST = {"objective": "interTokenLatency", "beforePerMille": 200, "predictedPerMille": 40}


def decision(**changes: Any) -> Decision:
    made = decide(TUNING, TunerState(), EVIDENCE, now_s=1000.0)
    return structs.replace(made, **({"forecast": Forecast(what="itl", before=0.2, predicted=0.04)} | changes))


def text(**tuning: Any) -> list[str]:
    """The lines of an explanation, without what is only space."""
    found = {
        "metadata": {"name": "chat", "namespace": "team"},
        "spec": {"model": {"uri": "hf://org/name"}, "tuning": {"mode": "Auto", "objectives": {}}},
        "status": {"tuning": {"state": "Converged"} | tuning},
    }
    console = Console(width=200)
    with console.capture() as printed:
        console.print(render(of_status(found)))
    return [" ".join(line.split()) for line in printed.get().splitlines()]


def samples(metrics: CollectorRegistry, name: str) -> list[tuple[dict[str, str], float]]:
    return [(one.labels, one.value) for family in metrics.collect() for one in family.samples if one.name == name]


@pytest.mark.parametrize("observed", [None, 0.0314])
def test_the_status_has_them_in_samples_in_a_thousand(observed: float | None) -> None:
    done = Round(EVIDENCE, decision(observed=observed), (), True)
    shown = msgspec.to_builtins(MadeDecision.of(TUNING, done, "2026-01-01T10:00:00Z"))
    assert shown["forecast"] == FORECAST | ({} if observed is None else {"observedPerMille": 31})


def test_they_are_told_side_by_side() -> None:
    kept = MADE | {"verdict": "kept", "forecast": FORECAST | {"observedPerMille": 31}}
    shown = text(decisions=[kept, MADE | {"forecast": FORECAST}])
    predicted = "Predicted for inter-token latency: 20 % -> 4 % over"
    assert [line for line in shown if line.startswith("Predicted")] == [predicted, f"{predicted}; came: 3.1 %"]


def test_the_capacity_is_told() -> None:
    shown = text(capacity={"requestsPerMinute": 120, "arrivalsPerMinute": 90, "headroomPercent": 25})
    assert "A replica can serve about 120 requests a minute within the objectives and gets 90; 25 % are free." in shown


def test_the_words_for_reasons_are_of_reasons_that_exist() -> None:
    assert BECAUSE.keys() <= {*Reason}
    assert "Tokens came too slowly (InterTokenLatencyOver): 20% took longer than 40 ms" in text(decisions=[MADE])


def test_the_metrics_have_those_of_the_last_trial() -> None:
    registry = CollectorRegistry()
    metrics, of = TunerMetrics(registry), {"namespace": "team", "llmdeployment": "chat"}
    itl = of | {"objective": "inter_token_latency"}
    metrics.observe(KEY, TUNING, Round(EVIDENCE, decision(), (), True), "Adjusting")
    assert samples(registry, "flyball_tuner_predicted_share") == [(itl, 0.04)]
    assert samples(registry, "flyball_tuner_observed_share") == samples(registry, "flyball_tuner_headroom_ratio") == []
    judged = decision(observed=0.03, findings=Findings(capacity_per_s=2.0, arrivals_per_s=1.5))
    metrics.observe(KEY, TUNING, Round(EVIDENCE, judged, (), True), "Adjusting")
    metrics.observe(KEY, TUNING, Round(EVIDENCE, decision(forecast=None), (), True), "Converged")
    assert samples(registry, "flyball_tuner_observed_share") == [(itl, 0.03)]
    assert samples(registry, "flyball_tuner_headroom_ratio") == [], "nothing is known of this round"
    assert samples(registry, "flyball_tuner_load_replicas") == [], "so an autoscaler holds, and does not scale down"
    metrics.forget(KEY)
    assert samples(registry, "flyball_tuner_predicted_share") == []


@pytest.mark.parametrize(
    ("findings", "free", "replicas"),
    [
        (Findings(capacity_per_s=2.0, arrivals_per_s=2.5), -0.25, 1.25 * len(EVIDENCE)),
        (Findings(arrivals_per_s=0.0), 1.0, 0.0),  # nothing comes, so it does not matter what could be served
    ],
)
def test_the_load_is_that_of_all_replicas(findings: Findings, free: float, replicas: float) -> None:
    registry = CollectorRegistry()
    TunerMetrics(registry).observe(KEY, TUNING, Round(EVIDENCE, decision(findings=findings), (), True), "Adjusting")
    of = {"namespace": "team", "llmdeployment": "chat"}
    assert samples(registry, "flyball_tuner_headroom_ratio") == [(of, pytest.approx(free))]
    assert samples(registry, "flyball_tuner_load_replicas") == [(of, pytest.approx(replicas))]

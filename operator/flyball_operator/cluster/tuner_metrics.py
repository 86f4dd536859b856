"""Metrics of the tuner, by LLMDeployment. Those of a deployment go with it, so their number is bounded."""

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from flyball_operator import names
from flyball_operator.observed import Key
from flyball_operator.spec import Tuning
from flyball_operator.status.tuning import State, signals_of
from flyball_operator.tuning.decision import Decision
from flyball_operator.tuning.loop import Round
from flyball_operator.tuning.moved import moved_by, verdict_of
from flyball_operator.tuning.signals import Signal, Standing

OF = ("namespace", "llmdeployment")
STATES: tuple[str, ...] = get_args(State)
OBJECTIVES = ("ttft", "inter_token_latency")
OBJECTIVE_OF = {"ttft": "ttft", "itl": "inter_token_latency"}


class _Deployment:
    """What is known of one deployment.

    Attributes:
        decisions: how many were made, by knob, reason and verdict.
        signals: by objective, those that were posed.
        load: what arrives, as a share of what a replica can serve.
        trial: the last decision about a trial with a forecast.
    """

    def __init__(self) -> None:
        self.decisions: Counter[tuple[str, str, str]] = Counter()
        self.state: str = ""
        self.signals: dict[str, Signal] = {}
        self.load: float | None = None
        self.num_replicas = 0
        self.trial: Decision | None = None


class TunerMetrics(Collector):
    """Shows what rounds of tuning came to."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._deployments: dict[Key, _Deployment] = {}
        registry.register(self)

    def observe(self, key: Key, tuning: Tuning, done: Round, state: State) -> None:
        """Take in a round. Holds count once, until another decision follows."""
        one = self._deployments.setdefault(key, _Deployment())
        one.state = state
        found = dict(zip(OBJECTIVES, signals_of(tuning, done.evidence), strict=True))
        one.signals = {name: signal for name, signal in found.items() if signal.objective_s is not None}
        one.load, one.num_replicas = done.decision.findings.load, len(done.evidence)
        one.trial = done.decision if done.decision.forecast is not None else one.trial
        verdict = verdict_of(tuning, done.decision)
        if done.told or verdict != "held":
            knobs = [moved.knob for moved in moved_by(done.decision, done.evidence)]
            one.decisions.update((knob, str(done.decision.reason), verdict) for knob in knobs or [""])

    def forget(self, key: Key) -> None:
        """Drop a deployment that is gone, or no longer tuned."""
        self._deployments.pop(key, None)

    def collect(self) -> Iterator[Metric]:
        decisions = CounterMetricFamily(
            "flyball_tuner_decisions",
            "Decisions by the limit that they move (empty: none), reason and verdict.",
            labels=[*OF, "knob", "reason", "verdict"],
        )
        objectives = _gauge("flyball_tuner_objective_seconds", "Objective of a latency's p95.", "objective")
        violations = _gauge(
            "flyball_tuner_violation_share",
            "Share of the samples in the window that took longer than the objective, 0 to 1. Absent with too few samples.",
            "objective",
        )
        predicted = _gauge(
            "flyball_tuner_predicted_share", "Share of samples that the last trial should have over.", "objective"
        )
        observed = _gauge(
            "flyball_tuner_observed_share",
            "Share of samples that it had over. Absent until it is judged, and if it could not be.",
            "objective",
        )
        headroom = GaugeMetricFamily(
            "flyball_tuner_headroom_ratio",
            "Share of what a replica can serve within the objectives that is free. Negative when more arrives.",
            labels=OF,
        )
        load = GaugeMetricFamily(
            names.TUNER_LOAD,
            "Replicas that what arrives would fill, each with as much as it can serve within the objectives.",
            labels=OF,
        )
        states = _gauge("flyball_tuner_state", "1 for the state that status.tuning has, else 0.", "state")
        for key, one in self._deployments.items():
            for labels, count in one.decisions.items():
                decisions.add_metric([*key, *labels], count)
            for name, signal in one.signals.items():
                objectives.add_metric([*key, name], signal.objective_s or 0.0)
                if signal.standing is not Standing.UNKNOWN:
                    violations.add_metric([*key, name], signal.share)
            if one.load is not None:
                headroom.add_metric(key, 1.0 - one.load)
                load.add_metric(key, one.load * one.num_replicas)
            if one.trial is not None and one.trial.forecast is not None:
                name = OBJECTIVE_OF[one.trial.forecast.what]
                predicted.add_metric([*key, name], one.trial.forecast.predicted)
                if one.trial.observed is not None:
                    observed.add_metric([*key, name], one.trial.observed)
            for state in STATES:
                states.add_metric([*key, state], state == one.state)
        return iter((decisions, objectives, violations, predicted, observed, headroom, load, states))


def _gauge(name: str, text: str, label: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=[*OF, label])

"""The Grafana dashboard of the chart, as code. ``make chart`` writes it to charts/flyball/files/dashboard.json."""

import json
from typing import Any, NamedTuple

Json = dict[str, Any]

OF = 'namespace=~"$namespace", app_kubernetes_io_instance=~"$deployment"'
"""Selects the replicas of the chosen LLMDeployments, by the labels that a PodMonitor of the operator gives them."""

TUNED = 'namespace=~"$namespace", llmdeployment=~"$deployment"'
"""The same of the operator's metrics."""

BY = "namespace, app_kubernetes_io_instance"
NAMED = "{{namespace}}/{{app_kubernetes_io_instance}}"
WIDTH, HEIGHT, PER_ROW = 8, 8, 3


class Query(NamedTuple):
    """A PromQL expression and the name of each series that it returns."""

    expr: str
    legend: str


class Panel(NamedTuple):
    title: str
    unit: str
    description: str
    queries: tuple[Query, ...]
    lowest: int | None = 0


def _quantiles(metric: str) -> tuple[Query, ...]:
    rate = f"sum by (le, {BY}) (rate({metric}_bucket{{{OF}}}[$__rate_interval]))"
    return tuple(Query(f"histogram_quantile({share / 100:g}, {rate})", f"p{share} {NAMED}") for share in (50, 95, 99))


def _p95(metric: str, what: str) -> Query:
    rate = f"sum by (le, {BY}) (rate({metric}_bucket{{{OF}}}[$__rate_interval]))"
    return Query(f"histogram_quantile(0.95, {rate})", f"{what} {NAMED}")


def _objective(name: str) -> Query:
    """Return the tuner's objective for a latency, to be drawn beside it."""
    selected = f'{TUNED}, objective="{name}"'
    return Query(
        f"max by (namespace, llmdeployment) (flyball_tuner_objective_seconds{{{selected}}})",
        "objective {{namespace}}/{{llmdeployment}}",
    )


def _rate(metric: str, *by: str, selector: str = OF) -> str:
    return f"sum by ({', '.join(by)}) (rate({metric}{{{selector}}}[$__rate_interval]))"


def _sum(metric: str) -> Query:
    return Query(f"sum by ({BY}) ({metric}{{{OF}}})", NAMED)


def _limit(name: str, title: str, unit: str) -> Panel:
    selected = f'{OF}, limit="{name}"'
    return Panel(
        f"Limit: {title}",
        unit,
        "Target: what was asked for. In force: what holds now; a lowered limit drains first.",
        (
            Query(f"min by ({BY}) (flyball_limit_target{{{selected}}})", f"target {NAMED}"),
            Query(f"flyball_limit_effective{{{selected}}}", "in force {{pod}}"),
        ),
    )


ROWS: dict[str, tuple[Panel, ...]] = {
    "Latency": (
        Panel(
            "Time to first token",
            "s",
            "From a request's complete body to its first token.",
            (*_quantiles("flyball_time_to_first_token_seconds"), _objective("ttft")),
        ),
        Panel(
            "Inter-token latency",
            "s",
            "Gap between two consecutive tokens of a request.",
            (*_quantiles("flyball_inter_token_latency_seconds"), _objective("inter_token_latency")),
        ),
        Panel(
            "Duration of an engine step",
            "s",
            "Plan, run and commit. A decoding request gets one token a step.",
            _quantiles("flyball_step_duration_seconds"),
        ),
    ),
    "Traffic": (
        Panel(
            "Requests by outcome",
            "reqps",
            "Ended requests. abort: the client went away.",
            (Query(_rate("flyball_requests_total", BY, "outcome"), f"{{{{outcome}}}} {NAMED}"),),
        ),
        Panel(
            "Refused requests",
            "reqps",
            "Refused before they ran, by error code; queue_full is an HTTP 429.",
            (Query(_rate("flyball_requests_rejected_total", BY, "reason"), f"{{{{reason}}}} {NAMED}"),),
        ),
        Panel(
            "Tokens",
            "short",
            "Prompt and output tokens a second.",
            (
                Query(_rate("flyball_prompt_tokens_total", BY), f"prompt {NAMED}"),
                Query(_rate("flyball_generation_tokens_total", BY), f"output {NAMED}"),
            ),
        ),
        Panel("Requests running", "short", "Requests that hold KV blocks.", (_sum("flyball_requests_running"),)),
        Panel("Requests waiting", "short", "Requests in the queues.", (_sum("flyball_requests_waiting"),)),
        Panel(
            "Why the head of the queue waits",
            "percentunit",
            "Share of steps by what kept the first waiting request out: seqs, kv, budget or step_time; none: nothing did.",
            (
                Query(
                    f"{_rate('flyball_blocked_steps_total', BY, 'reason')} / on ({BY}) group_left () "
                    f"{_rate('flyball_blocked_steps_total', BY)}",
                    f"{{{{reason}}}} {NAMED}",
                ),
            ),
        ),
    ),
    "Limits": (
        _limit("max_num_seqs", "running sequences", "short"),
        _limit("max_num_batched_tokens", "tokens a step", "short"),
        _limit("kv_cache_fraction", "share of the KV cache", "percentunit"),
    ),
    "Step time": (
        Panel(
            "Predicted and measured",
            "s",
            "p95 of the time to the next tokens as predicted when a step is launched, and of the steps as they were.",
            (
                _p95("flyball_step_predicted_seconds", "predicted"),
                _p95("flyball_step_duration_seconds", "measured"),
                Query(f'flyball_limit_effective{{{OF}, limit="step_time_target_ms"}} / 1000', "target {{pod}}"),
            ),
        ),
        Panel(
            "Error of the prediction",
            "percentunit",
            "Over the predicted time, of the last 256 steps.",
            (Query(f"flyball_step_residual_ratio{{{OF}}}", "p{{quantile}} {{pod}}"),),
        ),
        Panel(
            "Step time of an empty step",
            "s",
            "The learned model's fixed part. If it rises at one replica alone, something else slows that node down.",
            (Query(f'flyball_step_model{{{OF}, coefficient="base_s"}}', "{{pod}}"),),
        ),
    ),
    "Tuning": (
        Panel(
            "Samples over the objective",
            "percentunit",
            "Share in the window, by objective. The budget is 5 %.",
            (
                Query(
                    f"max by (namespace, llmdeployment, objective) (flyball_tuner_violation_share{{{TUNED}}})",
                    "{{objective}} {{namespace}}/{{llmdeployment}}",
                ),
                Query("vector(0.05)", "budget"),
            ),
        ),
        Panel(
            "Decisions",
            "short",
            "More than a hold, since the operator started, by limit, reason and verdict.",
            (
                Query(
                    "sum by (namespace, llmdeployment, knob, reason, verdict) "
                    f'(flyball_tuner_decisions_total{{{TUNED}, verdict!="held"}})',
                    "{{verdict}} {{knob}} {{reason}} {{namespace}}/{{llmdeployment}}",
                ),
            ),
        ),
        Panel(
            "Trials: predicted and observed",
            "percentunit",
            "Share of samples over the objective that the last trial should have, and had. Its end is drawn when it is judged.",
            (
                Query(
                    f"flyball_tuner_predicted_share{{{TUNED}}}",
                    "predicted {{objective}} {{namespace}}/{{llmdeployment}}",
                ),
                Query(
                    f"flyball_tuner_observed_share{{{TUNED}}}", "observed {{objective}} {{namespace}}/{{llmdeployment}}"
                ),
            ),
        ),
        Panel(
            "Headroom",
            "percentunit",
            "Share of what a replica can serve within the objectives that is free. Below 0, limits cannot help: add replicas.",
            (Query(f"flyball_tuner_headroom_ratio{{{TUNED}}}", "{{namespace}}/{{llmdeployment}}"),),
            None,
        ),
        Panel(
            "State",
            "short",
            "What status.tuning.state says.",
            (
                Query(
                    f"max by (namespace, llmdeployment, state) (flyball_tuner_state{{{TUNED}}}) == 1",
                    "{{state}} {{namespace}}/{{llmdeployment}}",
                ),
            ),
        ),
    ),
    "KV cache": (
        Panel(
            "KV cache in use",
            "percentunit",
            "Blocks that running requests hold, over those that the limit allows.",
            (Query(f"flyball_kv_cache_usage_ratio{{{OF}}}", "{{pod}}"),),
        ),
        Panel(
            "Prefix cache hits",
            "percentunit",
            "Share of the prompt tokens that were found in the prefix cache.",
            (
                Query(
                    f"{_rate('flyball_prefix_cache_hit_tokens_total', BY)} / "
                    f"({_rate('flyball_prefix_cache_queried_tokens_total', BY)} > 0)",
                    NAMED,
                ),
            ),
        ),
        Panel(
            "Preemption",
            "short",
            "Preempted requests, and computed tokens thrown away by that, a second.",
            (
                Query(_rate("flyball_preemptions_total", BY), f"requests {NAMED}"),
                Query(_rate("flyball_recomputed_tokens_total", BY), f"tokens {NAMED}"),
            ),
        ),
    ),
    "Operator": (
        Panel(
            "LLMDeployments",
            "short",
            "refused: the condition Accepted is False. retries: a call failed and is tried again.",
            (
                Query("max(flyball_operator_llmdeployments)", "served"),
                Query("max(flyball_operator_refused)", "refused"),
                Query("max(flyball_operator_queue_retries)", "retries"),
                Query("max(flyball_operator_queue_depth)", "waiting"),
            ),
        ),
        Panel(
            "Time of a reconcile",
            "s",
            "From the start to the last write.",
            (
                Query(
                    "histogram_quantile(0.95, "
                    f"{_rate('flyball_operator_reconcile_seconds_bucket', 'le', selector='')})",
                    "p95",
                ),
                Query(
                    f"histogram_quantile(0.5, {_rate('flyball_operator_reconcile_seconds_bucket', 'le', selector='')})",
                    "p50",
                ),
            ),
        ),
        Panel(
            "Calls to the API server",
            "reqps",
            "Without the watches. At rest there are no writes.",
            (
                Query(
                    _rate("flyball_operator_api_calls_total", "verb", "code", selector='verb!="watch"'),
                    "{{verb}} {{code}}",
                ),
            ),
        ),
    ),
}


def dashboard() -> Json:
    """Return the dashboard in Grafana's JSON model."""
    return {
        "uid": "flyball",
        "title": "Flyball",
        "tags": ["flyball", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": _panels(),
    }


def queries() -> list[str]:
    """Return every PromQL expression of the dashboard, with Grafana's variables in it."""
    return [query.expr for panels in ROWS.values() for panel in panels for query in panel.queries]


def as_json() -> str:
    """Return the dashboard with a line for each panel, so that changes can be reviewed."""
    found = dashboard()
    rows = ",\n".join(f"    {json.dumps(panel)}" for panel in found.pop("panels"))
    head = json.dumps(found, indent=2).removesuffix("\n}")
    return f'{head},\n  "panels": [\n{rows}\n  ]\n}}\n'


def _variables() -> list[Json]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    chosen = 'flyball_requests_running{namespace=~"$namespace"}'
    return [
        source,
        _variable("namespace", "Namespace", "label_values(flyball_requests_running, namespace)"),
        _variable("deployment", "LLMDeployment", f"label_values({chosen}, app_kubernetes_io_instance)"),
    ]


def _variable(name: str, label: str, query: str) -> Json:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _source(),
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _source() -> Json:
    return {"type": "prometheus", "uid": "${datasource}"}


def _panels() -> list[Json]:
    found: list[Json] = []
    y = 0
    for title, panels in ROWS.items():
        place = {"x": 0, "y": y, "w": PER_ROW * WIDTH, "h": 1}
        found.append(
            {"id": len(found) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        )
        for i, panel in enumerate(panels):
            place = {"x": i % PER_ROW * WIDTH, "y": y + 1 + i // PER_ROW * HEIGHT, "w": WIDTH, "h": HEIGHT}
            found.append({"id": len(found) + 1, "gridPos": place, **_panel(panel)})
        y += 1 + -(-len(panels) // PER_ROW) * HEIGHT
    return found


def _panel(panel: Panel) -> Json:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _source(),
        "fieldConfig": {"defaults": _scale(panel), "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _source(), "expr": query.expr, "legendFormat": query.legend}
            for i, query in enumerate(panel.queries)
        ],
    }


def _scale(panel: Panel) -> Json:
    return {"unit": panel.unit} if panel.lowest is None else {"unit": panel.unit, "min": panel.lowest}

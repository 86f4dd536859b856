"""Metrics: what is counted, what the scrape shows, and that Prometheus' own tools accept it."""

import re
import subprocess

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import prometheus_kit
from flyball_protocol import KVBlocks, Limits
from flyball_runtime.api import MetricsCollector
from flyball_runtime.api.metrics import VLLM_NAMES
from flyball_runtime.core.clock import FakeClock
from flyball_runtime.core.measurements import LATENCY_EDGES_S, RequestOutcome, RequestTimes
from runtime.api.support import MODEL, chat
from runtime.fake_engine import STEP_MODEL, FakeEngine, step_stats

EXPECTED_NAMES = """
flyball_requests_running flyball_requests_running_ratio flyball_requests_waiting
flyball_kv_blocks flyball_kv_blocks_capacity flyball_kv_cache_usage_ratio
flyball_limit_target flyball_limit_effective flyball_limits_revision flyball_blocked_steps flyball_blocked_by_share
flyball_prefix_cache_queried_tokens flyball_prefix_cache_hit_tokens flyball_preemptions flyball_recomputed_tokens
flyball_prompt_tokens flyball_generation_tokens flyball_requests flyball_requests_rejected flyball_requests_arrived
flyball_time_to_first_token_seconds flyball_inter_token_latency_seconds flyball_time_per_output_token_seconds
flyball_e2e_request_latency_seconds flyball_request_prompt_tokens flyball_request_generation_tokens
flyball_step_duration_seconds flyball_step_predicted_seconds flyball_step_model flyball_step_interrupted_ratio
flyball_step_residual_ratio flyball_step_model_settled flyball_step_tokens flyball_time_to_first_token_window_seconds
flyball_inter_token_latency_window_seconds flyball_e2e_request_latency_window_seconds flyball_startup_seconds
flyball_draining flyball_build_info vllm:num_requests_waiting vllm:num_requests_running vllm:kv_cache_usage_perc
vllm:cache_config_info vllm:request_success vllm:prompt_tokens vllm:generation_tokens vllm:prefix_cache_queries
vllm:prefix_cache_hits vllm:num_preemptions vllm:time_to_first_token_seconds vllm:inter_token_latency_seconds
vllm:request_time_per_output_token_seconds vllm:e2e_request_latency_seconds vllm:request_prompt_tokens
vllm:request_generation_tokens
flyball_cpu_threads
flyball_swapped_out_blocks flyball_swapped_in_blocks flyball_host_cache_hit_tokens flyball_swap_space_usage_ratio
vllm:external_prefix_cache_hits vllm:cpu_cache_usage_perc
flyball_spec_decode_num_drafts flyball_spec_decode_num_draft_tokens flyball_spec_decode_num_accepted_tokens
vllm:spec_decode_num_drafts vllm:spec_decode_num_draft_tokens vllm:spec_decode_num_accepted_tokens
"""

VLLM_DASHBOARD = """
rate(vllm:e2e_request_latency_seconds_sum) rate(vllm:e2e_request_latency_seconds_count)
histogram_quantile(vllm:e2e_request_latency_seconds_bucket) histogram_quantile(vllm:time_to_first_token_seconds_bucket)
histogram_quantile(vllm:inter_token_latency_seconds_bucket) increase(vllm:request_prompt_tokens_bucket)
increase(vllm:request_generation_tokens_bucket) rate(vllm:prompt_tokens_total) rate(vllm:generation_tokens_total)
increase(vllm:request_success_total) vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc
"""
"""What the panels of vLLM's own Grafana dashboard ask for, of what we measure; each with the label model_name."""


def scrape(metrics: MetricsCollector) -> dict[tuple[str, ...], float]:
    """Samples of the text format by name and label values."""
    text = metrics.exposition("")[0].decode()
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def run_one_request(metrics: MetricsCollector, clock: FakeClock) -> None:
    times = RequestTimes(clock.now(), 10)
    for gap_s, count in [(0.2, 1), (0.01, 1), (0.06, 3)]:
        clock.advance(gap_s)
        metrics.measured.tokens([times], count)
    metrics.measured.ended(times, "stop", 5)


def test_every_name_is_there_with_help_and_only_those(metrics: MetricsCollector, engine: FakeEngine) -> None:
    metrics.attach(engine)
    metrics.measured.step(step_stats(num_tokens=1, step_model=STEP_MODEL))
    families = list(text_string_to_metric_families(metrics.exposition("")[0].decode()))
    ours = {family.name for family in families if not family.name.startswith("process_")}
    assert ours == set(EXPECTED_NAMES.split())
    assert all(family.documentation for family in families)


def test_latencies_of_a_request(metrics: MetricsCollector, clock: FakeClock) -> None:
    run_one_request(metrics, clock)
    values = scrape(metrics)
    assert values["flyball_time_to_first_token_seconds_sum",] == pytest.approx(0.2)
    assert values["flyball_inter_token_latency_seconds_count",] == 4, "three tokens in one event are three gaps"
    assert values["flyball_inter_token_latency_seconds_sum",] == pytest.approx(0.07)
    assert values["flyball_time_per_output_token_seconds_sum",] == pytest.approx(0.07 / 4)
    assert values["flyball_e2e_request_latency_seconds_sum",] == pytest.approx(0.27)
    assert values["flyball_prompt_tokens_total",] == 10 and values["flyball_generation_tokens_total",] == 5
    assert values["flyball_requests_total", "stop"] == 1 and values["flyball_requests_total", "length"] == 0
    assert values["flyball_inter_token_latency_window_seconds", "0.5"] == pytest.approx(0.02)
    assert values["flyball_request_prompt_tokens_bucket", "10"] == 1, "an edge belongs to the bucket below it"


def test_vllms_dashboard_finds_its_series_and_our_values(metrics: MetricsCollector, clock: FakeClock) -> None:
    metrics.measured.step(step_stats(num_tokens=1, num_preemptions=2))
    metrics.measured.step(step_stats(num_tokens=9, num_drafts=2, num_draft_tokens=7, num_accepted_tokens=3))
    run_one_request(metrics, clock)
    values = scrape(metrics)
    drafted = [
        values[f"vllm:spec_decode_num_{what}_total", MODEL] for what in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    assert drafted == [2, 7, 3]
    series = {key[0] for key in values if MODEL in key}
    assert set(re.findall(r"vllm:\w+", VLLM_DASHBOARD)) <= series
    assert values["vllm:request_success_total", "stop", MODEL] == values["flyball_requests_total", "stop"] == 1
    assert values["vllm:generation_tokens_total", MODEL] == 5 and values["vllm:num_preemptions_total", MODEL] == 2
    families = {one.name: one for one in text_string_to_metric_families(metrics.exposition("")[0].decode())}
    for ours, theirs in VLLM_NAMES.items():
        assert [one.value for one in families[theirs].samples] == [one.value for one in families[ours].samples], theirs


@pytest.mark.parametrize("outcome", ["abort", "error"])
def test_a_request_that_did_not_finish_counts_no_latency(
    metrics: MetricsCollector, clock: FakeClock, outcome: RequestOutcome
) -> None:
    metrics.measured.ended(RequestTimes(clock.now(), 3), outcome, 0)
    values = scrape(metrics)
    assert values["flyball_requests_total", outcome] == 1
    assert values["flyball_e2e_request_latency_seconds_count",] == values["flyball_prompt_tokens_total",] == 0


def test_window_gauges_leave_with_their_samples(metrics: MetricsCollector, clock: FakeClock) -> None:
    name = "flyball_time_to_first_token_window_seconds"
    run_one_request(metrics, clock)
    metrics.measured.step(step_stats(num_tokens=1))
    assert scrape(metrics)[name, "0.99"] == pytest.approx(0.2)
    clock.advance(61)
    values = scrape(metrics)
    assert not any(key[0] in (name, "flyball_blocked_by_share") for key in values), "absent: neither 0 nor NaN"
    assert values["flyball_time_to_first_token_seconds_count",] == 1


def test_step_state(metrics: MetricsCollector) -> None:
    target = Limits(max_num_seqs=4, kv_cache_fraction=0.5, max_num_batched_tokens=32, step_time_target_ms=20)
    blocks = KVBlocks(total=100, capacity=50, free=70, used=20, cached=10)
    state = {"kv_blocks": blocks, "target": target, "revision": 3, "num_waiting": 5}
    metrics.measured.step(step_stats(num_tokens=30, blocked_by="kv", **state))
    metrics.measured.step(step_stats(num_tokens=10, num_running=2, **state))
    values = scrape(metrics)
    assert values["flyball_kv_blocks", "used"] == 20 and values["flyball_kv_blocks_capacity",] == 50
    assert values["flyball_kv_cache_usage_ratio",] == values["vllm:kv_cache_usage_perc", MODEL] == 0.4
    assert values["flyball_requests_waiting",] == values["vllm:num_requests_waiting", MODEL] == 5
    assert values["vllm:num_requests_running", MODEL] == 2
    effective = values["flyball_limit_effective", "max_num_seqs"]
    assert values["flyball_requests_running_ratio",] == 2 / 256, "of what it started with: a cut alone adds no replica"
    assert effective != target.max_num_seqs
    assert values["flyball_limit_target", "step_time_target_ms"] == 20 and values["flyball_limits_revision",] == 3
    assert ("flyball_limit_effective", "step_time_target_ms") not in values, "no target is no number"
    assert values["flyball_blocked_steps_total", "kv"] == values["flyball_blocked_steps_total", "none"] == 1
    assert values["flyball_blocked_by_share", "kv"] == 0.5
    assert values["flyball_step_tokens_sum",] == 40 and values["flyball_step_duration_seconds_count",] == 2


def test_idle_steps_count_for_nothing(metrics: MetricsCollector) -> None:
    for _ in range(3):
        metrics.measured.step(step_stats())
    values = scrape(metrics)
    assert values["flyball_step_duration_seconds_count",] == values["flyball_blocked_steps_total", "none"] == 0


def test_engine_facts(metrics: MetricsCollector, engine: FakeEngine) -> None:
    metrics.attach(engine)
    values = scrape(metrics)
    assert values["flyball_startup_seconds", "weights"] == 0.5 and values["flyball_draining",] == 0
    assert values["vllm:cache_config_info", "16", "auto", MODEL, "100"] == 1
    engine.ready, engine.stats, engine.draining = False, None, True
    values = scrape(metrics)
    assert values["flyball_draining",] == 1 and ("flyball_startup_seconds", "weights") not in values


def test_edges_are_fine_at_the_low_end() -> None:
    assert list(LATENCY_EDGES_S) == sorted(set(LATENCY_EDGES_S)) and LATENCY_EDGES_S[0] == 0.0005


def test_registries_are_separate(clock: FakeClock) -> None:
    registry = CollectorRegistry()
    MetricsCollector(model_name="a", clock=clock, registry=registry).measured.rejected("queue_full")
    other = MetricsCollector(model_name="b", clock=clock)
    assert other.registry is not registry
    assert ("flyball_requests_rejected_total", "queue_full") not in scrape(other)


@pytest.mark.anyio
@pytest.mark.parametrize("accept", ["", "text/plain; version=1.0.0", "application/openmetrics-text; version=1.0.0"])
async def test_scrape_over_http(client: httpx.AsyncClient, accept: str) -> None:
    await client.post("/v1/chat/completions", json=chat())
    response = await client.get("/metrics", headers={"Accept": accept})
    assert response.status_code == 200 and 'flyball_requests_total{outcome="stop"} 1.0' in response.text
    assert response.headers["content-type"].startswith((accept or "text/plain; version=0.0.4").split(";")[0])
    assert response.text.endswith("# EOF\n") == accept.startswith("application/openmetrics")


def test_promtool_finds_nothing(metrics: MetricsCollector, engine: FakeEngine, clock: FakeClock) -> None:
    promtool = prometheus_kit.find("promtool")
    metrics.attach(engine)
    metrics.measured.step(step_stats(num_tokens=1))
    metrics.measured.rejected("queue_full")
    run_one_request(metrics, clock)
    text = metrics.exposition("")[0].decode()
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=30)
    problems = [line for line in (checked.stdout + checked.stderr).splitlines() if not re.match(r"vllm:\S+ ", line)]
    assert problems == [], "vLLM's names have colons, which promtool's linter reserves for recording rules"


def test_predicted_and_measured_step_times_stand_side_by_side(metrics: MetricsCollector) -> None:
    metrics.measured.step(step_stats(num_tokens=1, duration_s=0.011, predicted_s=0.01, step_model=STEP_MODEL))
    metrics.measured.step(step_stats(num_tokens=1, duration_s=0.012))
    values = scrape(metrics)
    assert values["flyball_step_predicted_seconds_count",] == 1
    assert values["flyball_step_duration_seconds_count",] == 2
    assert values["flyball_step_residual_ratio", "0.95"] == 0.1
    assert values["flyball_step_model", "token_s"] == 1e-4 and values["flyball_step_model_settled",] == 1

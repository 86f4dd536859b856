import asyncio
import json
from typing import Any

import pytest

from fake_openai import FakeServer
from flyball_clients.bench.benchmark import run_benchmark
from flyball_clients.bench.result import BenchResult
from flyball_clients.bench.settings import BenchSettings, Slo
from flyball_clients.bench.statistics import ClientHealth, Summary

SUMMARY = {"count", "mean", "std", "min", "p50", "p90", "p95", "p99", "max"}
FIELDS = {
    "": {
        *("schema_version", "started_at", "settings", "environment", "server", "duration_s", "requests", "throughput"),
        *("latency", "goodput", "client", "warnings"),
    },
    "environment": {"flyball", "python", "aiohttp", "platform", "num_cpus"},
    "server": {"base_url", "model", "max_model_len"},
    "requests": {"planned", "sent", "succeeded", "failed", "peak_in_flight", "errors"},
    "throughput": {
        *("input_tokens", "output_tokens", "requests_per_s"),
        *("input_tokens_per_s", "output_tokens_per_s", "total_tokens_per_s"),
    },
    "latency": {"ttft_s", "ttft_from_arrival_s", "itl_s", "tpot_s", "e2e_s", "e2e_from_arrival_s"},
    "goodput": {"slo", "good", "share", "requests_per_s", "missed"},
    "client": {"send_lag_s", "loop_lag_s", "cpu_share"},
}
RECORD = {
    *("index", "arrival_s", "sent_s", "end_s", "first_token_s", "last_token_s", "gaps_s"),
    *("input_tokens", "output_tokens", "tokens_from_usage", "error", "error_message"),
}


@pytest.fixture
def result(server: FakeServer) -> BenchResult:
    settings = BenchSettings(
        base_url=server.url, num_requests=3, output_len="3", request_rate=float("inf"), slo=Slo(ttft_s=1.0)
    )
    return asyncio.run(run_benchmark(settings))


def test_the_schema(result: BenchResult) -> None:
    plain: dict[str, Any] = json.loads(result.to_json())
    assert plain["schema_version"] == 1
    for name, fields in FIELDS.items():
        assert set(plain[name] if name else plain) == fields
    assert set(plain["latency"]["ttft_s"]) == SUMMARY
    assert set(plain["settings"]) == set(BenchSettings.__struct_fields__)


def test_requests_are_saved_when_asked(result: BenchResult) -> None:
    records = json.loads(result.to_json(save_requests=True))["records"]
    assert [record["index"] for record in records] == [0, 1, 2]
    assert all(set(record) == RECORD for record in records)
    assert all(len(record["gaps_s"]) == 2 for record in records)


def test_an_infinite_rate_can_be_told_from_none(result: BenchResult) -> None:
    assert json.loads(result.to_json())["settings"]["request_rate"] == "inf"


def lag(p99: float, count: int = 500) -> Summary:
    return Summary(count=count, mean=p99, std=0.0, min=p99, p50=p99, p90=p99, p95=p99, p99=p99, max=p99)


def test_a_client_that_cannot_keep_up_says_so() -> None:
    assert list(ClientHealth(send_lag_s=lag(0.001), loop_lag_s=lag(0.001), cpu_share=0.5).caveats()) == []
    late, busy = ClientHealth(send_lag_s=lag(0.05), loop_lag_s=lag(0.02), cpu_share=0.5).caveats()
    assert "sent 50 ms late" in late
    assert "event loop 20 ms late at p99, CPU 50%" in busy
    assert len(list(ClientHealth(send_lag_s=None, loop_lag_s=lag(0.0), cpu_share=0.95).caveats())) == 1


def test_a_run_of_less_than_a_second_says_nothing_about_the_client() -> None:
    assert list(ClientHealth(send_lag_s=None, loop_lag_s=lag(0.02, count=50), cpu_share=1.0).caveats()) == []

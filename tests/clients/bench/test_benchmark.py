import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from fake_openai import DONE, FakeServer, Reply, answer_in_full, token, usage
from flyball_clients.bench.benchmark import WarmupFailed, run_benchmark
from flyball_clients.bench.load import LoadObserver, RequestRecord
from flyball_clients.bench.result import BenchResult
from flyball_clients.bench.settings import BenchSettings, Slo
from flyball_clients.errors import ConfigError, HttpError, Unreachable


def bench(server: FakeServer, observer: LoadObserver | None = None, **fields: Any) -> BenchResult:
    values = {"output_len": "4", "timeout_s": 20.0, **fields}
    return asyncio.run(run_benchmark(BenchSettings(base_url=server.url, **values), observer))


def load(server: FakeServer) -> list[dict[str, Any]]:
    """The requests of the run itself, without the two probes before it."""
    return server.requests[2:]


def test_a_closed_loop_keeps_its_concurrency_and_never_more(server: FakeServer) -> None:
    server.script = lambda request: Reply(answer_in_full(request).packets, gate=3 if request["max_tokens"] > 1 else 0)
    result = bench(server, num_requests=20, concurrency=3)
    assert (result.requests.sent, result.requests.succeeded) == (20, 20)
    assert server.max_in_flight == result.requests.peak_in_flight == 3


def test_an_open_loop_does_not_wait_for_answers(server: FakeServer) -> None:
    server.script = lambda request: Reply(answer_in_full(request).packets, gate=12 if request["max_tokens"] > 1 else 0)
    result = bench(server, num_requests=12, request_rate=500.0)
    assert (result.requests.succeeded, server.max_in_flight) == (12, 12)


def test_an_open_loop_sends_no_request_before_its_time(server: FakeServer) -> None:
    result = bench(server, num_requests=10, request_rate=200.0, arrival="constant")
    assert [record.arrival_s for record in result.records] == pytest.approx([0.005 * i for i in range(10)])
    assert all(record.sent_s >= record.arrival_s for record in result.records)
    assert result.client.send_lag_s is not None
    assert result.client.send_lag_s.count == 10


def test_counts_and_rates_agree(server: FakeServer) -> None:
    result = bench(server, num_requests=10, output_len="uniform:1:9", input_len="40")
    assert result.throughput.output_tokens == sum(request["max_tokens"] for request in load(server))
    assert result.throughput.input_tokens == 400
    assert result.throughput.output_tokens_per_s == pytest.approx(result.throughput.output_tokens / result.duration_s)
    assert result.throughput.requests_per_s == pytest.approx(10 / result.duration_s)
    assert result.latency.itl_s is not None
    assert result.latency.itl_s.count == result.throughput.output_tokens - 10
    assert result.latency.tpot_s is not None
    assert result.latency.tpot_s.count == sum(request["max_tokens"] > 1 for request in load(server))


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_prompt_lengths_follow_the_servers_own_tokenizer(server: FakeServer, endpoint: str) -> None:
    result = bench(server, num_requests=3, endpoint=endpoint, input_len="107")
    # the fake server has 2 tokens a word, and 7 for a chat template: 107 cannot be hit without the template
    assert result.throughput.input_tokens / 3 == (107 if endpoint == "chat" else 108)
    assert result.warnings == []


def test_what_a_request_says(server: FakeServer) -> None:
    bench(server, num_requests=1, ignore_eos=True, extra_body={"top_p": 0.5}, input_len="4")
    request = load(server)[0]
    assert len(request.pop("prompt").split()) == 2
    assert request == {
        "model": "demo",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
        "top_p": 0.5,
        "max_tokens": 4,
    }


def test_ignore_eos_is_only_sent_when_asked(server: FakeServer) -> None:
    bench(server, num_requests=1)
    assert all("ignore_eos" not in request for request in server.requests)


def test_the_seed_decides_the_prompts(server: FakeServer) -> None:
    for seed in (1, 1, 2):
        bench(server, num_requests=3, concurrency=1, seed=seed)
    prompts = [request["prompt"] for request in server.requests if request["max_tokens"] == 4]
    assert prompts[:3] == prompts[3:6]
    assert len(set(prompts)) == 6


def test_failures_are_counted_by_kind_and_the_rest_is_measured(server: FakeServer) -> None:
    replies = itertools.cycle(
        [
            Reply(status=429, body={"error": {"message": "queue full"}}),
            Reply([token("a", "stop"), usage(1, 1), DONE]),
            Reply([token("a")], break_off=True),
        ]
    )
    server.script = lambda request: answer_in_full(request) if request["max_tokens"] == 1 else next(replies)
    result = bench(server, num_requests=9, concurrency=1, slo=Slo(ttft_s=60.0))
    assert (result.requests.sent, result.requests.succeeded, result.requests.failed) == (9, 3, 6)
    assert {kind: error.count for kind, error in result.requests.errors.items()} == {"http_429": 3, "disconnected": 3}
    assert result.requests.errors["http_429"].example == "HTTP 429: queue full"
    assert result.throughput.output_tokens == 3
    assert result.goodput is not None
    assert (result.goodput.good, result.goodput.share) == (3, pytest.approx(1 / 3))


def test_a_run_in_which_all_fails_has_no_latencies(server: FakeServer) -> None:
    server.script = lambda request: (
        answer_in_full(request) if request["max_tokens"] == 1 else Reply(status=500, body={"error": "no"})
    )
    result = bench(server, num_requests=3)
    assert (result.requests.succeeded, result.latency.ttft_s, result.latency.itl_s) == (0, None, None)
    assert json.loads(result.to_json())["latency"]["ttft_s"] is None


def test_answers_that_end_early_are_warned_about(server: FakeServer) -> None:
    server.script = lambda request: answer_in_full({**request, "max_tokens": 1})
    result = bench(server, num_requests=2)
    assert "answers ended early: 2 of 8 requested output tokens" in result.warnings[0]


def test_a_server_without_usage_is_warned_about(server: FakeServer) -> None:
    server.script = lambda request: Reply([token("a"), token("b", "stop"), DONE])
    result = bench(server, num_requests=2, output_len="2", input_len="10")
    assert "input lengths are in words" in result.warnings[0]
    assert "the number of chunks" in result.warnings[1]
    assert result.throughput.output_tokens == 4
    assert len(load(server)[0]["prompt"].split()) == 10


def test_warm_up_is_sent_first_and_not_counted(server: FakeServer) -> None:
    result = bench(server, num_requests=2, num_warmup=3)
    prompts = [request["prompt"] for request in load(server)]
    assert len(set(prompts)) == 5
    assert (result.requests.sent, len(result.records)) == (2, 2)


def test_a_warm_up_that_fails_stops_the_run(server: FakeServer) -> None:
    server.script = lambda request: (
        answer_in_full(request) if request["max_tokens"] == 1 else Reply(status=500, body={"error": "no memory"})
    )
    with pytest.raises(
        WarmupFailed, match="all 2 warm-up requests failed; the error of the first: HTTP 500: no memory"
    ):
        bench(server, num_warmup=2)


def test_max_duration_starts_nothing_after_it(server: FakeServer) -> None:
    result = bench(server, num_requests=5, request_rate=0.01, arrival="constant", max_duration_s=60.0)
    assert (result.requests.planned, result.requests.sent, result.requests.succeeded) == (5, 1, 1)
    assert "--max-duration stopped the run after 1 of 5 requests." in result.warnings


def test_a_mooncake_trace_shares_prefixes_and_keeps_its_lengths(server: FakeServer, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [(0, 600, [0, 1]), (0, 700, [0, 2]), (3000, 9000, [*range(18)]), (3000, 512, [0])]
    trace.write_text(
        "".join(
            json.dumps({"timestamp": t, "input_length": n, "output_length": 2, "hash_ids": ids}) + "\n"
            for t, n, ids in rows
        )
    )
    result = bench(server, trace=str(trace), trace_speed=1000.0, trace_max_tokens=1000)
    assert [record.input_tokens for record in result.records] == [600, 700, 512]
    prompts = sorted((request["prompt"].split() for request in load(server)), key=len)
    assert prompts[0] == prompts[1][:256] == prompts[2][:256]
    assert prompts[1][256:] != prompts[2][256:300]
    assert 0.002 <= max(record.arrival_s for record in result.records) <= 0.006


def test_an_azure_trace_replays_at_its_speed(server: FakeServer, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    lines = [f"2023-11-16 18:17:0{i}.0000000,{10 + i},2\n" for i in range(4)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    result = bench(server, trace=str(trace), trace_speed=100.0, trace_limit=3)
    assert [record.arrival_s for record in result.records] == pytest.approx([0.0, 0.01, 0.02])
    assert [request["max_tokens"] for request in load(server)] == [2, 2, 2]


def test_a_trace_with_nothing_short_enough_is_refused(server: FakeServer, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,50,10\n")
    with pytest.raises(ConfigError, match="no request of the trace has at most 59 tokens"):
        bench(server, trace=str(trace), trace_max_tokens=59)


def test_a_dataset_is_sent_as_it_is(server: FakeServer, tmp_path: Path) -> None:
    dataset = tmp_path / "d.jsonl"
    messages = [{"role": "user", "content": "one two"}]
    dataset.write_text(json.dumps({"prompt": "hello"}) + "\n" + json.dumps({"messages": messages, "max_tokens": 9}))
    bench(server, dataset=str(dataset), endpoint="chat", concurrency=1)
    first, second = server.requests
    assert (first["messages"], first["max_tokens"]) == ([{"role": "user", "content": "hello"}], 4)
    assert (second["messages"], second["max_tokens"]) == (messages, 9)


def test_a_dataset_is_not_gone_through_twice(server: FakeServer, tmp_path: Path) -> None:
    dataset = tmp_path / "d.jsonl"
    dataset.write_text('{"prompt": "hello"}\n')
    with pytest.raises(ConfigError, match="--num-requests is 2 and the dataset has 1 prompts"):
        bench(server, dataset=str(dataset), num_requests=2)


def test_a_tokenizer_makes_prompts_of_exact_length(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1, "c": 2}}}))
    result = bench(server, tokenizer=str(tmp_path), num_requests=2, input_len="33")
    assert [len(request["prompt"]) for request in server.requests] == [33, 33]
    assert result.throughput.input_tokens == 66


def test_the_model_is_the_one_named_even_if_no_list_has_it(server: FakeServer) -> None:
    server.models = None
    assert bench(server, num_requests=1, model="other").server.model == "other"
    assert all(request["model"] == "other" for request in server.requests)
    with pytest.raises(HttpError, match="404"):
        bench(server, num_requests=1)


def test_the_key_is_sent_and_stays_out_of_the_result(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "s3cret")
    result = bench(server, num_requests=1, api_key_env="SOME_KEY")
    assert all("Authorization: Bearer s3cret" in head for head in server.headers)
    assert b"s3cret" not in result.to_json(save_requests=True)


def test_no_server_is_an_error_that_names_the_address(dead_url: str) -> None:
    with pytest.raises(Unreachable, match=f"no server answers at {dead_url}.*flyball serve MODEL"):
        asyncio.run(run_benchmark(BenchSettings(base_url=dead_url)))


def test_the_observer_sees_every_request(server: FakeServer) -> None:
    class Counter(LoadObserver):
        total = started = 0

        def __init__(self) -> None:
            self.records: list[RequestRecord] = []

        def planned(self, total: int) -> None:
            self.total = total

        def sent(self) -> None:
            self.started += 1

        def ended(self, record: RequestRecord) -> None:
            self.records.append(record)

    counter = Counter()
    bench(server, counter, num_requests=5, num_warmup=2)
    assert (counter.total, counter.started, len(counter.records)) == (5, 5, 5)


def test_many_streams_at_once(server: FakeServer) -> None:
    server.script = lambda request: Reply(answer_in_full(request).packets, gate=200 if request["max_tokens"] > 1 else 0)
    result = bench(server, num_requests=200, request_rate=float("inf"), output_len="8", input_len="16")
    assert (result.requests.succeeded, result.requests.peak_in_flight) == (200, 200)

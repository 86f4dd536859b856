import asyncio
from typing import Any

import msgspec
import pytest

from fake_openai import DONE, FakeServer, Reply, delta, event, token, usage
from flyball_clients import stream
from flyball_clients.bench.load import RequestRecord, Sender
from flyball_clients.endpoint import Api, Endpoint
from flyball_clients.stream import open_session


def send(server: FakeServer, reply: Reply, api: Api = "completions", timeout_s: float = 20.0) -> RequestRecord:
    async def once() -> RequestRecord:
        endpoint = Endpoint(server.url)
        async with open_session(endpoint, timeout_s) as session:
            return await Sender(session, endpoint, api).send(0, msgspec.json.encode({"prompt": "x"}))

    server.script = lambda request: reply
    return asyncio.run(once())


def test_an_answer_is_timed_and_counted(server: FakeServer) -> None:
    record = send(server, Reply([token("a"), 0.01, token("b"), 0.01, token("c", "length"), usage(7, 3), DONE]))
    assert record.error is None
    assert (record.input_tokens, record.output_tokens, record.tokens_from_usage) == (7, 3, True)
    assert len(record.gaps_s) == 2
    assert record.first_token_s is not None
    assert record.last_token_s == pytest.approx(record.first_token_s + sum(record.gaps_s))
    assert record.arrival_s == record.sent_s < record.first_token_s < record.last_token_s <= record.end_s
    assert server.paths[-1] == "/v1/completions"


def test_a_chat_answer_begins_with_its_first_text_and_not_with_its_role(server: FakeServer) -> None:
    packets = [delta(role="assistant", content=""), delta(content="a"), delta(content="b"), delta("stop"), DONE]
    record = send(server, Reply([*packets]), "chat")
    assert (record.error, len(record.gaps_s), record.output_tokens) == (None, 1, 2)
    assert server.paths[-1] == "/v1/chat/completions"


@pytest.mark.parametrize("size", [1, 3, 50])
def test_packets_may_end_anywhere(server: FakeServer, size: int) -> None:
    stream = b": hello\n\n" + token("日本") + b": ping\n\n" + token("🙂", "stop") + usage(1, 2) + DONE
    record = send(server, Reply([stream[i : i + size] for i in range(0, len(stream), size)]))
    assert (record.error, record.output_tokens, len(record.gaps_s)) == (None, 2, 1)


def test_without_usage_chunks_are_counted(server: FakeServer) -> None:
    record = send(server, Reply([token("a"), token("b"), token("", "stop"), DONE]))
    assert (record.output_tokens, record.input_tokens, record.tokens_from_usage) == (2, None, False)


def test_a_stream_that_finished_needs_no_done(server: FakeServer) -> None:
    assert send(server, Reply([token("a", "stop")])).error is None


def test_an_answer_without_text_has_its_first_token_at_its_end(server: FakeServer) -> None:
    record = send(server, Reply([token("", "stop"), usage(3, 1), DONE]))
    assert record.error is None
    assert record.first_token_s == record.last_token_s is not None
    assert record.gaps_s == []


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        (Reply(status=429, body={"error": {"message": "queue full"}}), "http_429", "HTTP 429: queue full"),
        (Reply(status=500, body={"detail": "oops"}), "http_500", "oops"),
        (Reply([token("a"), event({"error": {"message": "engine stopped"}}), DONE]), "server_error", "engine stopped"),
        (Reply([token("a"), event("<html>")]), "bad_answer", "<html>"),
        (Reply([token("a")]), "disconnected", "without a finish_reason"),
        (Reply([]), "disconnected", "without a finish_reason"),
        (Reply([token("a")], break_off=True), "disconnected", "connection broke"),
    ],
)
def test_each_failure_has_its_kind(server: FakeServer, reply: Reply, kind: str, message: str) -> None:
    record = send(server, reply)
    assert record.error == kind
    assert message in str(record.error_message)


def test_a_server_that_stalls_is_a_timeout(server: FakeServer) -> None:
    record = send(server, Reply([token("a"), 60.0]), timeout_s=0.2)
    assert (record.error, record.error_message) == (
        "timeout",
        "no complete answer within 0.2 s. Raise --timeout or lower the load.",
    )


@pytest.mark.parametrize("pause", [[], [0.02]], ids=["at once", "later"])
@pytest.mark.parametrize("keep_alive", [True, False])
def test_connections_are_used_again_unless_told(server: FakeServer, keep_alive: bool, pause: list[float]) -> None:
    """Also when the end of the body comes in a packet of its own, after [DONE]."""

    async def twice() -> list[Any]:
        endpoint = Endpoint(server.url)
        async with open_session(endpoint, 5.0, keep_alive=keep_alive) as session:
            sender = Sender(session, endpoint, "completions")
            return [await sender.send(index, msgspec.json.encode({"prompt": "x"})) for index in range(2)]

    server.script = lambda request: Reply([token("a", "length"), usage(1, 1), DONE, *pause])
    server.connections.clear()
    assert [one.error for one in asyncio.run(twice())] == [None, None]
    assert len(set(server.connections)) == (1 if keep_alive else 2)


def test_a_stream_that_stays_open_after_done_is_complete(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "END_TIMEOUT_S", 0.05)
    assert send(server, Reply([token("a", "stop"), usage(1, 1), DONE, 60.0])).error is None


def test_nothing_listening_is_unreachable(dead_url: str) -> None:
    async def once() -> Any:
        endpoint = Endpoint(dead_url)
        async with open_session(endpoint, 5.0) as session:
            return await Sender(session, endpoint, "completions").send(0, b"{}")

    record = asyncio.run(once())
    assert record.error == "unreachable"
    assert "flyball serve" in record.error_message

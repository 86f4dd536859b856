"""Requests that are odd, old or malformed: an answer or a closed connection, and not a word too much in the log."""

import gzip
import json

import pytest

from adversary_kit.attacked import Attacked
from adversary_kit.malformed import BODY, LENGTH, MALFORMED, POST, request
from adversary_kit.raw import ask, connections, is_closed_within, post_head, read_until_silent


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_gets_an_answer_or_is_cut_off(server: Attacked, name: str) -> None:
    with connections(server.port) as (connection,):
        connection.sendall(MALFORMED[name])
        answered = read_until_silent(connection)
    assert not answered or answered.startswith(b"HTTP/1.1 "), answered[:300]
    for status in answered.split(b"HTTP/1.1 ")[1:]:
        assert status[:1] in b"24" or status[:3] in (b"501", b"505"), answered[:500]


def test_smuggled_requests_are_not_run(server: Attacked) -> None:
    """A proxy and this server must not disagree where a request ends: one with both lengths ends its connection."""
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: t\r\n\r\n"
    body = b"0\r\n\r\n" + smuggled
    head = request(POST, "Host: t", "Content-Length: 4", "Transfer-Encoding: chunked")
    with connections(server.port) as (connection,):
        connection.sendall(head + body)
        assert b'"object":"list"' not in read_until_silent(connection)


@pytest.mark.parametrize("host", [(), ("Host: t",)], ids=["without Host", "with Host"])
def test_http_1_0_is_answered(server: Attacked, host: tuple[str, ...]) -> None:
    answer = ask(server.port, request("POST /v1/completions HTTP/1.0", *host, LENGTH, body=BODY))
    assert answer is not None
    assert answer.status == 200


def test_a_stream_to_http_1_0_is_answered(server: Attacked) -> None:
    body = json.dumps({"prompt": [5, 6], "max_tokens": 5, "stream": True}).encode()
    answer = ask(server.port, request("POST /v1/completions HTTP/1.0", f"Content-Length: {len(body)}", body=body))
    assert answer is not None
    assert answer.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("depth", [1, 60, 200, 500, 900, 2000, 100_000])
@pytest.mark.parametrize("brackets", [b"[]", b"{}"], ids=["lists", "objects"])
def test_nesting_is_answered_or_refused(server: Attacked, depth: int, brackets: bytes) -> None:
    opening = brackets[:1] if brackets == b"[]" else b'{"a":'
    value = opening * depth + b"1" + brackets[1:] * depth
    for body in (
        b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": %b}, "max_tokens": 1}' % value,
        b'{"messages": %b}' % value,
        b'{"messages": [{"role": "user", "content": "a", "tool_calls": %b}]}' % value,
        b'{"messages": [{"role": "user", "content": "a"}], "logit_bias": %b}' % value,
        b'{"messages": [{"role": "user", "content": "a"}], "tools": %b}' % value,
    ):
        answer = server.post("/v1/chat/completions", body)
        assert answer.status in (200, 400), answer.body[:300]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "identity", "gzip, gzip"])
def test_a_body_in_another_encoding_is_refused_or_understood(server: Attacked, encoding: str) -> None:
    body = gzip.compress(BODY) if "gzip" in encoding else BODY
    answer = server.post("/v1/completions", body, f"Content-Encoding: {encoding}")
    assert answer.status in (200, 400, 415), answer.body


def test_an_inflating_body_costs_nothing(server: Attacked) -> None:
    answer = server.post("/v1/completions", gzip.compress(b" " * 50_000_000, 1), "Content-Encoding: gzip")
    assert answer.status in (400, 413, 415), answer.body


ENCODED = {
    "a byte order mark": b"\xef\xbb\xbf" + BODY,
    "UTF-16": BODY.decode().encode("utf-16"),
    "bad UTF-8": b'{"prompt": "\xff\xfe"}',
    "overlong UTF-8": b'{"prompt": "\xc0\xaf"}',
    "half a surrogate": b'{"prompt": "\\ud800", "max_tokens": 1}',
    "a surrogate in UTF-8": b'{"prompt": "\xed\xa0\x80"}',
    "a NUL": b'{"prompt": "\\u0000", "max_tokens": 1}',
    "two bodies": BODY + BODY,
    "a repeated field": b'{"prompt": [5], "prompt": [6], "max_tokens": 1}',
    "nothing": b"",
    "null": b"null",
    "a text": b'"a"',
}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        *(pytest.param(path, marks=pytest.mark.slow) for path in ("/v1/chat/completions", "/tokenize", "/detokenize")),
    ],
)
@pytest.mark.parametrize("name", ENCODED)
def test_an_odd_encoding_is_refused_or_understood(server: Attacked, path: str, name: str) -> None:
    answer = server.post(path, ENCODED[name])
    assert answer.status in (200, 400), answer.body


def test_a_client_that_announces_more_than_it_sends_is_forgotten(server: Attacked) -> None:
    with connections(server.port, 20) as opened:
        for connection in opened:
            connection.sendall(post_head("/v1/completions", 4_000_000) + BODY)
        assert server.known_answer() == server.known_text


@pytest.mark.slow
def test_half_a_head_is_cut_off(server: Attacked) -> None:
    with connections(server.port, 100) as opened:
        for connection in opened:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nX-A")
        assert server.known_answer() == server.known_text
        assert all(is_closed_within(connection, 20) for connection in opened)

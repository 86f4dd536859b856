"""The balanced port under attack; fake runtimes behind it."""

import gzip
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adversary_kit.exchange import exchange_all
from adversary_kit.generator import API, Case, cases, mutated
from adversary_kit.instance import Instance, instance
from adversary_kit.malformed import BODY, LENGTH, MALFORMED, request
from adversary_kit.raw import Answer, ask, connections, post, post_head, read_all, read_until_silent
from adversary_kit.witness import STREAM_OF_REAL, Seen

Undisturbed = Callable[[Seen], None]


def send(running: Instance, request: bytes) -> Answer:
    answer = ask(running.port, request)
    assert answer is not None
    return answer


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_gets_an_answer_or_is_cut_off(running: Instance, name: str) -> None:
    with connections(running.port) as (connection,):
        connection.sendall(MALFORMED[name])
        answered = read_until_silent(connection)
    assert not answered or answered.startswith(b"HTTP/"), answered[:300]
    assert b" 500 " not in answered.partition(b"\r\n")[0]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "identity", "no-such-encoding"])
@pytest.mark.parametrize("num_chars", [100, 3_000_000])
def test_a_body_passes_through_as_it_was_sent(running: Instance, encoding: str, num_chars: int) -> None:
    body = gzip.compress(json.dumps({"prompt": "a" * num_chars}).encode(), mtime=0)
    echo = send(running, post("/echo", body, f"Content-Encoding: {encoding}")).json()
    assert (echo["length"], echo["headers"]["content-encoding"]) == (len(body), encoding)


def test_an_inflating_body_is_not_inflated(running: Instance, undisturbed: Undisturbed) -> None:
    body = gzip.compress(b" " * 200_000_000, 1)
    undisturbed(running.under(lambda: print(send(running, post("/echo", body, "Content-Encoding: gzip")).status)))


def test_http_1_0_without_a_host_is_answered(running: Instance) -> None:
    assert send(running, request("POST /v1/completions HTTP/1.0", LENGTH, body=BODY)).status == 200


def test_chunks_of_one_byte_stop_nobody(running: Instance, undisturbed: Undisturbed) -> None:
    head = post_head("/echo", 0, "Transfer-Encoding: chunked", "Connection: close").replace(
        b"Content-Length: 0\r\n", b""
    )

    def attack() -> None:
        answer = ask(running.port, [head, *[b"1\r\na\r\n" * 1000] * 500, b"0\r\n\r\n"])
        assert answer is None or answer.status < 500, answer

    undisturbed(running.under(attack))


def test_long_bodies_stop_nobody(running: Instance, undisturbed: Undisturbed) -> None:
    def attack() -> None:
        with connections(running.port, 8) as opened:
            for connection in opened:
                connection.sendall(post("/echo", b"a" * 8_000_000))
            for connection in opened:
                assert read_all(connection)

    undisturbed(running.under(attack))


def test_answers_that_nobody_reads_are_bounded(running: Instance, undisturbed: Undisturbed) -> None:
    stream = post("/v1/completions", {"stream": True, "tokens": 100_000, "gap_s": 0})

    def attack() -> None:
        with connections(running.port, 20, receive_buffer_bytes=4096) as opened:
            for connection in opened:
                connection.sendall(stream)
            for _ in range(3):
                assert running.client.post("/v1/completions", json={}).status_code == 200

    undisturbed(running.under(attack))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "bare"), [(cases, False), (mutated, True)], ids=["requests", "bytes"])
def test_random_requests_to_real_replicas(
    real: Instance, seed: int, keep_pauses: Callable[..., None], make: Callable[..., Iterator[Case]], bare: bool
) -> None:
    statuses: list[Counter[str]] = []

    def attack() -> None:
        statuses.append(exchange_all(real.port, make(seed, 2000, API), bare=bare))

    with real.unharmed():
        keep_pauses(real.watched(attack, STREAM_OF_REAL), **statuses[0])


@pytest.fixture(scope="module")
def real(model: Path) -> Iterator[Instance]:
    runtime = {"extraArgs": ["--num-threads=1"], "kvCacheMemory": "64Mi", "maxModelLen": 2048}
    command = (sys.executable, "-m", "flyball_runtime.cli")
    with instance(command, replicas=2, model={"uri": f"file:{model}"}, runtime=runtime) as running:
        yield running

"""Clients that ask and do not read."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from adversary_kit.attacked import Attacked, attacked
from adversary_kit.condition import usage
from adversary_kit.raw import connections, post
from adversary_kit.witness import Seen
from replicas import wait_until

Undisturbed = Callable[[Seen], None]
NUM_READERS = {"the text of ids": 20, "the strings of tokens": 4, "many choices": 20, "a stream of many choices": 20}
MOST_HELD_BYTES = 128 << 20
METRICS = b"GET /metrics HTTP/1.1\r\nHost: t\r\n\r\n" * 50
ANSWERS = {
    "the text of ids": post("/detokenize", {"tokens": [300] * 1_000_000}),
    "the strings of tokens": post("/tokenize", {"prompt": "turn " * 500_000, "return_token_strs": True}),
    "many choices": post("/v1/completions", {"prompt": [5], "max_tokens": 8, "n": 256, "ignore_eos": True}),
    "a stream of many choices": post(
        "/v1/completions", {"prompt": [5], "max_tokens": 16, "n": 64, "stream": True, "ignore_eos": True}
    ),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if "choices" in n else n for n in ANSWERS])
def test_answers_that_nobody_reads_are_bounded(server: Attacked, undisturbed: Undisturbed, name: str) -> None:
    before = usage(server.pids)

    def attack() -> None:
        with connections(server.port, NUM_READERS[name], receive_buffer_bytes=4096) as opened:
            for connection in opened:
                connection.settimeout(5)
                with contextlib.suppress(OSError):
                    connection.sendall(ANSWERS[name])
            for _ in range(10):
                server.known_answer()
            held = usage(server.pids).rss_bytes - before.rss_bytes
            assert held < MOST_HELD_BYTES, f"{held} bytes are held for clients that read nothing"

    undisturbed(server.under(attack))


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_dropped(model: Path, tmp_path: Path) -> None:
    """Of many pipelined requests, whose answers fill every buffer on the way."""
    with attacked(model, tmp_path / "server.log", "--write-timeout", "2") as own, own.unharmed():
        idle = usage([own.pids[0]]).num_fds
        with connections(own.port, 3, receive_buffer_bytes=4096) as opened:
            for connection in opened:
                connection.settimeout(2)
                with contextlib.suppress(OSError):
                    for _ in range(200):
                        connection.sendall(METRICS)
            wait_until(lambda: usage([own.pids[0]]).num_fds <= idle, "they stay connected")

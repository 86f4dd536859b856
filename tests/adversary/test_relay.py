"""`flyball listener` under attack, while its runtime is gone."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer

import pytest

from adversary_kit.condition import log_problems, usage
from adversary_kit.exchange import exchange_all
from adversary_kit.generator import API, mutated
from adversary_kit.malformed import BODY, LENGTH, MALFORMED, request
from adversary_kit.raw import Answer, ask, connections, is_closed_within, post, post_head, read_until_silent
from adversary_kit.shared import Shared
from ports import free_port
from replicas import environment, wait_until

MB = 1 << 20
HELD_BYTES = 32 * MB


class OtherReplica(StreamRequestHandler):
    """Takes every request, whatever its version."""

    def handle(self) -> None:
        length = 0
        while line := self.rfile.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        self.rfile.read(length)
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nother")


class Relay:
    """A running `flyball listener` without a runtime."""

    def __init__(self, folder: Path, service_port: int) -> None:
        self.port, self.log, self.path = free_port(), folder / "listener.log", folder / "l.sock"
        command = [sys.executable, "-m", "flyball_runtime.cli", "listener", "--host=127.0.0.1", f"--port={self.port}"]
        command += [f"--socket={self.path}", f"--service=127.0.0.1:{service_port}"]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, env=environment(), stdout=output, stderr=output)

    def wait_started(self) -> None:
        wait_until(self.path.exists, "the listener made no socket")

    def post(self, body: bytes = BODY) -> Answer:
        answer = ask(self.port, post("/v1/completions", body))
        assert answer is not None
        return answer

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        before, log_bytes = usage([self.process.pid]), self.log.stat().st_size
        yield
        assert self.process.poll() is None, self.log.read_text()
        assert self.post().status == 200
        wait_until(lambda: usage([self.process.pid]).is_near(before), f"it had {before} before")
        assert not (problems := log_problems(self.log.read_bytes()[log_bytes:])), "\n".join(problems)


@contextmanager
def started(folder: Path) -> Iterator[Relay]:
    with ThreadingTCPServer(("127.0.0.1", 0), OtherReplica) as service:
        threading.Thread(target=service.serve_forever, args=(0.02,)).start()
        relay = Relay(folder, service.server_address[1])
        try:
            relay.wait_started()
            yield relay
        finally:
            relay.process.kill()
            relay.process.wait()
            service.shutdown()


@pytest.fixture(scope="module")
def relays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared[Relay]]:
    shared = Shared(lambda: started(tmp_path_factory.mktemp("relay")))
    yield shared
    shared.close()


@pytest.fixture
def relay(relays: Shared[Relay]) -> Iterator[Relay]:
    """A relay that must be unharmed when the test has ended."""
    with relays.unharmed() as relay:
        yield relay


@pytest.mark.parametrize("num_bytes", [HELD_BYTES, HELD_BYTES - len(BODY) + 1, 10 * HELD_BYTES])
def test_one_idle_connection_refuses_nobody(relay: Relay, num_bytes: int) -> None:
    with connections(relay.port) as (idle,):
        idle.sendall(post_head("/v1/completions", num_bytes))
        assert [relay.post().status for _ in range(3)] == [200] * 3


def test_many_idle_connections_refuse_nobody(relay: Relay) -> None:
    with connections(relay.port, 64) as opened:
        for idle in opened:
            idle.sendall(post_head("/v1/completions", MB))
        assert relay.post().status == 200


def test_what_is_held_is_bounded(relay: Relay) -> None:
    before = usage([relay.process.pid])
    with connections(relay.port, 64) as opened:
        for connection in opened:
            connection.settimeout(0.3)
            try:
                connection.sendall(post_head("/v1/completions", 4 * MB) + b"a" * (2 * MB))
            except OSError:  # refused, or not taken in
                continue
        used = usage([relay.process.pid]).rss_bytes - before.rss_bytes
        assert used < 3 * HELD_BYTES, f"{used} bytes"


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_gets_an_answer_or_is_cut_off(relay: Relay, name: str) -> None:
    with connections(relay.port) as (connection,):
        connection.sendall(MALFORMED[name])
        answered = read_until_silent(connection)
    assert not answered or answered.startswith(b"HTTP/1."), answered[:300]
    assert b" 500 " not in answered.partition(b"\r\n")[0]


def test_http_1_0_without_a_host_is_answered(relay: Relay) -> None:
    answer = ask(relay.port, request("POST /v1/completions HTTP/1.0", LENGTH, body=BODY))
    assert answer is not None
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_bytes_that_are_nearly_http(relay: Relay, seed: int, count: int) -> None:
    exchange_all(relay.port, mutated(seed, count, API), bare=True)


@pytest.mark.slow
def test_half_a_request_is_cut_off(relay: Relay) -> None:
    with connections(relay.port, 50) as opened:
        for connection in opened[:25]:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nX-A")
        for connection in opened[25:]:
            connection.sendall(post_head("/v1/completions", 1000) + b"a")
        assert relay.post().status == 200
        begin_s = time.monotonic()
        assert all(is_closed_within(connection, 60 - (time.monotonic() - begin_s)) for connection in opened)

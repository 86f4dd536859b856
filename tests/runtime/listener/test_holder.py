"""`flyball listener` as a process: what takes the port from it, dies, comes back, and asks it to end."""

import asyncio
import concurrent.futures
import contextlib
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from checkpoints import make_checkpoint
from flyball_protocol import endpoints
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.listener import holder
from flyball_runtime.listener.holder import parse_service, taken_listener
from flyball_runtime.listener.relay import Relay, ServiceAddress
from flyball_runtime.serve import bind
from ports import free_port
from replicas import Replica, environment, replica, wait_until

DEADLINE_S = 20.0


class Other(BaseHTTPRequestHandler):
    """Another replica. It holds back what is asked of /held."""

    go_on, asked = threading.Event(), threading.Event()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/held":
            self.asked.set()
            self.go_on.wait(DEADLINE_S)
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"other")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def other_port() -> Iterator[int]:
    Other.go_on.clear()
    Other.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server.server_port
        Other.go_on.set()
        server.shutdown()


class Holder:
    """A running `flyball listener`."""

    def __init__(self, folder: Path, port: int, other_port: int) -> None:
        self.port, self.path, self.log = port, folder / "listener.sock", folder / "listener.log"
        command = [sys.executable, "-m", "flyball_runtime.cli", "listener", "--host=127.0.0.1", f"--port={port}"]
        command += [f"--socket={self.path}", f"--service=127.0.0.1:{other_port}"]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(command, env=environment(), stdout=output, stderr=output)

    def post(self, path: str = "/v1/completions") -> str:
        return httpx.post(f"http://127.0.0.1:{self.port}{path}", content=b"{}", timeout=DEADLINE_S).text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def holding(folder: Path, other_port: int, port: int | None = None) -> Iterator[Holder]:
    holder = Holder(folder, port or free_port(), other_port)
    try:
        wait_until(holder.path.exists, "no socket for a runtime")
        yield holder
    finally:
        holder.close()


def answer_one(listener: socket.socket, text: bytes) -> None:
    """Serve one connection, as a runtime does."""
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))


@contextmanager
def runtime(holder: Holder, text: bytes, num_requests: int = 1) -> Iterator[None]:
    """A runtime in a thread that ends after so many requests."""

    def serve() -> None:
        with taken_listener(holder.path) as listener:
            listener.settimeout(DEADLINE_S)
            taken.set()
            for _ in range(num_requests):
                answer_one(listener, text)

    taken = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    assert taken.wait(DEADLINE_S)
    yield
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_runtime_serves_the_port_by_itself_and_others_do_when_it_is_gone(tmp_path: Path, other_port: int) -> None:
    with holding(tmp_path, other_port) as holder:
        assert holder.post() == "other", "before the first runtime"
        for _ in range(2):
            with runtime(holder, b"itself"):
                wait_until(
                    lambda: b"now accepts connections on port" in holder.log.read_bytes(), "the port was not lent"
                )
                holder.process.send_signal(signal.SIGSTOP)  # no byte passes through the holder
                assert holder.post() == "itself"
                holder.process.send_signal(signal.SIGCONT)
            wait_until(lambda: holder.post() == "other", "the other replica was not asked")


@pytest.mark.parametrize("runtime_first", [True, False])
def test_a_connection_that_comes_at_once_with_a_runtime_is_answered_here_or_left_to_it(
    tmp_path: Path, runtime_first: bool
) -> None:
    async def check() -> None:
        address, path = ("127.0.0.1", free_port()), tmp_path / "listener.sock"
        holding = asyncio.create_task(holder.hold(*address, path, Relay(ServiceAddress("127.0.0.1", 1))))
        while not path.exists():
            await asyncio.sleep(0.01)
        async with httpx.AsyncClient() as probe:  # now it waits for both
            await probe.get(f"http://127.0.0.1:{address[1]}{endpoints.READYZ_PATH}")
        with contextlib.ExitStack() as stack, socket.socket(socket.AF_UNIX) as runtime:
            if runtime_first:
                runtime.connect(str(path))
            client = stack.enter_context(socket.create_connection(address))
            client.sendall(f"GET {endpoints.READYZ_PATH} HTTP/1.1\r\nHost: chat\r\n\r\n".encode())
            if not runtime_first:
                runtime.connect(str(path))
            _, (descriptor,), _, _ = await asyncio.to_thread(socket.recv_fds, runtime, 1, 1)
            lent = stack.enter_context(socket.socket(fileno=descriptor))
            ready, _, _ = await asyncio.to_thread(select.select, [client, lent], [], [], DEADLINE_S)
            assert ready in ([client], [lent])
            assert ready == [lent] or client.recv(65536).startswith(b"HTTP/1.1 503 ")
            holding.cancel()
            await asyncio.wait([holding])

    asyncio.run(check())


def test_connections_of_a_port_send_each_token_at_once(tmp_path: Path, other_port: int) -> None:
    """Otherwise the tokens of a stream wait, on a connection that is kept, for the acknowledgement of those before: 40 ms."""
    with holding(tmp_path, other_port) as holder, taken_listener(holder.path) as lent:
        assert sends_at_once(lent)
    with bind("127.0.0.1", 0, "--port") as own:
        own.listen()
        assert sends_at_once(own)


def sends_at_once(listener: socket.socket) -> bool:
    with socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_a_probe_is_about_this_replica(tmp_path: Path, other_port: int) -> None:
    with holding(tmp_path, other_port) as holder:
        assert httpx.get(f"http://127.0.0.1:{holder.port}{endpoints.READYZ_PATH}").status_code == 503


def test_an_end_waits_for_what_others_are_answering(tmp_path: Path, other_port: int) -> None:
    with holding(tmp_path, other_port) as holder:
        answers: list[str] = []
        asking = threading.Thread(target=lambda: answers.append(holder.post("/held")))
        asking.start()
        assert Other.asked.wait(DEADLINE_S)
        holder.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            holder.process.wait(0.5)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", holder.port))
        Other.go_on.set()
        assert holder.process.wait(DEADLINE_S) == endpoints.EXIT_OK
        asking.join(DEADLINE_S)
        assert answers == ["other"]


def test_an_end_at_rest_is_quick(tmp_path: Path, other_port: int) -> None:
    with holding(tmp_path, other_port) as holder:
        holder.process.send_signal(signal.SIGTERM)
        assert holder.process.wait(DEADLINE_S) == endpoints.EXIT_OK


def test_a_holder_that_is_restarted_waits_for_the_port(tmp_path: Path, other_port: int) -> None:
    with holding(tmp_path, other_port) as first, runtime(first, b"itself"):
        wait_until(lambda: b"now accepts connections on port" in first.log.read_bytes(), "the port was not lent")
        first.close()
        second = Holder(tmp_path, first.port, other_port)
        try:
            wait_until(lambda: b"waiting for port" in first.log.read_bytes(), "the second did not wait")
            assert first.post() == "itself", "the runtime has the port all the while"
            wait_until(lambda: can_take(second), "the second has no port")
            wait_until(lambda: second.post() == "other", "the other replica was not asked")
        finally:
            second.close()


def can_take(holder: Holder) -> bool:
    """Whether a runtime gets the port; it gives it back at once."""
    with taken_listener(holder.path):
        return True


@pytest.mark.slow
def test_a_killed_runtime_fails_what_it_was_answering_and_nothing_else(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen2", max_position_embeddings=8192)
    with (
        replica(model, log=tmp_path / "other.log") as other,
        holding(tmp_path, other.port) as holder,
        replica(model, log=tmp_path / "killed.log", listener=(holder.path, holder.port)) as killed,
    ):
        expected = other.complete().json()["choices"]
        body = {"model": "test", "prompt": [5], "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{killed.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines)
            ask_while_killing(killed, expected)
            with pytest.raises(httpx.TransportError):
                list(lines)
        with replica(model, log=tmp_path / "again.log", listener=(holder.path, holder.port)) as again:
            assert again.complete().json()["choices"] == expected
            assert again.stop() == endpoints.EXIT_OK
            assert again.complete_on_a_new_connection().json()["choices"] == expected


def ask_while_killing(server: Replica, expected: object) -> None:
    """Ask without a pause, each time on a new connection, while the server is killed; only what was sent before may fail."""
    stop = threading.Event()

    def ask() -> list[float]:
        failed_s = []
        while not stop.is_set():
            sent_s = time.monotonic()
            try:
                assert server.complete_on_a_new_connection().json()["choices"] == expected
            except (httpx.ReadError, httpx.RemoteProtocolError):
                failed_s.append(sent_s)
        return failed_s

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        time.sleep(0.5)
        server.process.kill()
        killed_s = time.monotonic()
        time.sleep(1.5)
        stop.set()
        assert all(failed_s < killed_s for one in asking for failed_s in one.result())


@pytest.mark.parametrize("text", ["chat", "chat:", ":80", "chat:x", "chat:0", "chat:65536", ""])
def test_a_service_is_a_host_and_a_port(text: str) -> None:
    with pytest.raises(ConfigError, match="write HOST:PORT"):
        parse_service(text)
    assert parse_service("chat:80") == ("chat", 80)
    assert parse_service("::1:80") == ("::1", 80)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--socket=/nowhere/at/all", "--host=127.0.0.1"], "cannot make the socket /nowhere/at/all"),
        (["--socket=/tmp/x", "--host=192.0.2.1"], "cannot listen on 192.0.2.1"),
    ],
)
def test_what_cannot_be_opened_ends_with_the_reason(flags: list[str], says: str) -> None:
    command = [
        sys.executable,
        "-m",
        "flyball_runtime.cli",
        "listener",
        f"--port={free_port()}",
        "--service=x:1",
        *flags,
    ]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == endpoints.EXIT_CONFIG_ERROR
    assert says in ended.stderr


def test_a_runtime_without_a_holder_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder, "WAIT_S", 0.2)
    with (
        pytest.raises(ConfigError, match=r"no listener answers at .* Is the container 'listener' running\?"),
        taken_listener(tmp_path / "none"),
    ):
        raise AssertionError("there is no port")


def test_a_holder_that_gives_nothing_is_an_error(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "door"))
        door.listen()
        threading.Thread(target=lambda: door.accept()[0].close()).start()
        with pytest.raises(ConfigError, match="ended before it passed its port"), taken_listener(tmp_path / "door"):
            raise AssertionError("there is no port")

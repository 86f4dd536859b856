"""HTTP by the byte: requests that no client library would send, and answers that nobody reads."""

import contextlib
import json
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

TIMEOUT_S = 60.0


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The ``code`` of an error."""
        return str(self.json()["error"]["code"])


def post_head(path: str, length: int, *headers: str, method: str = "POST", version: str = "1.1") -> bytes:
    """Return the head of a request that announces ``length`` bytes."""
    lines = [f"{method} {path} HTTP/{version}", "Host: test", f"Content-Length: {length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def post(path: str, body: object, *headers: str) -> bytes:
    """Return a request with this JSON, or with these bytes, whose connection ends with the answer."""
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    return post_head(path, len(encoded), "Connection: close", *headers) + encoded


@contextlib.contextmanager
def connections(port: int, count: int = 1, **options: Any) -> Iterator[list[socket.socket]]:
    """Open connections, closed at the end of the block."""
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(connect(port, **options)) for _ in range(count)]


def connect(port: int, *, receive_buffer_bytes: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_buffer_bytes is not None:  # before connecting, which settles the window
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    connection.settimeout(TIMEOUT_S)
    connection.connect(("127.0.0.1", port))
    return connection


def ask(port: int, request: bytes | Iterable[bytes]) -> Answer | None:
    """Send a request, piece by piece if it comes in pieces, and read to the connection's end; None without an answer."""
    with connect(port) as connection:
        with contextlib.suppress(ConnectionError):  # an answer may come before the request's end
            for piece in [request] if isinstance(request, bytes) else request:
                connection.sendall(piece)
        return answer_of(read_all(connection))


def read_all(connection: socket.socket) -> bytes:
    """Return what comes until the other side closes or resets."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 20):
            parts.append(part)
    return b"".join(parts)


def read_until_silent(connection: socket.socket, patience_s: float = 0.5) -> bytes:
    """Return what comes until the other side closes, or waits for more for so long."""
    connection.settimeout(patience_s)
    parts = []
    with contextlib.suppress(ConnectionError, TimeoutError):
        while part := connection.recv(1 << 20):
            parts.append(part)
    return b"".join(parts)


def answer_of(received: bytes) -> Answer | None:
    """Return the first answer of a connection, past a ``100 Continue``; None without one. Raises ValueError for no HTTP."""
    return next(answers_of(received), None)


def answers_of(received: bytes) -> Iterator[Answer]:
    """Return all answers of a connection; the last one may be cut. Raises ValueError for no HTTP."""
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        if not first.startswith("HTTP/"):
            raise ValueError(f"not an answer: {received[:200]!r}")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        status = int(first.split(" ")[1])
        if headers.get("transfer-encoding") == "chunked":
            body, received = _chunked(rest)
        else:
            length = 0 if status == 100 else int(headers.get("content-length", len(rest)))
            body, received = rest[:length], rest[length:]
        if status != 100:
            yield Answer(status, headers, body)


def _chunked(received: bytes) -> tuple[bytes, bytes]:
    """Return a body, and what follows it."""
    parts: list[bytes] = []
    while received:
        size, _, rest = received.partition(b"\r\n")
        length = int(size, 16)
        parts.append(rest[:length])
        received = rest[length + 2 :]
        if length == 0:
            break
    return b"".join(parts), received


def is_closed_within(connection: socket.socket, seconds: float) -> bool:
    """Return whether the other side closes the connection by then; what it sends before is dropped."""
    deadline_s = time.monotonic() + seconds
    with contextlib.suppress(ConnectionError, TimeoutError):
        while (left_s := deadline_s - time.monotonic()) > 0:
            connection.settimeout(left_s)
            if not connection.recv(65536):
                return True
        return False
    return time.monotonic() < deadline_s

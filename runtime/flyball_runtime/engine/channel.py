"""Frames between the API process and the engine process, over a pair of sockets that no file names."""

import asyncio
import select
import socket
from collections.abc import Callable

from flyball_runtime.core.frames import LENGTH, packed

_READ_BYTES = 1 << 18  # as much as asyncio reads at once


class Disconnected(Exception):
    """The process at the other end is gone."""


class Unpacker:
    """Finds the frames in a stream of bytes that comes in pieces of any size."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that these bytes complete."""
        rest = self._rest
        rest += data
        frames, begin = [], 0
        while len(rest) - begin >= LENGTH.size:
            (length,) = LENGTH.unpack_from(rest, begin)
            end = begin + LENGTH.size + length
            if end > len(rest):
                break
            frames.append(bytes(memoryview(rest)[begin + LENGTH.size : end]))
            begin = end
        del rest[:begin]
        return frames


class EngineEnd:
    """The engine's end, for one thread. Sending waits for the other side when that has much to read; receiving never waits."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unpacker = Unpacker()
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)

    def send(self, frame: bytes) -> None:
        """Raises Disconnected."""
        try:
            self._socket.sendall(packed(frame))
        except ConnectionError:
            raise Disconnected from None

    def receive(self) -> list[bytes]:
        """Return the frames that have come. Raises Disconnected."""
        frames: list[bytes] = []
        try:
            while data := self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT):
                frames += self._unpacker.feed(data)
        except BlockingIOError:
            return frames
        except ConnectionError:
            raise Disconnected from None
        raise Disconnected

    def wait(self, timeout_s: float) -> None:
        """Return when there is something to receive, or after so many seconds."""
        self._arrivals.poll(timeout_s * 1000)


class ApiEnd(asyncio.Protocol):
    """The API process's end, on its event loop. Nothing here waits: what the engine does not read yet is kept.

    Args:
        on_frame: called with each frame. What it raises goes to ``on_error``, after which no more are read.

    Attributes:
        closed: set when every frame that the engine has sent is read and the engine is gone.
    """

    def __init__(self, on_frame: Callable[[bytes], None], on_error: Callable[[Exception], None]) -> None:
        self._on_frame = on_frame
        self._on_error = on_error
        self._unpacker = Unpacker()
        self.closed = asyncio.Event()

    async def open(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=connection)

    def send(self, frame: bytes) -> None:
        """Send a frame, or drop it if the engine is gone."""
        if not self._transport.is_closing():
            self._transport.write(packed(frame))

    def close(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._unpacker.feed(data):
                self._on_frame(frame)
        except Exception as error:  # noqa: BLE001 - the boundary of the loop: whose frame it is must hear of it
            self._transport.abort()
            self._on_error(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()

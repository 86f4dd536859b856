"""uvicorn's HTTP/1.1 connection, for clients that send half a request, no HTTP, HTTP that can be read in two ways, or a body in
very small chunks, and for those that do not read their answer."""

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from flyball_runtime.api.errors import HttpRefusal, error_json

logger = logging.getLogger(__name__)

READ_BYTES = 16 * 1024
"""Most bytes taken from a socket in one turn of the event loop (asyncio: 256 KiB). Full of 1-byte chunks they cost 15 ms."""

DROP_TIMEOUT_S = 2.0

NOT_HTTP = "the request is malformed, or its body has too many chunks. Send valid HTTP with a Content-Length, or larger chunks."

MAX_CHUNKS = 16384
"""Most chunks of a body, which h11 parses at 5 us each: 80 ms in all."""


class BoundedH11Protocol(H11Protocol):
    """Closes a connection whose request line and headers take too long, that never sends a byte, or never reads its answer.

    uvicorn's keep-alive timer starts after a response and ends with the next byte, so a client that sends half a request,
    or nothing at all, would keep its connection for ever. How fast bytes drip in does not matter: the headers' time runs
    from the first byte to the last. An answer that is written whole, and the next part of a stream, wait in the transport's
    buffer for a client that does not read; the connection is dropped when none of it was taken for ``write_timeout_s``.
    """

    def __init__(self, *args: Any, header_timeout_s: float, write_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _BoundedConnection(h11.SERVER, self.config.h11_max_incomplete_event_size or READ_BYTES)
        self._dropping = False
        self._header_timeout_s = header_timeout_s
        self._write_timeout_s = write_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        # a new connection may be idle for as long as one between two requests
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        if self._dropping:
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_header_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self._header_timeout_s, self.timeout_keep_alive_handler)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP. It may come within the body of a request that is being handled, or answered already."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        body = error_json(HttpRefusal(400, "invalid_http", NOT_HTTP))
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        events = [h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()]
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self._drop_rest()

    def _drop_rest(self) -> None:
        """Take in for a moment what the client still sends: closing with bytes unread would take the answer from it."""
        self._dropping = True
        self.transport.write_eof()
        self.transport.resume_reading()
        self.loop.call_later(DROP_TIMEOUT_S, self.transport.close)

    def on_response_complete(self) -> None:
        """End a connection on which a proxy may see another request than we do, by the other length (RFC 9112, 6.3)."""
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in self.headers or ()}:
            self.transport.close()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_write_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def _watch_reader(self, num_waiting: int) -> None:
        """Look again after the write timeout at an answer of which ``num_waiting`` bytes wait now."""
        self._write_timer = self.loop.call_later(self._write_timeout_s, self._check_reader, num_waiting)

    def _check_reader(self, num_waiting_before: int) -> None:
        num_waiting = self.transport.get_write_buffer_size()
        if num_waiting < num_waiting_before:
            self._watch_reader(num_waiting)
            return
        logger.warning(
            "a client has read nothing of its answer for %g s; the connection is closed and %d bytes are dropped",
            self._write_timeout_s,
            num_waiting,
        )
        self.transport.abort()

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class _BoundedConnection(h11.Connection):
    """Raises RemoteProtocolError for a body of more than MAX_CHUNKS chunks, but those that a read cuts behind their length."""

    _num_chunks = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
        elif isinstance(event, h11.Request):
            self._num_chunks = 0
        if self._num_chunks > MAX_CHUNKS:
            raise h11.RemoteProtocolError(f"the body has more than {MAX_CHUNKS} chunks")
        return event

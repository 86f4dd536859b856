"""uvicorn's HTTP/1.1 connection, for clients that send half a request, no HTTP, or HTTP that can be read in two ways."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class BoundedH11Protocol(H11Protocol):
    """Closes a connection whose request line and headers take too long, or that never sends a byte.

    uvicorn's keep-alive timer starts after a response and ends with the next byte, so a client that sends half a request,
    or nothing at all, would keep its connection for ever. How fast bytes drip in does not matter: the headers' time runs
    from the first byte to the last.
    """

    def __init__(self, *args: Any, header_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timeout_s = header_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # a new connection may be idle for as long as one between two requests
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_header_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self._header_timeout_s, self.timeout_keep_alive_handler)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP. It may come within the body of a request that is being handled, or answered already."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        """End a connection on which a proxy may see another request than we do, by the other length (RFC 9112, 6.3)."""
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in self.headers or ()}:
            self.transport.close()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

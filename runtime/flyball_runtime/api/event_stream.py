"""Answers as server-sent events."""

import logging

from fastapi import Response
from starlette.types import Receive, Scope, Send

from flyball_runtime.api.errors import internal_error
from flyball_runtime.api.generation import Choice, Generation, TokenUsage
from flyball_runtime.core.errors import RequestError

logger = logging.getLogger(__name__)


class EventStream(Response):
    """Runs a Generation and writes it as server-sent events, in one write per wake-up, however many tokens it brought.

    Nothing is sent before the first token or failure, so a request that fails before it has output gets a real HTTP status.
    A failure after that becomes an event, which is the last. A slow reader holds up its own writes only: uvicorn bounds the
    transport's buffer, and what comes meanwhile gathers in the choices and leaves at once. The connection drops a reader that
    takes nothing (``http_protocol.py``), which is a disconnect here, and a disconnect aborts the generation.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._generation = generation
        self._started = False

    def events_of(self, choice: Choice) -> bytes:
        """The events of what came of a choice since the last call, as far as there are any."""
        raise NotImplementedError

    def closing(self, usage: TokenUsage) -> bytes:
        """The events behind those of all choices."""
        raise NotImplementedError

    def failed(self, failure: RequestError) -> bytes:
        """The last event, instead of the closing ones."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation.running(receive) as generation:
            ended = False
            while not ended and not generation.disconnected:
                ready = await generation.wait_changed()
                ended = generation.ended or generation.failure is not None
                body = b"".join(map(self.events_of, ready))
                if generation.failure is not None:
                    body = self._failed(generation.failure, body)
                elif ended:
                    body += self.closing(generation.usage)
                if body:
                    await self._write(send, body)
            if not generation.disconnected:
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _failed(self, failure: Exception, body: bytes) -> bytes:
        """The last events after ``body``. Raises a failure that comes before any output."""
        if not self._started:
            raise failure
        request_id = self._generation.call.request_id
        if isinstance(failure, RequestError):
            logger.warning("request %s failed while streaming: %s: %s", request_id, failure.code, failure)
            return body + self.failed(failure)
        return body + self.failed(internal_error(failure, request_id))

    async def _write(self, send: Send, body: bytes) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})

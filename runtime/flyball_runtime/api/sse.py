"""Streaming answers: server-sent events, one write per wake-up, however many tokens it brought.

Nothing is sent before the first token or failure, so a request that fails before it has output gets a real HTTP status.
A failure after that becomes an ``error`` event and the stream ends without ``[DONE]``. A slow reader holds up its own
writes only: the transport's buffer is bounded by uvicorn, and what comes meanwhile gathers in the choices and leaves in
one chunk each (see generation.py). The connection drops a reader that takes nothing (see http_protocol.py), which is a
disconnect here.
"""

import logging
from dataclasses import dataclass

from fastapi import Response
from starlette.types import Receive, Scope, Send

from flyball_runtime.api.choice import Choice
from flyball_runtime.api.errors import error_body, internal_error
from flyball_runtime.api.generation import Generation, Usage
from flyball_runtime.api.wire import DONE, Envelope, Format
from flyball_runtime.core.errors import RequestError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """How a stream is written; the two flags are OpenAI's and vLLM's stream_options."""

    format: Format
    envelope: Envelope
    include_usage: bool
    continuous_usage: bool


class EventStream(Response):
    """Runs a Generation and writes it as server-sent events. The client's disconnect aborts the generation."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, plan: StreamPlan) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._generation = generation
        self._plan = plan
        self._opened: set[int] = set()
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation.running(receive) as generation:
            ended = False
            while not ended and not generation.disconnected:
                ready = await generation.wait_changed()
                ended = generation.ended or generation.failure is not None
                body = self._body(generation, ready, ended)
                if body:
                    await self._write(send, body)
            if not generation.disconnected:
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _body(self, generation: Generation, ready: list[Choice], ended: bool) -> bytes:
        """The events to write now. Raises a failure that comes before any output."""
        failure = generation.failure
        if failure is not None and not self._opened:
            raise failure
        chunks = [chunk for choice in ready for chunk in self._chunks(choice)]
        if failure is not None:
            chunks.append(self._error_event(failure))
        elif ended:
            chunks.append(self._closing(generation.usage))
        return b"".join(chunks)

    def _chunks(self, choice: Choice) -> list[bytes]:
        """The events of one choice since the last wake-up: opening, text, finish, as far as there are any."""
        format, text = self._plan.format, choice.take_text()
        if not text and choice.finish_reason is None:
            return []
        parts: list[bytes | None] = []
        if choice.index not in self._opened:
            self._opened.add(choice.index)
            parts.append(format.opening(choice.index))
        if text:
            parts.append(format.text(choice.index, text))
        if choice.finish_reason is not None:
            parts.append(format.finish(choice.index, choice.finish_reason))
        usage = self._running_usage(choice)
        return [self._plan.envelope.chunk(part, usage) for part in parts if part is not None]

    def _running_usage(self, choice: Choice) -> Usage | None:
        if not self._plan.continuous_usage:
            return None
        return Usage(
            num_prompt=choice.num_prompt_tokens,
            num_output=choice.num_output_tokens,
            num_cached=choice.num_cached_tokens,
        )

    def _closing(self, usage: Usage) -> bytes:
        return self._plan.envelope.chunk(b"", usage) + DONE if self._plan.include_usage else DONE

    def _error_event(self, failure: Exception) -> bytes:
        request_id = self._generation.call.request_id
        if isinstance(failure, RequestError):
            logger.warning("request %s failed while streaming: %s: %s", request_id, failure.code, failure)
        else:
            failure = internal_error(failure, request_id)
        return b"event: error\ndata: " + error_body(failure) + b"\n\n"

    async def _write(self, send: Send, body: bytes) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})

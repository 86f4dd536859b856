"""A conversation with a served model."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from flyball_runtime.client.chunk import Chunk
from flyball_runtime.client.endpoint import Endpoint
from flyball_runtime.client.errors import EndpointError
from flyball_runtime.client.stream import stream_chunks

MIN_SPAN_S = 0.1
"""Over less than this between first and last token, a rate says how a proxy or a socket gathered them, not how they were
made."""


class Answer(Struct):
    """An answer as it grows, and its timing in seconds from sending."""

    text: str = ""
    num_tokens: int = 0
    ttft_s: float | None = None
    last_token_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first token; None for fewer than two tokens, or when they came in one burst."""
        if self.ttft_s is None or self.num_tokens < 2 or self.last_token_s - self.ttft_s < MIN_SPAN_S:
            return None
        return (self.num_tokens - 1) / (self.last_token_s - self.ttft_s)

    def add(self, chunk: Chunk, seconds: float) -> None:
        if chunk.carries_token:
            self.text += chunk.text
            self.num_tokens += 1
            self.ttft_s = seconds if self.ttft_s is None else self.ttft_s
            self.last_token_s = seconds
        if chunk.usage is not None:
            self.num_tokens = chunk.usage.completion_tokens

    def __str__(self) -> str:
        parts = [f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"]
        if self.ttft_s is not None:
            parts.append(f"TTFT {self.ttft_s * 1000:.0f} ms")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tok/s")
        return ", ".join(parts)


class Conversation:
    """Messages so far, and the model that answers them.

    Args:
        options: further fields of each request, like temperature.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: Endpoint,
        model: str,
        *,
        system: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.messages: list[dict[str, str]] = []
        self._session = session
        self._endpoint = endpoint
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._options = options or {}

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages.clear()

    async def ask(self, question: str, write: Callable[[str], None]) -> Answer:
        """Send ``question``, call ``write`` with each piece of text as it comes, and remember both sides.

        When cancelled, the request is aborted and the part that came is remembered; after an error, nothing is.

        Raises:
            EndpointError: the answer did not come, or not to its end.
        """
        self.messages.append({"role": "user", "content": question})
        answer = Answer()
        try:
            await self._stream(answer, write)
        except EndpointError:
            self.messages.pop()
            raise
        except asyncio.CancelledError:
            self._remember(answer)
            raise
        self._remember(answer)
        return answer

    def _remember(self, answer: Answer) -> None:
        self.messages.append({"role": "assistant", "content": answer.text})

    async def _stream(self, answer: Answer, write: Callable[[str], None]) -> None:
        sent = time.perf_counter()
        async with aclosing(stream_chunks(self._session, self._endpoint, "chat", self._body())) as chunks:
            async for chunk in chunks:
                answer.add(chunk, time.perf_counter() - sent)
                if chunk.text:
                    write(chunk.text)

    def _body(self) -> bytes:
        return msgspec.json.encode(
            {
                "model": self.model,
                "messages": self._system + self.messages,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self._options,
            }
        )

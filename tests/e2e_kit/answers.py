"""Greedy requests whose answer is known beforehand, and what came of each."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from e2e_kit.models import SERVED_NAME


@dataclass(frozen=True)
class Ask:
    """A completion of exactly ``max_tokens`` tokens."""

    prompt: str
    max_tokens: int
    streamed: bool = True

    @property
    def body(self) -> dict[str, Any]:
        fixed = {"model": SERVED_NAME, "temperature": 0, "ignore_eos": True}
        streaming = {"stream": True, "stream_options": {"include_usage": True}} if self.streamed else {}
        return {**fixed, "prompt": self.prompt, "max_tokens": self.max_tokens, **streaming}


@dataclass(eq=False)
class Answer:
    """An answer while it comes and afterwards. Times are of the monotonic clock.

    Attributes:
        first_s: when the first text came.
        last_s: when the latest text came.
        longest_gap_s: the longest time between two texts of a stream.
        ended_s: None while the request is under way.
        problem: what is wrong with an answer that has ended; empty if it is whole.
    """

    ask: Ask
    sent_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    last_s: float = 0.0
    longest_gap_s: float = 0.0
    ended_s: float | None = None
    text: str = ""
    problem: str = ""
    _finish_reasons: list[str] = field(default_factory=list)
    _num_tokens: int | None = None
    _is_done: bool = False

    @property
    def in_flight(self) -> bool:
        """Return whether some of the answer has come, and not all of it."""
        return self.first_s is not None and self.ended_s is None

    @property
    def key(self) -> tuple[str, int]:
        """The part of the request that decides the text."""
        return self.ask.prompt, self.ask.max_tokens

    async def fetch(self, session: aiohttp.ClientSession, url: str) -> None:
        """Send the request and read the answer to its end."""
        try:
            async with session.post(f"{url}/v1/completions", json=self.ask.body) as response:
                if response.status != 200:
                    self.problem = f"status {response.status}: {(await response.text())[:300]}"
                elif self.ask.streamed:
                    await self._read_stream(response)
                else:
                    self._take(await response.json())
                    self._is_done = True
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            self.problem = f"{type(error).__name__}: {error}"
        self.ended_s = time.monotonic()
        self.problem = self.problem or self._what_is_missing()

    async def _read_stream(self, response: aiohttp.ClientResponse) -> None:
        async for line in response.content:
            event = line.removeprefix(b"data: ").strip()
            if event == b"[DONE]":
                self._is_done = True
            elif event:
                self._take(json.loads(event))

    def _take(self, chunk: dict[str, Any]) -> None:
        """Add a chunk of a stream, or a whole answer."""
        if "error" in chunk:
            self.problem = f"the stream says {chunk['error']}"
        for choice in chunk.get("choices", ()):
            self._take_text(choice["text"])
            self._finish_reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        if usage := chunk.get("usage"):
            self._num_tokens = usage["completion_tokens"]

    def _take_text(self, text: str) -> None:
        now_s = time.monotonic()
        if self.first_s is None:
            self.first_s = self.last_s = now_s
        self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_s)
        self.last_s = now_s
        self.text += text

    def _what_is_missing(self) -> str:
        """Return what keeps the answer from being whole: its last event, its end, or one of its tokens."""
        if not self._is_done:
            return "the stream ended without [DONE]"
        if self._finish_reasons != ["length"]:
            return f"the answer ended with {self._finish_reasons}"
        if self._num_tokens != self.ask.max_tokens:
            return f"the answer has {self._num_tokens} tokens of {self.ask.max_tokens}"
        return ""

"""Traffic against a real server: requests of every kind, clients that leave at a random moment, a check of each answer."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from flyball_clients.stream import SSEParser

TIMEOUT_S = 120.0
SHARED_PREFIX = [10 + index % 300 for index in range(96)]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One HTTP request and when its client leaves.

    Attributes:
        leave_after_s: seconds from sending; None stays.
        leave_after_chunks: events of a stream; None stays.
    """

    path: str = "/v1/completions"
    body: dict[str, Any]
    leave_after_s: float | None = None
    leave_after_chunks: int | None = None

    @property
    def num_choices(self) -> int:
        return int(self.body.get("n", 1))


def plain_stream(index: int, max_tokens: int) -> Ask:
    prompt = [10 + (index * 7 + position) % 300 for position in range(8 + index % 24)]
    return Ask(body=_body(prompt=prompt, max_tokens=max_tokens) | _STREAM)


def random_ask(rng: random.Random, *, max_tokens: int, patience_s: float) -> Ask:
    """Streamed or not, chat or completion, with shared prefixes, stop strings, several choices; half of them leave."""
    body = _body(max_tokens=rng.randint(1, max_tokens), temperature=rng.choice((0, 1)), n=rng.choice((1, 1, 1, 2, 3)))
    if rng.random() < 0.2:
        body["stop"] = ["e", "77"]
    streams = rng.random() < 0.7
    if streams:
        body |= _STREAM
    how = rng.choice(("stays", "stays", "leaves in time", "leaves after chunks" if streams else "leaves in time"))
    chats = rng.random() < 0.2
    prompt = {"messages": [{"role": "user", "content": "hello " * rng.randint(1, 9)}]} if chats else _prompt(rng)
    return Ask(
        path="/v1/chat/completions" if chats else "/v1/completions",
        body=body | prompt,
        # Short moments count most: that is where accepting, the first token and leaving meet.
        leave_after_s=patience_s * rng.random() ** 3 if how == "leaves in time" else None,
        leave_after_chunks=rng.randint(1, max_tokens) if how == "leaves after chunks" else None,
    )


_STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": "test", "temperature": 0, "ignore_eos": True} | fields


def _prompt(rng: random.Random) -> dict[str, list[int]]:
    own = [rng.randrange(10, 380) for _ in range(rng.randint(1, 40))]
    return {"prompt": SHARED_PREFIX[: rng.choice((16, 50, 96))] + own if rng.random() < 0.4 else own}


@dataclass
class Traffic:
    """Sends requests and counts what came of them. Use ``opened``.

    Attributes:
        num_left: requests whose client left before the answer's end.
        num_choices: choices of complete answers; ``num_output_tokens`` are theirs, by the server's usage.
        most_streaming: most streams at one moment that had begun to arrive and not ended.
        errors: what was wrong with any answer that was waited for.
    """

    url: str
    session: aiohttp.ClientSession
    num_sent: int = 0
    num_finished: int = 0
    num_left: int = 0
    num_choices: int = 0
    num_output_tokens: int = 0
    num_streaming: int = 0
    most_streaming: int = 0
    errors: list[str] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def opened(cls, url: str) -> AsyncIterator["Traffic"]:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            yield cls(url, session)

    async def send(self, ask: Ask) -> None:
        """Send one request and read its answer, unless its client leaves before the end. What is wrong goes to ``errors``."""
        self.num_sent += 1
        try:
            async with asyncio.timeout(ask.leave_after_s) as patience:
                stayed = await self._exchange(ask)
        except TimeoutError:
            stayed = False
            if not patience.expired():
                self.errors.append(f"no answer within {TIMEOUT_S:g} s")
        except (aiohttp.ClientError, ConnectionError) as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            return
        self.num_finished += stayed
        self.num_left += not stayed

    async def send_all(self, asks: list[Ask], concurrency: int) -> None:
        """Send them in order, ``concurrency`` at a time."""
        left = iter(asks)

        async def worker() -> None:
            for ask in left:
                await self.send(ask)

        await asyncio.gather(*(worker() for _ in range(concurrency)))

    async def _exchange(self, ask: Ask) -> bool:
        """False when the client has left."""
        async with self.session.post(self.url + ask.path, json=ask.body) as response:
            if response.status != 200:
                self.errors.append(f"{response.status}: {(await response.text())[:300]}")
                return True
            if not ask.body.get("stream"):
                answer = msgspec.json.decode(await response.read())
                self._check(ask, [choice["finish_reason"] for choice in answer["choices"]], answer["usage"])
                return True
            self.num_streaming += 1  # the server answers with the first token, not before
            self.most_streaming = max(self.most_streaming, self.num_streaming)
            try:
                return await self._read_stream(ask, response)
            finally:
                self.num_streaming -= 1

    async def _read_stream(self, ask: Ask, response: aiohttp.ClientResponse) -> bool:
        parser, events = SSEParser(), []
        async for packet in response.content.iter_any():
            events += parser.feed(packet)
            if ask.leave_after_chunks is not None and len(events) >= ask.leave_after_chunks:
                response.close()
                return False
        if events[-1:] != [b"[DONE]"]:
            self.errors.append(f"a stream ended with {events[-1:]} and not with [DONE]")
            return True
        chunks = [msgspec.json.decode(event) for event in events[:-1]]
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        self._check(ask, [reason for reason in reasons if reason is not None], chunks[-1].get("usage"))
        return True

    def _check(self, ask: Ask, finish_reasons: list[str | None], usage: dict[str, Any] | None) -> None:
        """Every choice ended once, and by usage with as many tokens as were asked for, or fewer at a stop string."""
        num_tokens = -1 if usage is None else usage["completion_tokens"]
        most = ask.num_choices * ask.body["max_tokens"]
        whole = "stop" not in ask.body
        if sorted(map(str, finish_reasons)) != ["length"] * ask.num_choices and (
            whole or len(finish_reasons) != ask.num_choices or not {"length", "stop"}.issuperset(finish_reasons)
        ):
            self.errors.append(f"{ask.num_choices} choices ended with {finish_reasons}")
        if not (num_tokens == most if whole else ask.num_choices <= num_tokens <= most):
            self.errors.append(f"usage is {usage}; {most} output tokens were asked for")
        self.num_choices += ask.num_choices
        self.num_output_tokens += max(0, num_tokens)

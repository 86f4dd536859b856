"""Steady open-loop traffic through a Service, streamed and not, whose every answer is known beforehand."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp

from e2e_kit.models import SERVED_NAME, Model

MAX_TOKENS = 24
TIMEOUT_S = 60.0
BEGIN_TIMEOUT_S = 10.0
PROMPTS = (
    "What is the capital of France?",
    "Once upon a time",
    "Hello.",
    "Tell me about the sea.",
    "The quick brown fox",
    "How are you today?",
)


@dataclass(frozen=True)
class Answer:
    """What came of one request; ``problem`` is empty if a whole answer did. Times are of the monotonic clock."""

    prompt: str
    streamed: bool
    sent_s: float
    ended_s: float
    text: str
    problem: str


@dataclass(frozen=True)
class Verdict:
    """What came of all requests; ``changed`` are whole answers with another text than at the beginning."""

    answers: list[Answer]
    expected: Mapping[str, str]

    @property
    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.problem]

    @property
    def changed(self) -> list[Answer]:
        return [one for one in self.answers if not one.problem and one.text != self.expected[one.prompt]]

    @property
    def figures(self) -> dict[str, float]:
        return {
            "requests": len(self.answers),
            "failed": len(self.failed),
            "changed": len(self.changed),
            "slowest_s": max(answer.ended_s - answer.sent_s for answer in self.answers),
        }


@dataclass
class Traffic:
    """Sends a request every ``period_s``, however long answers take; each on a connection of its own, as curl does.

    Runs in a thread of its own from ``with`` on; leaving waits for the answers. ``expected`` is asked for first, one at a time.
    """

    url: str
    model: str
    period_s: float = 0.5
    timeout_s: float = TIMEOUT_S
    expected: dict[str, str] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.expected = asyncio.run(self._learn())
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="traffic")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Send no more, and wait for the answers."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def verdict(self) -> Verdict:
        return Verdict(list(self.answers), self.expected)

    async def _learn(self) -> dict[str, str]:
        """Return the answers; the Service may be a moment behind the first replica."""
        deadline_s = time.monotonic() + BEGIN_TIMEOUT_S
        async with self._session() as session:
            while True:
                answers = [await self._ask(session, prompt, streamed=False) for prompt in PROMPTS]
                if not (problems := [answer.problem for answer in answers if answer.problem]):
                    return {answer.prompt: answer.text for answer in answers}
                if time.monotonic() > deadline_s:
                    raise AssertionError(f"no answers to begin with: {problems}")
                await asyncio.sleep(0.5)

    async def _run(self) -> None:
        async with self._session() as session, asyncio.TaskGroup() as requests:
            start_s = time.monotonic()
            for count, (prompt, streamed) in enumerate(itertools.cycle(itertools.product(PROMPTS, (True, False)))):
                await asyncio.sleep(start_s + count * self.period_s - time.monotonic())
                if self._over.is_set():
                    return
                requests.create_task(self._send(session, prompt, streamed))

    async def _send(self, session: aiohttp.ClientSession, prompt: str, streamed: bool) -> None:
        self.answers.append(await self._ask(session, prompt, streamed))

    async def _ask(self, session: aiohttp.ClientSession, prompt: str, streamed: bool) -> Answer:
        sent_s, text, problem = time.monotonic(), "", ""
        body = {"model": self.model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": streamed}
        try:
            async with session.post(f"{self.url}/v1/completions", json=body) as response:
                raw = (await response.read()).decode()
                text, problem = _read(response.status, raw, streamed)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            problem = f"{type(error).__name__}: {error}"
        return Answer(prompt, streamed, sent_s, time.monotonic(), text, problem)

    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=self.timeout_s))


@contextmanager
def undisturbed(model: Model, figures: dict[str, Any]) -> Iterator[None]:
    """Send traffic that must not notice what happens inside, and note what came of it."""
    with Traffic(model.url, SERVED_NAME) as traffic:
        yield
    verdict = traffic.verdict
    figures |= verdict.figures
    if verdict.failed or verdict.changed:
        raise AssertionError(f"{verdict.figures}: {verdict.failed[:5]} {verdict.changed[:5]}")


def _read(status: int, raw: str, streamed: bool) -> tuple[str, str]:
    """Return the text of an answer and what is wrong with it."""
    if status != 200:
        return "", f"status {status}: {raw[:300]}"
    if not streamed:
        return _text(json.loads(raw)), ""
    *events, last = [event.removeprefix("data: ") for event in raw.split("\n\n") if event]
    if last != "[DONE]":
        return "", f"a stream ended with {last[:300]}"
    chunks = [json.loads(event) for event in events]
    if problem := next((chunk["error"] for chunk in chunks if "error" in chunk), None):
        return "", f"a stream said {problem}"
    return "".join(map(_text, chunks)), ""


def _text(answer: dict[str, Any]) -> str:
    return "".join(choice["text"] for choice in answer["choices"])

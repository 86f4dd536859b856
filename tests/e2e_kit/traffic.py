"""Traffic through a Service whose every answer is known: long streams, more than run at a time, and short requests.

Streams come from clients that send the next when one has ended, so there are always as many. Short requests, streamed and whole
in turns, come at a steady rate whatever becomes of the others. Each request has a connection of its own, as with curl.
"""

import asyncio
import itertools
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

import aiohttp

from e2e_kit.answers import Answer, Ask
from e2e_kit.work import Work, new_session


@dataclass(frozen=True)
class Verdict:
    """What came of all requests; ``changed`` are whole answers with another text than before the disturbances."""

    answers: list[Answer]
    work: Work

    @property
    def failed(self) -> list[Answer]:
        return [one for one in self.answers if one.problem]

    @property
    def changed(self) -> list[Answer]:
        return [one for one in self.answers if not one.problem and one.text != self.work.expected[one.key]]

    @property
    def of_streams(self) -> list[Answer]:
        return [one for one in self.answers if one.ask in self.work.streams]

    @property
    def is_clean(self) -> bool:
        return not self.failed and not self.changed

    @property
    def figures(self) -> dict[str, float]:
        streams = self.of_streams
        times = [one.last_s - one.first_s for one in streams if one.first_s is not None and not one.problem]
        return {
            "requests": len(self.answers),
            "streams": len(streams),
            "failed": len(self.failed),
            "changed": len(self.changed),
            "stream_s": statistics.median(times) if times else 0.0,
            "slowest_first_token_s": max(
                ((one.first_s or one.sent_s) - one.sent_s for one in self.answers), default=0.0
            ),
            "longest_gap_s": max((one.longest_gap_s for one in streams), default=0.0),
        }

    def __str__(self) -> str:
        """Return the figures, and how the first few bad answers went."""
        start_s = min(one.sent_s for one in self.answers)
        bad = itertools.islice((*self.failed, *self.changed), 8)
        return "\n".join((str(self.figures), *(_told(one, start_s, self.work.expected[one.key]) for one in bad)))


@dataclass
class Traffic:
    """Sends requests in a thread of its own from ``with`` on; leaving it waits for the answers.

    ``num_streams`` may be lowered meanwhile: that many clients then send their next stream.
    """

    url: str
    work: Work
    num_streams: int
    answers: list[Answer] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _burst: Callable[[int], object] | None = None

    def __enter__(self) -> Self:
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

    def send_at_once(self, num: int) -> None:
        """Send as many short requests in this moment, beside the others."""
        assert self._burst is not None, "it has not begun"
        self._burst(num)

    @property
    def in_flight(self) -> int:
        """Streams of which some has come, and not all."""
        return sum(one.in_flight for one in list(self.answers) if one.ask in self.work.streams)

    @property
    def verdict(self) -> Verdict:
        """What came of what has ended."""
        return Verdict([one for one in list(self.answers) if one.ended_s is not None], self.work)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        async with new_session() as session, asyncio.TaskGroup() as clients:

            def burst(num: int) -> None:
                for ask in itertools.islice(itertools.cycle(self.work.short), num):
                    clients.create_task(self._send(session, ask))

            self._burst = partial(loop.call_soon_threadsafe, burst)
            for index in range(self.num_streams):
                clients.create_task(self._stream(session, index))
            clients.create_task(self._send_short(session))

    async def _stream(self, session: aiohttp.ClientSession, index: int) -> None:
        """Be one client: send a stream, and the next when it has ended."""
        for ask in itertools.islice(itertools.cycle(self.work.streams), index, None):
            if self._over.is_set() or index >= self.num_streams:
                return
            answer = await self._send(session, ask)
            if answer.problem:  # it may have failed at once
                await asyncio.sleep(self.work.short_period_s)

    async def _send_short(self, session: aiohttp.ClientSession) -> None:
        """Send short requests at a steady rate, however long their answers take."""
        start_s = time.monotonic()
        async with asyncio.TaskGroup() as requests:
            for count, ask in enumerate(itertools.cycle(self.work.short)):
                await asyncio.sleep(start_s + count * self.work.short_period_s - time.monotonic())
                if self._over.is_set():
                    return
                requests.create_task(self._send(session, ask))

    async def _send(self, session: aiohttp.ClientSession, ask: Ask) -> Answer:
        answer = Answer(ask)
        self.answers.append(answer)
        await answer.fetch(session, self.url)
        return answer


def _told(one: Answer, start_s: float, expected: str) -> str:
    begun = "no text" if one.first_s is None else f"text from {one.first_s - start_s:.1f} s on"
    ended_s = (one.ended_s or one.sent_s) - start_s
    what = one.problem or f"changed after {_common_length(one.text, expected)} of {len(expected)} characters"
    return f"{one.ask}: sent at {one.sent_s - start_s:.1f} s, {begun}, ended at {ended_s:.1f} s: {what}"


def _common_length(one: str, other: str) -> int:
    return next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))

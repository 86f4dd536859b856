"""The work queue: each key at most once, never twice at the same time, later after each failure."""

import asyncio
import heapq
import itertools
import random
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Backoff:
    """Seconds until the next try: ``first_s``, doubling up to ``most_s``, shortened by up to half at random.

    The jitter keeps a thousand keys that failed together from coming back together.
    """

    first_s: float = 0.05
    most_s: float = 60.0
    random: Callable[[], float] = field(default=random.random)

    def after(self, num_failures: int) -> float:
        full = min(self.most_s, self.first_s * 2.0 ** min(num_failures - 1, 30))
        return full * (1.0 - self.random() / 2.0)


class WorkQueue(Generic[K]):
    """Keys to work on. ``take()`` what is due, then say ``done()`` or ``failed()``.

    A key that is added while it is worked on comes again afterwards. For use in one event loop.
    """

    def __init__(self, backoff: Backoff | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._backoff = backoff or Backoff()
        self._clock = clock
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = itertools.count()
        self._active: set[K] = set()
        self._tries: dict[K, int] = {}
        self._failing: set[K] = set()
        self._not_before: dict[K, float] = {}
        self._changed = asyncio.Event()

    def add(self, key: K, delay_s: float = 0.0) -> None:
        """Have the key worked on in ``delay_s``, or earlier if it is due earlier; never before what ``failed`` was told."""
        at = max(self._clock() + delay_s, self._not_before.get(key, 0.0))
        if at < self._due.get(key, float("inf")):
            self._due[key] = at
            self._push(key)

    def take(self) -> K | None:
        """Return the key that has waited longest and is now being worked on; None when nothing is due."""
        while self._heap and self._heap[0][0] <= self._clock():
            at, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == at and key not in self._active:
                del self._due[key]
                self._active.add(key)
                return key
        return None

    async def get(self) -> K:
        """Like ``take()``, but wait for it."""
        while (key := self.take()) is None:
            self._changed.clear()
            try:
                async with asyncio.timeout(self._wait_s()):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return key

    def done(self, key: K) -> None:
        """The work on the key succeeded: its failures are forgotten."""
        self._tries.pop(key, None)
        self._failing.discard(key)
        self._not_before.pop(key, None)
        self._release(key)

    def failed(
        self, key: K, *, backoff: Backoff | None = None, at_least_s: float = 0.0, expected: bool = False
    ) -> float:
        """The work on the key failed; returns in how many seconds it comes again.

        Args:
            at_least_s: however urgent news may be, not earlier than this.
            expected: a user has to change something, so ``num_failing`` does not count the key.
        """
        self._tries[key] = self._tries.get(key, 0) + 1
        (self._failing.discard if expected else self._failing.add)(key)
        now = self._clock()
        retry = now + (backoff or self._backoff).after(self._tries[key])
        # What was added meanwhile is news, and news need not wait for the backoff.
        self._not_before[key] = now + at_least_s
        self._due[key] = max(now + at_least_s, min(retry, self._due.get(key, retry)))
        self._release(key)
        return self._due[key] - now

    @property
    def num_due(self) -> int:
        """Keys that could be worked on now."""
        now = self._clock()
        return sum(at <= now for at in self._due.values())

    @property
    def num_failing(self) -> int:
        """Keys whose last work failed, other than as expected."""
        return len(self._failing)

    def _release(self, key: K) -> None:
        self._active.discard(key)
        if key in self._due:
            self._push(key)

    def _push(self, key: K) -> None:
        """Put the key where ``take()`` finds it; one that is being worked on follows when it is released."""
        if key not in self._active:
            heapq.heappush(self._heap, (self._due[key], next(self._order), key))
            self._changed.set()

    def _wait_s(self) -> float | None:
        return max(0.0, self._heap[0][0] - self._clock()) if self._heap else None

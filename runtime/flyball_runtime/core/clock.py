"""Time as a dependency, so that tests and the simulator own it."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a monotonic scale with an arbitrary origin."""
        ...


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()


class FakeClock:
    """A clock that moves only when told."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance_to(self, now_s: float) -> None:
        """Move to a later time; an earlier one changes nothing."""
        if now_s > self._now_s:
            self._now_s = now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds

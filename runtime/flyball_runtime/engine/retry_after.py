"""When a client that found the queue full should come back."""

import math
from collections import deque

_WINDOW = 64
_MAX_S = 60


class RetryAfter:
    """Estimates how long the present queue takes to be served, from the rate of the last endings."""

    def __init__(self) -> None:
        self._ended_at_s: deque[float] = deque(maxlen=_WINDOW)

    def record_ending(self, now_s: float) -> None:
        self._ended_at_s.append(now_s)

    def forget(self) -> None:
        """Start anew after a time without requests, which says nothing about how fast they end."""
        self._ended_at_s.clear()

    def estimate_s(self, num_waiting: int, now_s: float) -> int:
        """Whole seconds from 1 to 60; 1 while no ending has been seen. Grows when endings stop."""
        if not self._ended_at_s:
            return 1
        seconds_each = (now_s - self._ended_at_s[0]) / len(self._ended_at_s)
        return min(_MAX_S, max(1, math.ceil(num_waiting * seconds_each)))

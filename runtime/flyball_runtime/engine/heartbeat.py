"""When the engine last made progress, in memory that the engine process and the API process share."""

import multiprocessing

from flyball_runtime.core.clock import Clock, MonotonicClock


class Heartbeat:
    """The time of the last progress: a turn of the engine's loop, or a layer of the model computed within a step.

    A step may take minutes (many tokens, a slow CPU) and send no message meanwhile, so messages cannot tell a long step
    from a stuck one. Writing a time costs well under a microsecond, so each layer can afford it. Linux's monotonic clock
    reads the same in every process. Made in one process, passed to the other as an argument of its entry point.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._last_s = multiprocessing.get_context("spawn").RawValue("d", self._clock.now())

    def beat(self) -> None:
        """Note progress, now."""
        self._last_s.value = self._clock.now()

    def age_s(self) -> float:
        """Return the seconds since the last beat; before the first, since this object was made."""
        return self._clock.now() - self._last_s.value

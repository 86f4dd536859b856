"""When the engine last made progress, in memory that the engine process and the API process share."""

import multiprocessing
from dataclasses import dataclass

from flyball_runtime.core.clock import Clock, MonotonicClock

SAFETY = 3.0
"""How many times the measured pause a pause may last: other work on the machine slows a step down."""


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
        last_s: float = self._last_s.value
        return self._clock.now() - last_s


@dataclass(frozen=True)
class PauseLimit:
    """How many seconds the engine may make no progress before it counts as stuck, and where that number comes from."""

    seconds: float
    source: str


def pause_limit(max_heartbeat_age_s: float, longest_pause_s: float) -> PauseLimit:
    """Return the larger of the setting and SAFETY times the longest pause that a step needs.

    Args:
        longest_pause_s: see ``WarmUp.longest_pause_s``.
    """
    needed_s = SAFETY * longest_pause_s
    if needed_s <= max_heartbeat_age_s:
        return PauseLimit(max_heartbeat_age_s, "--max-heartbeat-age")
    return PauseLimit(needed_s, f"{SAFETY:g} times the longest pause of a step")

"""How many threads compute a step, where other processes use the same cores."""

import logging
import math
from typing import Protocol

from flyball_runtime.core import cpus
from flyball_runtime.core.clock import Clock
from flyball_runtime.core.cpus import Demand, demand_since

logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""Time between two looks. Threads that outnumber the cores make a step several times as long, so this cannot be much."""

ENOUGH_S = 0.1
"""A look judges what each thread has got if it wanted a core for at least so long, on average, since the last one."""

STALE_S = 2.0
"""What was before an idle time of this length is not judged together with what comes after it."""

IDLE_WINDOW_S = 1.0
"""Cores have to be idle for so long until threads are added; other processes pause too."""

SOON_S = 10.0
MAX_PATIENCE = 16
"""Each time that threads have to go again so soon after they came back, all waiting times double, up to this factor."""

TRIAL_S = 60.0
"""After so long threads come back even if no core is idle: others that use it may have a lower priority."""


class Readings(Protocol):
    """What the kernel says; see ``core/cpus.py``."""

    def demand(self) -> dict[str, Demand]: ...

    def idle_s(self) -> float: ...

    def throttled_s(self) -> float: ...


class ThreadCount:
    """Has as many threads compute as there are cores for them.

    The threads of a step wait for each other many times in each layer. If one has no core, because another process uses it,
    all stand still until it gets one back, and those that wait use up the cores on which others could go on. So a team that
    shares its cores is several times as slow as a smaller one that does not (benchmarks/neighbours.py). The kernel counts for
    how long each thread waited for a core: a team of 2 that waited for half of its time has got 1 core. Threads go at once
    when others want the cores, and come back when cores are idle.

    What CPU limits stop is not counted: it does not depend on the number of threads which cores there are.

    Args:
        most: threads that may compute.
        readings: what the kernel says.
    Attributes:
        current: threads that compute.
    """

    def __init__(self, most: int, readings: Readings, clock: Clock) -> None:
        self.current = self._most = most
        self._readings = readings
        self._clock = clock
        self._patience = 1
        self._has_lowered = False  # since the last look
        self._changed_s = self._raised_s = -math.inf
        self._window_s, self._demand, self._throttled_s = clock.now(), readings.demand(), readings.throttled_s()
        self._start_idle_window(clock.now())

    def update(self) -> bool:
        """Look after the number of threads, if it is time to; return whether it has changed. Call it before each step."""
        before, now_s = self.current, self._clock.now()
        if now_s - self._window_s >= LOOK_S:
            self._look(now_s)
        return self.current != before

    def _look(self, now_s: float) -> None:
        demand, throttled_s = self._readings.demand(), self._readings.throttled_s()
        ran_s, waited_s = demand_since(self._demand, demand)
        wanted_s = ran_s + max(0.0, waited_s - (throttled_s - self._throttled_s))
        if self._has_lowered:
            self._has_lowered = False  # the others do the same meanwhile, if they look after their threads
        elif wanted_s >= ENOUGH_S * self.current:
            got = self.current * ran_s / wanted_s
            fitting = num_fitting(got)
            if fitting < self.current:
                self._lower(fitting, got, now_s)
        elif now_s - self._window_s < STALE_S:
            return
        if self.current < self._most:
            self._look_for_idle_cores(now_s)
        self._window_s, self._demand, self._throttled_s = now_s, demand, throttled_s

    def _lower(self, num_threads: int, got: float, now_s: float) -> None:
        soon = now_s - self._raised_s < SOON_S
        self._patience = min(MAX_PATIENCE, 2 * self._patience) if soon else 1
        self._raised_s = -math.inf
        self._has_lowered = True
        self._change(num_threads, f"other processes use the cores, {self.current} threads got {got:.1f} of them", now_s)

    def _look_for_idle_cores(self, now_s: float) -> None:
        if now_s - self._changed_s >= TRIAL_S * self._patience:
            self._raise(min(self._most, 2 * self.current), "trying whether cores are free for more", now_s)
        elif now_s - self._idle_window_s >= IDLE_WINDOW_S:
            idle = (self._readings.idle_s() - self._idle_s) / (now_s - self._idle_window_s)
            self._start_idle_window(now_s)
            # half of what they would bear, so that they do not go again at once
            fitting = num_fitting(min(float(self._most), self.current + idle), 0.5)
            if fitting > self.current and now_s - self._changed_s >= IDLE_WINDOW_S * self._patience:
                self._raise(fitting, f"{idle:.1f} cores were idle", now_s)

    def _raise(self, num_threads: int, reason: str, now_s: float) -> None:
        self._raised_s = now_s
        self._change(num_threads, reason, now_s)

    def _change(self, num_threads: int, reason: str, now_s: float) -> None:
        self.current, self._changed_s = num_threads, now_s
        self._start_idle_window(now_s)
        logger.info("%d of %d CPU threads compute from now on: %s", num_threads, self._most, reason)

    def _start_idle_window(self, now_s: float) -> None:
        self._idle_window_s, self._idle_s = now_s, self._readings.idle_s()


def thread_count(most: int, clock: Clock, readings: Readings = cpus) -> ThreadCount | None:
    """Return what looks after the number of threads; None where one is all there is, or the kernel does not count."""
    if most == 1:
        return None
    if not readings.demand():
        logger.info(
            "%d CPU threads, also while other processes use the cores: this kernel counts no waiting times", most
        )
        return None
    return ThreadCount(most, readings, clock)


def num_fitting(cores: float, patience: float = 1.0) -> int:
    """Return how many threads are fastest on so many cores.

    One more than there are whole cores pays if little is missing. While one of n threads waits for a core the others wait
    for it, so at worst n threads that lack a share L of a core do the work of n (1 - L); that is compared with n - 1, which
    lack nothing. On two cores, a part of one of them used by somebody else, two threads were as fast as one with L of 0.6.

    Args:
        patience: share of that L which is borne.
    """
    above = math.ceil(cores)
    bearable = 1.0 - 0.8 * (above - 1) / max(1, above)
    return max(1, above if above - cores <= patience * bearable else above - 1)

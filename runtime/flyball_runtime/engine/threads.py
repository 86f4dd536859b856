"""How many threads compute a step, and whether each has a core of its own, where other processes use the same cores."""

import logging
import math
from pathlib import Path
from typing import Protocol

from flyball_runtime.core import cpus
from flyball_runtime.core.cgroups import cgroups
from flyball_runtime.core.clock import Clock
from flyball_runtime.core.cpus import Demand, demand_since

logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""Time between two looks. It is short, because threads that outnumber the cores make steps several times as long."""

ENOUGH_S = 0.1
"""A look judges what the threads got if each wanted a core for at least so long since the last look, on average."""

STALE_S = 2.0
"""After an idle time of this length, a new window begins."""

IDLE_WINDOW_S = 1.0
"""Time for which cores have to be idle before threads are added: other processes pause too."""

SOON_S = 10.0
MAX_PATIENCE = 16
"""If threads are removed within SOON_S after others were added, all waiting times double, up to this factor."""

TOGETHER_S = 2.0
"""Time for which all cores are left to all threads before each gets one of its own again."""

APART_PATIENCE = 0.7
"""Those with a core each bear to lack this share of what others do: less than a busy program takes, which is half of a core."""

TRIAL_S = 60.0
"""After this time threads are added even if no core is idle: processes of a lower priority may use them."""


class Readings(Protocol):
    """What the kernel says; see ``core/cpus.py``."""

    def demand(self) -> dict[str, Demand]: ...

    def idle_s(self) -> float: ...

    def throttled_s(self) -> float: ...


class KernelReadings:
    """What Linux says of this process, and of the cores and cgroups that it has now."""

    def __init__(self) -> None:
        self._cores = cpus.cores()
        self._cgroups = list(cgroups("cpu", Path("/")))

    def demand(self) -> dict[str, Demand]:
        return cpus.demand()

    def idle_s(self) -> float:
        return cpus.idle_s(self._cores)

    def throttled_s(self) -> float:
        return cpus.throttled_s(self._cgroups)


class ThreadCount:
    """Has as many threads compute as there are cores for them.

    The threads of a step wait for each other many times in each layer, by spinning. If one thread has no core, because another
    process uses it, the others spin until it gets one. So a team that shares its cores is several times as slow as a smaller
    team that does not (benchmarks/neighbours.py). The kernel counts for how long each thread waited for a core: two threads
    that waited for half of their time got one core. Threads are removed as soon as that is seen, and added again when cores
    are idle.

    Time in which a CPU limit stopped the threads is not counted, because fewer threads would not get more cores.

    Where nobody else needs the cores for long, each thread has one of its own. Left to themselves, two are put on one core now
    and then when something else has run for a moment, and stay there for up to some 30 ms. A thread whose core others use
    cannot go to another one, so all cores are left to all threads again before any of them is removed.

    Args:
        most: threads that may compute.
        readings: what the kernel says.
        can_be_apart: whether there are as many cores as that, and threads can be told where to run.
    Attributes:
        current: threads that compute.
        are_apart: whether each has a core of its own; else each may run on all of them.
    """

    def __init__(self, most: int, readings: Readings, clock: Clock, *, can_be_apart: bool = False) -> None:
        self.current = self._most = most
        self.are_apart = False
        self._can_be_apart = can_be_apart
        self._together_s = -math.inf  # since when all cores are left to all threads
        self._readings = readings
        self._clock = clock
        self._patience = 1
        self._has_lowered = False  # since the last look
        self._changed_s = self._raised_s = -math.inf
        self._is_started = False
        self._window_s, self._throttled_s = 0.0, 0.0
        self._demand: dict[str, Demand] = {}
        self._idle_window_s, self._idle_s = 0.0, 0.0

    def update(self) -> bool:
        """Look after the threads, if it is time to; return whether anything has changed. Call it before each step."""
        before, now_s = (self.current, self.are_apart), self._clock.now()
        if not self._is_started:
            self._start(now_s)
        elif now_s - self._window_s >= LOOK_S:
            self._look(now_s)
        return (self.current, self.are_apart) != before

    def _start(self, now_s: float) -> None:
        """Leave out what came before the first step: other replicas may have been loading their weights, too."""
        self._is_started = True
        self._window_s, self._demand, self._throttled_s = now_s, self._readings.demand(), self._readings.throttled_s()
        self._start_idle_window(now_s)

    def _look(self, now_s: float) -> None:
        demand, throttled_s = self._readings.demand(), self._readings.throttled_s()
        ran_s, waited_s = demand_since(self._demand, demand)
        wanted_s = ran_s + max(0.0, waited_s - (throttled_s - self._throttled_s))
        if self._has_lowered:
            self._has_lowered = False  # other replicas may have removed threads since then, too
        elif wanted_s >= ENOUGH_S * self.current:
            got = self.current * ran_s / wanted_s
            fitting = num_fitting(got)
            if self.are_apart:
                if num_fitting(got, APART_PATIENCE) < self.current:
                    self._put_together(now_s)
            elif fitting < self.current:
                self._lower(fitting, got, now_s)
            elif self._can_be_apart and self.current == self._most:
                self.are_apart = now_s - self._together_s >= TOGETHER_S
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
            # half of what is accepted above, so that the next look does not remove them again
            fitting = num_fitting(min(float(self._most), self.current + idle), 0.5)
            if fitting > self.current and now_s - self._changed_s >= IDLE_WINDOW_S * self._patience:
                self._raise(fitting, f"{idle:.1f} cores were idle", now_s)

    def _raise(self, num_threads: int, reason: str, now_s: float) -> None:
        self._raised_s = now_s
        self._change(num_threads, reason, now_s)

    def _change(self, num_threads: int, reason: str, now_s: float) -> None:
        self.current, self._changed_s = num_threads, now_s
        self._put_together(now_s)
        self._start_idle_window(now_s)
        logger.info("%d of %d CPU threads compute from now on: %s", num_threads, self._most, reason)

    def _put_together(self, now_s: float) -> None:
        self.are_apart, self._together_s = False, now_s

    def _start_idle_window(self, now_s: float) -> None:
        self._idle_window_s, self._idle_s = now_s, self._readings.idle_s()


def thread_count(
    most: int, clock: Clock, readings: Readings | None = None, *, can_be_apart: bool = False
) -> ThreadCount | None:
    """Return a ThreadCount, or None if there is one thread only or the kernel counts no waiting times."""
    if most == 1:
        return None
    readings = readings or KernelReadings()
    if not readings.demand():
        logger.info(
            "%d CPU threads, also while other processes use the cores: this kernel counts no waiting times", most
        )
        return None
    return ThreadCount(most, readings, clock, can_be_apart=can_be_apart)


def num_fitting(cores: float, patience: float = 1.0) -> int:
    """Return how many threads are fastest on so many cores.

    One thread more than there are whole cores is faster if only a small share L of a core is missing. While one of n threads
    waits for a core, the others wait for it, so at worst n threads do the work of n (1 - L) threads, while n - 1 threads lack
    nothing. On two cores of which another program used a part, they did 1.25 times that: with L = 0.6, two threads were as
    fast as one.

    Args:
        patience: largest L that is accepted, as a share of the one at which n threads are as fast as n - 1.
    """
    above = math.ceil(cores)
    bearable = 1.0 - 0.8 * (above - 1) / max(1, above)
    return max(1, above if above - cores <= patience * bearable else above - 1)

"""What comes between a replica's admin port and the slow loop: jitter, loss, restarts and lies."""

import math
import random
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct, structs

from flyball_operator.tuning import PodEvidence

Lie = Literal["stale", "nan", "negative"]


class Restart(Struct, frozen=True, kw_only=True):
    """A replica's process dies; another takes its place after ``down_s``."""

    at_s: float
    replica: int = 0
    down_s: float = 30.0


class Window(Struct, frozen=True, kw_only=True):
    """From ``start_s`` to ``end_s``."""

    start_s: float
    end_s: float

    def covers(self, now_s: float) -> bool:
        return self.start_s <= now_s < self.end_s


class Faults(Struct, frozen=True, kw_only=True):
    """What goes wrong around the slow loop.

    Attributes:
        jitter_s: each round comes up to so much later.
        loss: share of answers that do not come.
        silences: when no replica answers at all.
        lies: what the evidence is like within ``lie_windows``.
        operator_down: when the operator does nothing.
        operator_restarts: when it loses what it knows.
    """

    jitter_s: float = 0.0
    loss: float = 0.0
    silences: tuple[Window, ...] = ()
    lie: Lie | None = None
    lie_windows: tuple[Window, ...] = ()
    restarts: tuple[Restart, ...] = ()
    operator_down: tuple[Window, ...] = ()
    operator_restarts: tuple[float, ...] = ()


class Scraper:
    """Spoils evidence as ``faults`` say, the same way for the same seed."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self._faults = faults
        self._random = random.Random(f"scrape/{seed}")
        self._kept: dict[str, PodEvidence] = {}
        self._kept_s: dict[str, float] = {}

    def jitter_s(self) -> float:
        return self._random.random() * self._faults.jitter_s if self._faults.jitter_s else 0.0

    def operator_down(self, now_s: float) -> bool:
        return any(one.covers(now_s) for one in self._faults.operator_down)

    def delivers(self, now_s: float) -> bool:
        """Return whether a post arrives: as evidence does, or not."""
        return not self._lost(now_s)

    def scrape(self, evidence: Sequence[PodEvidence], now_s: float) -> list[PodEvidence]:
        return [self._spoil(one, now_s) for one in evidence]

    def _lost(self, now_s: float) -> bool:
        faults = self._faults
        silent = any(one.covers(now_s) for one in faults.silences)
        return silent or (faults.loss > 0 and self._random.random() < faults.loss)

    def _spoil(self, one: PodEvidence, now_s: float) -> PodEvidence:
        if self._lost(now_s):
            return PodEvidence(pod=one.pod, problem="no answer in 2.0 s")
        if self._faults.lie is None or not any(window.covers(now_s) for window in self._faults.lie_windows):
            self._kept[one.pod], self._kept_s[one.pod] = one, now_s
            return one
        return self._lie(self._faults.lie, one, now_s)

    def _lie(self, lie: Lie, one: PodEvidence, now_s: float) -> PodEvidence:
        if lie == "stale":
            kept = self._kept.get(one.pod, one)
            return structs.replace(kept, age_s=now_s - self._kept_s.get(one.pod, now_s))
        assert one.evidence is not None  # spoiled last
        if lie == "nan":
            blocked = dict.fromkeys(one.evidence.blocked_by, math.nan)
            return structs.replace(one, evidence=structs.replace(one.evidence, blocked_by=blocked))
        itl = one.evidence.itl
        worse = structs.replace(itl, counts=tuple(-count for count in itl.counts))
        return structs.replace(one, evidence=structs.replace(one.evidence, itl=worse))

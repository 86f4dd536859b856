"""Exact counts of what was over its objective."""

from collections.abc import Sequence

from flyball_protocol import ObjectiveCounts, Objectives, Share
from flyball_runtime.core.window import Slices

TTFT, ITL, GAPS, STEPS = range(0, 8, 2)
"""Places of the numbers of samples; next to each is the number of those that were over."""

SHARE_OVER = 0.05
"""Share of its own gaps that may be over in a request that meets the objective: its 95th percentile decides."""


class ObjectiveCounter:
    """Counts against one pair of objectives over a sliding window; see ``protocol.ObjectiveCounts``.

    Args:
        since_s: when they were posted.
    """

    def __init__(self, objectives: Objectives, since_s: float, window_s: float) -> None:
        self.objectives = objectives
        self.since_s = since_s
        self._slices: Slices[list[int]] = Slices(lambda: [0] * 8, window_s)
        self._longest_gap_s = -1.0  # of the step that goes on

    def first_tokens(self, now: float, waits_s: Sequence[float]) -> None:
        if (most := self.objectives.ttft_s) is not None and waits_s:
            self._count(now, TTFT, len(waits_s), sum(wait > most for wait in waits_s))

    def gaps(self, now: float, gaps_s: Sequence[float], count: int) -> bool:
        """Count ``count`` gaps of each of these lengths; return whether any was over."""
        most = self.objectives.itl_s
        if most is None or not gaps_s:
            return False
        longest = max(gaps_s)
        if longest > self._longest_gap_s:
            self._longest_gap_s = longest
        over = longest > most
        self._count(now, GAPS, len(gaps_s) * count, sum(gap > most for gap in gaps_s) * count if over else 0)
        return over

    def step(self, now: float) -> None:
        """Begin a step: the gaps that were told since the last one are one sample."""
        if self._longest_gap_s >= 0.0 and (most := self.objectives.itl_s) is not None:
            self._count(now, STEPS, 1, self._longest_gap_s > most)
            self._longest_gap_s = -1.0

    def ended(self, now: float, first_token_s: float, num_gaps: int, num_gaps_over: int) -> None:
        """Count a request by the 95th percentile (nearest rank) of its own gaps, if all of them came under these objectives."""
        if self.objectives.itl_s is not None and num_gaps > 0 and first_token_s >= self.since_s:
            self._count(now, ITL, 1, num_gaps_over > int(num_gaps * SHARE_OVER + 1e-9))

    def counts(self, now: float) -> ObjectiveCounts:
        total = [sum(column) for column in zip(*self._slices.live(now), strict=True)] or [0] * 8
        ttft, itl, gaps, steps = (Share(num=total[at], num_over=total[at + 1]) for at in (TTFT, ITL, GAPS, STEPS))
        return ObjectiveCounts(
            objectives=self.objectives, since_s=now - self.since_s, ttft=ttft, itl=itl, gaps=gaps, steps=steps
        )

    def _count(self, now: float, at: int, num: int, num_over: int) -> None:
        current = self._slices.current(now)
        current[at] += num
        current[at + 1] += num_over

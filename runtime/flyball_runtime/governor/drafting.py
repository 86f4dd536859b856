"""What the passes of a draft model cost, beside what the served model computes."""

from collections import deque
from statistics import median
from typing import NamedTuple

KEPT_SHARES = 32
MIN_SHARES = 4
"""Steps with drafts before anything is said about their cost: the first ones are slow."""

FORGET_STEPS = 512
"""After so many steps without drafts, their cost is measured again: other sequences run by then, and what was too dear at
one batch size or beside a busy neighbour may pay."""


class Drafting(NamedTuple):
    """Tokens that a draft model drafts for a step.

    Attributes:
        num_drafted: sequences that get some.
        num_drafts: of all of them together.
        start: tokens that each of them has, in the mean.
    """

    num_drafted: int
    num_drafts: int
    start: int


class DraftingShare:
    """Learns how long a pass of a draft model takes, as a share of a step of the served model that decodes the same sequences.

    So the cost follows batch size, contexts and a change of speed as that model's does. Without a draft model nothing is
    observed, and the share stays 0.
    """

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=KEPT_SHARES)
        self._num_without = 0

    @property
    def share(self) -> float:
        """0.0 as long as it is not known: what is unknown is tried."""
        return median(self._shares) if len(self._shares) >= MIN_SHARES else 0.0

    def observe(self, share: float) -> None:
        self._shares.append(share)
        self._num_without = 0

    def skip(self) -> None:
        """Count a step without drafts."""
        self._num_without += 1
        if self._num_without >= FORGET_STEPS:
            self._shares.clear()

"""What a larger or a smaller KV cache would find of the prompts that come."""

from bisect import bisect_left
from collections.abc import Sequence
from zlib import crc32

from flyball_protocol import HitPoint

SIZES = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
"""Of the sizes that are told, over the size of the pool at most."""

MAX_SAMPLED = 4096
"""Names of blocks that are remembered."""

KEEP = 0.999
"""Weight of a request after the next one: the curve rests on the last 1000 or so."""


class GhostCache:
    """The hit curve of a block cache that evicts the least recently used, for all sizes at once, from stack distances.

    A block is found by a pool that holds more blocks than were used since its last use. Of all names a fixed, random part is
    followed, and distances are scaled by it (SHARDS: Waldspurger et al., FAST 2015), so that memory and time are bounded.
    Uses are told as the pool sees them: a request's blocks from its end to its beginning, so that a prefix is used later
    than what follows it, and never farther away.

    Args:
        num_blocks: most KV blocks that there may be.
        blocks_per_name: KV blocks that a name stands for: one in each group of layers.
    """

    def __init__(self, num_blocks: int, blocks_per_name: int = 1) -> None:
        largest = SIZES[-1] * num_blocks / blocks_per_name
        self._sampled_share = min(1.0, MAX_SAMPLED / max(1.0, largest))
        self._below = int(self._sampled_share * 2**32)
        self._max_stamps = max(1, round(largest * self._sampled_share))
        self._sizes = tuple(max(1, round(size * num_blocks)) for size in SIZES)
        self._blocks_per_sample = blocks_per_name / self._sampled_share
        self._stamps: list[int] = []  # of the last uses, ascending
        self._names: dict[int, bytes] = {}  # by stamp
        self._last_use: dict[bytes, int] = {}
        self._clock = 0
        self._found = [0.0] * len(SIZES)  # names that a pool of a size finds, and the next smaller one does not
        self._looked_up = 0.0
        self._covered = 0.0  # of prompt tokens, those in blocks that could be found
        self._queried = 0.0

    def look_up(self, names: Sequence[bytes], num_prompt_tokens: int, block_size: int) -> None:
        """Take in the prompt of a request when it is first admitted, and use its blocks.

        Args:
            names: of its full blocks; those that cover its last token can not be found.
        """
        num_findable = min(len(names), max(0, num_prompt_tokens - 1) // block_size)
        self._found = [found * KEEP for found in self._found]
        self._looked_up, self._covered, self._queried = (
            one * KEEP + more
            for one, more in (
                (self._looked_up, 0.0),
                (self._covered, num_findable * block_size),
                (self._queried, num_prompt_tokens),
            )
        )
        for name in self._sampled(names[:num_findable]):
            self._looked_up += 1.0
            if (stamp := self._last_use.get(name)) is not None:
                since = len(self._stamps) - bisect_left(self._stamps, stamp)
                if (place := bisect_left(self._sizes, since * self._blocks_per_sample)) < len(SIZES):
                    self._found[place] += 1.0
        self.use(names)

    def use(self, names: Sequence[bytes]) -> None:
        """Take in that blocks were used: a prompt's when it is admitted, and all of a request when it ends."""
        for name in reversed(self._sampled(names)):
            if (stamp := self._last_use.pop(name, None)) is not None:
                del self._stamps[bisect_left(self._stamps, stamp)]
                del self._names[stamp]
            self._clock += 1
            self._stamps.append(self._clock)
            self._names[self._clock] = name
            self._last_use[name] = self._clock
        if (num_old := len(self._stamps) - self._max_stamps) > 0:
            for stamp in self._stamps[:num_old]:
                del self._last_use[self._names.pop(stamp)]
            del self._stamps[:num_old]

    def curve(self) -> tuple[HitPoint, ...]:
        """Return the share of prompt tokens that pools of these sizes would have found; empty before any could be."""
        if self._looked_up == 0.0:
            return ()
        points, found = [], 0.0
        for size, more in zip(self._sizes, self._found, strict=True):
            found += more
            points.append(
                HitPoint(num_blocks=size, share=min(1.0, found / self._looked_up * self._covered / self._queried))
            )
        return tuple(points)

    def _sampled(self, names: Sequence[bytes]) -> Sequence[bytes]:
        if self._sampled_share == 1.0:
            return names
        return [name for name in names if crc32(name) < self._below]

"""Which evicted KV blocks have a copy in host memory, by hash. Hands out slots; the memory lies in engine/."""

from collections.abc import Callable, Iterable, Mapping

from flyball_runtime.kv_cache.block_pool import BlockPool

PrefillS = Callable[[int, int], float | None]
"""Returns the seconds in which tokens ``[start, end)`` of a sequence are computed, None before they are known."""


class HostTier:
    """Slots of host memory, one block each, and the hashes of what they hold; the least recently used is given up first.

    A block is noted when the pool evicts it, and copied at the beginning of the next step, the first that may overwrite it.
    Until then lookups do not find it. Slots are a ``BlockPool`` too: held slots are cached blocks, and those that the step
    being planned reads are in use, so that it does not overwrite them.

    A block is worth a slot if copying it out and in takes less time than computing its tokens. While that is not known, all
    blocks are.

    Args:
        block_copy_s: seconds that copying one block in one direction takes.
        prefill_s: see ``PrefillS``.
    """

    def __init__(
        self, num_slots: int, *, block_copy_s: float = 0.0, prefill_s: PrefillS = lambda start, end: None
    ) -> None:
        self.num_slots = num_slots
        self._slots = BlockPool(num_slots)
        self._block_copy_s = block_copy_s
        self._prefill_s = prefill_s
        self._evicted: dict[bytes, int] = {}  # blocks by hash, least recently used first
        self._moved: dict[int, int] = {}  # to blocks that the step being planned fills, from where
        self._read: list[int] = []

    @property
    def num_held(self) -> int:
        """Slots that hold a block."""
        counts = self._slots.counts()
        return counts.used + counts.cached

    def holds(self, name: bytes) -> bool:
        return bool(self._slots.find((name,)))

    def saves_time(self, num_blocks: int, start: int, end: int) -> bool:
        """Return whether copying so many blocks takes less time than computing tokens ``[start, end)`` of a sequence."""
        prefill_s = self._prefill_s(start, end)
        return prefill_s is None or num_blocks * self._block_copy_s < prefill_s

    def evict(self, block: int, name: bytes) -> None:
        """Note a block that the pool evicts. Its content stays until the next step begins."""
        self._evicted[name] = self._moved.get(block, block)

    def move(self, moved: Mapping[int, int]) -> None:
        """Note that the step being planned copies blocks: their new ids by the old."""
        self._moved |= {new: old for old, new in moved.items()}

    def read(self, name: bytes) -> int:
        """Return the slot of a hash that it holds, for the step being planned to read."""
        slots = self._slots.find((name,))
        self._slots.share(slots)
        self._read += slots
        return slots[0]

    def save(self, num_copies_each: int, block_size: int) -> list[tuple[int, int]]:
        """End a step's plan, and return which blocks it copies out first, each with its slot.

        Args:
            num_copies_each: how many blocks stand for ``block_size`` tokens of a sequence.
        """
        evicted, self._evicted = self._evicted, {}
        self._moved = {}
        new = []
        if evicted and self.saves_time(2 * num_copies_each, 0, block_size):
            self._use(name for name in evicted if self.holds(name))
            new = [name for name in evicted if not self.holds(name)]
        num = min(len(new), self._slots.num_growable)
        names = new[len(new) - num :]
        slots = self._slots.take(num)
        self._slots.register(slots, names)
        self._slots.release(slots)
        self._slots.release(self._read)
        self._read = []
        return [(evicted[name], slot) for name, slot in zip(names, slots, strict=True)]

    def forget(self, names: Iterable[bytes]) -> None:
        """Forget hashes whose content cannot be trusted."""
        for name in names:
            self._evicted.pop(name, None)
            slots = self._slots.find((name,))
            self._slots.share(slots)
            self._slots.forget(slots)
            self._slots.release(slots)

    def lose(self, size: int) -> None:
        """Forget evicted blocks from ``size`` on, whose memory is given back before the next step."""
        self._evicted = {name: block for name, block in self._evicted.items() if block < size}

    def _use(self, names: Iterable[bytes]) -> None:
        slots = [slot for name in names for slot in self._slots.find((name,))]
        self._slots.share(slots)
        self._slots.release(slots)

"""KV blocks by state: free, used, or cached (used by nobody, content still findable)."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from itertools import islice

from flyball_protocol import KVBlocks


class BlockPool:
    """Hands out block ids, counts who uses them and remembers what full blocks hold.

    Every block is in exactly one state. *Free*: no reference and no known content. *Used*: in ``num_refs`` block
    tables. *Cached*: no reference, but registered under a content hash; evicted in least recently released order when
    nothing is free. Sharing, releasing and evicting one block are O(1); the lowest free id is taken first, in O(log n), so
    that the highest ids are the first to be without use.

    ``capacity`` limits used plus cached blocks. Lowering it evicts cached blocks at once. When more are in
    use than the new capacity allows, nothing new may be admitted, but what runs goes on and may grow up to the old
    capacity (the *ceiling*) until enough has been released: lowering drains, it does not throw work away.

    ``size`` says which ids there is memory for: those below it. Raising the capacity raises it at once. It falls to a lower
    capacity when that has drained and the blocks above have been moved down (``move``) or evicted.

    No id is kept back as a null block. Whoever pads a batch (CUDA graphs) allocates one block more in the tensors and
    points the padding at id ``num_blocks``, so that the counts here stay true: free + used + cached == total.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a KV cache needs at least 1 block.")
        self.num_blocks = num_blocks
        self.capacity = num_blocks
        self.size = num_blocks
        self._ceiling = num_blocks
        self._free = list(range(num_blocks))  # a heap
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._num_refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_by_hash: dict[bytes, int] = {}

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_admissible(self) -> int:
        """Blocks that new sequences may take (0 while draining). Cached blocks count: taking one evicts it."""
        return max(0, self.capacity - self.num_used)

    @property
    def num_growable(self) -> int:
        """Blocks that running sequences may still take."""
        return self._ceiling - self.num_used

    @property
    def has_surplus(self) -> bool:
        """Whether there is memory that a lowered capacity, now drained, gives up."""
        return self.size > self.capacity == self._ceiling

    def num_refs(self, block: int) -> int:
        """In how many block tables the block is."""
        return self._num_refs[block]

    def num_used_of(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` somebody uses."""
        num_refs = self._num_refs
        return sum([num_refs[block] > 0 for block in blocks])

    def counts(self) -> KVBlocks:
        num_free, num_cached = len(self._free), len(self._cached)
        return KVBlocks(
            total=self.num_blocks,
            capacity=self.capacity,
            free=num_free,
            used=self.num_blocks - num_free - num_cached,
            cached=num_cached,
        )

    def set_capacity(self, capacity: int) -> None:
        """Limit used plus cached blocks to ``capacity``, at once or, where blocks are in use, as they are released.

        Raises:
            ValueError: ``capacity`` is not in 1..num_blocks.
        """
        if not 1 <= capacity <= self.num_blocks:
            raise ValueError(
                f"capacity is {capacity} blocks; it must be from 1 to {self.num_blocks}, what was allocated."
            )
        self.capacity = capacity
        self.size = max(self.size, capacity)
        self._ceiling = max(self._ceiling, capacity)
        self._settle()

    def take(self, num: int) -> list[int]:
        """Return ``num`` blocks with one reference each and no content. The caller has checked that there is room."""
        assert num <= self.num_growable, f"{num} blocks asked, {self.num_growable} left; the caller did not check"
        num_evicted = min(len(self._cached), max(0, num - self._num_free_in_capacity))
        blocks = self._evict(list(islice(self._cached, num_evicted))) + [
            heappop(self._free) for _ in range(num - num_evicted)
        ]
        for block in blocks:
            self._num_refs[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """Add a reference to a block that is used or cached."""
        if self._num_refs[block] == 0:
            del self._cached[block]
        self._num_refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference from each block, in this order: among those released, the first is evicted first."""
        num_refs = self._num_refs
        for block in blocks:
            num_refs[block] -= 1
            if num_refs[block] > 0:
                continue
            if self._hashes[block] is None:
                heappush(self._free, block)
            else:
                self._cached[block] = None
        self._settle()

    def register(self, blocks: Iterable[int], hashes: Iterable[bytes]) -> None:
        """Make full, used blocks findable, except those whose content another block already stands for.

        The second of two equal blocks, computed side by side, stays private: a running sequence's table never changes
        under the model, and a block that nobody can find returns to the free list on release.
        """
        for block, block_hash in zip(blocks, hashes, strict=True):
            if self._block_by_hash.setdefault(block_hash, block) == block:
                self._hashes[block] = block_hash

    def forget(self, blocks: Iterable[int]) -> None:
        """Make used blocks unfindable. Those that share one keep it; on release it is free."""
        for block in blocks:
            block_hash, self._hashes[block] = self._hashes[block], None
            if block_hash is not None:
                del self._block_by_hash[block_hash]

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks that hold the longest known run of ``hashes`` from the start. Takes no reference."""
        blocks = []
        block_by_hash = self._block_by_hash
        for block_hash in hashes:
            block = block_by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def surplus(self) -> list[int]:
        """Return the used and cached blocks above the capacity, highest first."""
        cached, num_refs = self._cached, self._num_refs
        return [block for block in range(self.size - 1, self.capacity - 1, -1) if num_refs[block] or block in cached]

    def move(self, blocks: Iterable[int]) -> Mapping[int, int]:
        """Give each of some ``surplus()`` blocks a lower id, and return the new one by the old.

        The caller copies what they hold and rewrites the block tables that they are in.
        """
        moved: dict[int, int] = {}
        for block in blocks:
            new = moved[block] = heappop(self._free)  # below the capacity: fewer are used or cached than that
            self._num_refs[new], self._num_refs[block] = self._num_refs[block], 0
            block_hash, self._hashes[block] = self._hashes[block], None
            if block_hash is not None:
                self._hashes[new], self._block_by_hash[block_hash] = block_hash, new
        if any(block in self._cached for block in moved):
            self._cached = OrderedDict((moved.get(block, block), None) for block in self._cached)
        self._free_all(moved)
        return moved

    def trim(self) -> None:
        """Lower the size to the capacity, or as far as nobody uses the top."""
        if not self.has_surplus:
            return
        cached, num_refs = self._cached, self._num_refs
        while self.size > self.capacity and not num_refs[self.size - 1] and self.size - 1 not in cached:
            self.size -= 1

    def evict_surplus(self) -> None:
        """Forget the cached blocks above the capacity, where nobody can copy what they hold."""
        self._free_all(self._evict([block for block in self.surplus() if block in self._cached]))

    @property
    def _num_free_in_capacity(self) -> int:
        """Free blocks that may be taken before a cached one must go."""
        return self.capacity - (self.num_blocks - len(self._free))

    def _evict(self, blocks: list[int]) -> list[int]:
        """Forget cached blocks and return them, in no state yet."""
        cached, hashes, block_by_hash = self._cached, self._hashes, self._block_by_hash
        for block in blocks:
            del cached[block]
            block_hash = hashes[block]
            assert block_hash is not None, f"cached block {block} has no hash"
            del block_by_hash[block_hash]
            hashes[block] = None
        return blocks

    def _free_all(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            heappush(self._free, block)

    def _settle(self) -> None:
        """Evict what the capacity no longer allows; end the drain once what is in use fits."""
        if self._num_free_in_capacity < 0:
            self._free_all(self._evict(list(islice(self._cached, -self._num_free_in_capacity))))
        if self.num_used <= self.capacity:
            self._ceiling = self.capacity
        if self.size > self.capacity:
            self.trim()

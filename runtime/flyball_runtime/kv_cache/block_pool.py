"""KV blocks by state: free, used, or cached (used by nobody, content still findable)."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from flyball_protocol import KVBlocks


class BlockPool:
    """Hands out block ids ``0..num_blocks-1``, counts who uses them and remembers what full blocks hold.

    Every block is in exactly one state. *Free*: no reference and no known content. *Used*: in ``num_refs`` block
    tables. *Cached*: no reference, but registered under a content hash; evicted in least recently released order when
    nothing is free. Taking, sharing, releasing and evicting one block are O(1).

    ``capacity`` is a soft limit on used plus cached blocks. Lowering it evicts cached blocks at once. When more are in
    use than the new capacity allows, nothing new may be admitted, but what runs goes on and may grow up to the old
    capacity (the *ceiling*) until enough has been released: lowering drains, it does not throw work away.

    No id is kept back as a null block. Whoever pads a batch (CUDA graphs) allocates one block more in the tensors and
    points the padding at id ``num_blocks``, so that the counts here stay true: free + used + cached == total.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a KV cache needs at least 1 block.")
        self.num_blocks = num_blocks
        self.capacity = num_blocks
        self._ceiling = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack; its top, the block released last, is the warmest
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
        self._ceiling = max(self._ceiling, capacity)
        self._settle()

    def take(self, num: int) -> list[int]:
        """Return ``num`` blocks with one reference each and no content. The caller has checked that there is room."""
        assert num <= self.num_growable, f"{num} blocks asked, {self.num_growable} left; the caller did not check"
        num_evicted = min(len(self._cached), max(0, num - self._num_free_in_capacity))
        blocks = self._evict(num_evicted) + [self._free.pop() for _ in range(num - num_evicted)]
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
                self._free.append(block)
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

    @property
    def _num_free_in_capacity(self) -> int:
        """Free blocks that may be taken before a cached one must go."""
        return self.capacity - (self.num_blocks - len(self._free))

    def _evict(self, num: int) -> list[int]:
        """Forget the ``num`` least recently released cached blocks and return them, in no state yet."""
        cached, hashes, block_by_hash = self._cached, self._hashes, self._block_by_hash
        blocks = list(islice(cached, num))
        for block in blocks:
            del cached[block]
            block_hash = hashes[block]
            assert block_hash is not None, f"cached block {block} has no hash"
            del block_by_hash[block_hash]
            hashes[block] = None
        return blocks

    def _settle(self) -> None:
        """Evict what the capacity no longer allows; end the drain once what is in use fits."""
        if self._num_free_in_capacity < 0:
            self._free += self._evict(min(len(self._cached), -self._num_free_in_capacity))
        if self.num_used <= self.capacity:
            self._ceiling = self.capacity

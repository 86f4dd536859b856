"""KV blocks by state: free, used, or cached (used by nobody, content still findable)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heappop, heappush
from math import inf

from flyball_protocol import KVBlocks

NUM_SHARDS = 256
"""Parts of the index from hashes to blocks. A dict whose keys come and go rebuilds itself time and again; as one dict of
40,000 blocks it would take more than a millisecond for that, in the middle of a step."""


class BlockList:
    """Blocks in an order, linked through two arrays: whatever changes costs the same time for each block, always."""

    def __init__(self, num_blocks: int) -> None:
        self._end = num_blocks  # stands before the first and after the last
        self._next = [num_blocks] * (num_blocks + 1)
        self._previous = [num_blocks] * (num_blocks + 1)
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[int]:
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]

    def append(self, blocks: list[int]) -> None:
        after, before, end = self._next, self._previous, self._end
        last = before[end]
        for block in blocks:
            after[last] = block
            before[block] = last
            last = block
        after[last], before[end] = end, last
        self._num += len(blocks)

    def take_first(self, num: int) -> list[int]:
        """Take out the first ``num``, or all when there are no more."""
        after, block = self._next, self._end
        blocks = [block := after[block] for _ in range(min(num, self._num))]
        self._link(self._end, after[block])
        self._num -= len(blocks)
        return blocks

    def remove(self, block: int) -> None:
        self._link(self._previous[block], self._next[block])
        self._num -= 1

    def replace(self, block: int, new: int) -> None:
        """Put another one in the place of a block."""
        before, after = self._previous[block], self._next[block]
        self._link(before, new)
        self._link(new, after)

    def _link(self, first: int, second: int) -> None:
        self._next[first], self._previous[second] = second, first


class BlockPool:
    """Hands out block ids, counts who uses them and remembers what full blocks hold.

    Every block is in exactly one state. *Free*: no reference and no known content. *Used*: in ``num_refs`` block
    tables. *Cached*: no reference, but registered under a content hash; evicted in least recently released order when
    nothing is free. Sharing, releasing and evicting one block are O(1); the lowest free id is taken first, in O(log n), so
    that the highest ids are the first to be without use.

    ``capacity`` limits used plus cached blocks. Lowering it evicts cached blocks at once. When more are in
    use than the new capacity allows, nothing new may be admitted, but what runs goes on and may grow up to the old
    capacity (the *ceiling*) until enough has been released: lowering drains, it does not throw work away. A drain that goes
    on past its deadline is overdue; the scheduler then preempts what it takes to end it.

    ``size`` says which ids there is memory for: those below it. Raising the capacity raises it at once. It falls to a lower
    capacity when that has drained and the blocks above have been moved down (``move``) or evicted.

    No id is kept back as a null block. Whoever pads a batch (CUDA graphs) allocates one block more in the tensors and
    points the padding at id ``num_blocks``, so that the counts here stay true: free + used + cached == total.

    Args:
        on_evict: called with each block that is evicted, and its hash.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int, bytes], None] | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a KV cache needs at least 1 block.")
        self.num_blocks = num_blocks
        self.capacity = num_blocks
        self.size = num_blocks
        self._on_evict = on_evict
        self._ceiling = num_blocks
        self._deadline_s = inf
        self._free = list(range(num_blocks))  # a heap
        self._cached = BlockList(num_blocks)  # least recently released first
        self._num_refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_by_hash: list[dict[bytes, int]] = [{} for _ in range(NUM_SHARDS)]  # by the hash's first byte

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
    def is_settled(self) -> bool:
        """Whether no more blocks are in use than the capacity allows, and there is memory for no more than that."""
        return self.size == self.capacity == self._ceiling

    @property
    def has_surplus(self) -> bool:
        """Whether there is memory that a lowered capacity, now drained, gives up."""
        return self.size > self.capacity == self._ceiling

    def num_refs(self, block: int) -> int:
        """In how many block tables the block is."""
        return self._num_refs[block]

    def num_unused_of(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` nobody uses."""
        num_refs = self._num_refs
        return sum([num_refs[block] == 0 for block in blocks])

    def counts(self) -> KVBlocks:
        num_free, num_cached = len(self._free), len(self._cached)
        return KVBlocks(
            total=self.num_blocks,
            capacity=self.capacity,
            free=num_free,
            used=self.num_blocks - num_free - num_cached,
            cached=num_cached,
        )

    @property
    def drains(self) -> bool:
        """Whether more blocks are in use than a lowered capacity allows."""
        return self.num_used > self.capacity

    def is_overdue(self, now_s: float) -> bool:
        """Whether a drain has gone on past its deadline."""
        return now_s >= self._deadline_s and self.drains

    def resize(self, capacity: int, deadline_s: float = inf) -> None:
        """Limit used plus cached blocks to ``capacity``, at once or, where blocks are in use, as they are released.

        Args:
            deadline_s: when a drain to this capacity is overdue, by the clock of ``is_overdue``.

        Raises:
            ValueError: ``capacity`` is not in 1..num_blocks.
        """
        if not 1 <= capacity <= self.num_blocks:
            raise ValueError(
                f"capacity is {capacity} blocks; it must be from 1 to {self.num_blocks}, what was allocated."
            )
        self.capacity = capacity
        self._deadline_s = deadline_s
        self.size = max(self.size, capacity)
        self._ceiling = max(self._ceiling, capacity)
        self._settle()

    def take(self, num: int) -> list[int]:
        """Return ``num`` blocks with one reference each and no content. The caller has checked that there is room."""
        assert num <= self.num_growable, f"{num} blocks asked, {self.num_growable} left; the caller did not check"
        free, num_refs = self._free, self._num_refs
        num_evicted = num - self._num_free_in_capacity
        blocks = self._evict(num_evicted) if num_evicted > 0 else []
        blocks += [heappop(free) for _ in range(num - len(blocks))]
        for block in blocks:
            num_refs[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of some blocks that are used or cached."""
        num_refs = self._num_refs
        for block in blocks:
            if num_refs[block] == 0:
                self._cached.remove(block)
            num_refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference from each block, in this order: among those released, the first is evicted first."""
        num_refs, hashes = self._num_refs, self._hashes
        cached = []
        for block in blocks:
            num = num_refs[block] = num_refs[block] - 1
            if num == 0:
                if hashes[block] is None:
                    heappush(self._free, block)
                else:
                    cached.append(block)
        self._cached.append(cached)
        self._settle()

    def register(self, blocks: Iterable[int], hashes: Iterable[bytes]) -> None:
        """Make full, used blocks findable, except those whose content another block already stands for.

        The second of two equal blocks, computed side by side, stays private: a running sequence's table never changes
        under the model, and a block that nobody can find returns to the free list on release.
        """
        known, shards = self._hashes, self._block_by_hash
        for block, block_hash in zip(blocks, hashes, strict=True):
            if shards[block_hash[0]].setdefault(block_hash, block) == block:
                known[block] = block_hash

    def forget(self, blocks: Iterable[int]) -> None:
        """Make used blocks unfindable. Those that share one keep it; on release it is free."""
        for block in blocks:
            block_hash, self._hashes[block] = self._hashes[block], None
            if block_hash is not None:
                del self._block_by_hash[block_hash[0]][block_hash]

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks that hold the longest known run of ``hashes`` from the start. Takes no reference."""
        blocks = []
        shards = self._block_by_hash
        for block_hash in hashes:
            block = shards[block_hash[0]].get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def surplus(self) -> list[int]:
        """Return the used and cached blocks above the capacity, highest first."""
        return [block for block in range(self.size - 1, self.capacity - 1, -1) if not self._is_free(block)]

    def move(self, blocks: Iterable[int]) -> Mapping[int, int]:
        """Give each of some ``surplus()`` blocks a lower id, and return the new one by the old.

        The caller copies what they hold and rewrites the block tables that they are in.
        """
        moved: dict[int, int] = {}
        for block in blocks:
            new = moved[block] = heappop(self._free)  # below the capacity: fewer are used or cached than that
            if self._is_cached(block):
                self._cached.replace(block, new)
            self._num_refs[new], self._num_refs[block] = self._num_refs[block], 0
            block_hash, self._hashes[block] = self._hashes[block], None
            if block_hash is not None:
                self._hashes[new], self._block_by_hash[block_hash[0]][block_hash] = block_hash, new
        self._free_all(moved)
        return moved

    def trim(self) -> None:
        """Lower the size to the capacity, or as far as nobody uses the top."""
        if not self.has_surplus:
            return
        while self.size > self.capacity and self._is_free(self.size - 1):
            self.size -= 1

    def evict_surplus(self) -> None:
        """Forget the cached blocks above the capacity, where nobody can copy what they hold."""
        cached = [block for block in self.surplus() if self._is_cached(block)]
        for block in cached:
            self._cached.remove(block)
        self._clear(cached)
        self._free_all(cached)

    @property
    def _num_free_in_capacity(self) -> int:
        """Free blocks that may be taken before a cached one must go."""
        return self.capacity - (self.num_blocks - len(self._free))

    def _is_free(self, block: int) -> bool:
        return self._num_refs[block] == 0 and self._hashes[block] is None

    def _is_cached(self, block: int) -> bool:
        return self._num_refs[block] == 0 and self._hashes[block] is not None

    def _evict(self, num: int) -> list[int]:
        """Forget as many cached blocks, or all when there are no more, and return them, in no state yet."""
        blocks = self._cached.take_first(num)
        self._clear(blocks)
        return blocks

    def _clear(self, blocks: list[int]) -> None:
        """Forget what hashed blocks hold."""
        hashes, shards = self._hashes, self._block_by_hash
        for block in blocks:
            block_hash = hashes[block]
            assert block_hash is not None, f"block {block} has no hash"
            del shards[block_hash[0]][block_hash]
            hashes[block] = None
            if self._on_evict is not None:
                self._on_evict(block, block_hash)

    def _free_all(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            heappush(self._free, block)

    def _settle(self) -> None:
        """Evict what the capacity no longer allows; end the drain once what is in use fits."""
        if self._num_free_in_capacity < 0:
            self._free_all(self._evict(-self._num_free_in_capacity))
        if self.num_used <= self.capacity:
            self._ceiling = self.capacity
        if self.size > self.capacity:
            self.trim()

"""Block tables of sequences, over one block pool."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

from flyball_protocol import KVBlocks
from flyball_runtime.core.sequence import Sequence
from flyball_runtime.kv_cache.block_hash import extend_block_hashes
from flyball_runtime.kv_cache.block_pool import BlockPool


class PrefixMatch(NamedTuple):
    """What the prefix cache holds of a sequence; valid until the cache changes.

    Attributes:
        blocks: ids of the blocks that hold its first ``num_tokens`` tokens.
        num_blocks_needed: blocks that admission would turn from free or cached into used.
    """

    blocks: list[int]
    num_tokens: int
    num_blocks_needed: int


class TableEntry(NamedTuple):
    """An entry of a sequence's block table."""

    seq: Sequence
    at: int


class KVCache:
    """Which blocks hold which tokens of which sequence.

    Only full blocks are shared, and only after the step that computed them was committed. A sequence gets the blocks of
    all its tokens when it is admitted and one more each time its output crosses a block edge, so prompts never compete
    half-way. While a sequence runs its block table only grows.

    The owner of the tensors computes addresses from ids: ``slot = block_id * block_size + offset``.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, enable_prefix_caching: bool = True) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; a KV block needs at least 1 token. 16 is usual.")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)

    @property
    def capacity(self) -> int:
        return self._pool.capacity

    @property
    def num_used_blocks(self) -> int:
        return self._pool.num_used

    @property
    def num_growable_blocks(self) -> int:
        """Blocks that running sequences may still take."""
        return self._pool.num_growable

    def counts(self) -> KVBlocks:
        return self._pool.counts()

    def num_refs(self, block: int) -> int:
        """In how many block tables the block is."""
        return self._pool.num_refs(block)

    def set_capacity(self, num_blocks: int) -> None:
        """Limit used plus cached blocks; see BlockPool. Raises ValueError outside 1..num_blocks."""
        self._pool.set_capacity(num_blocks)

    @property
    def size(self) -> int:
        """There has to be memory for the block ids below it, from the next plan on."""
        return self._pool.size

    @property
    def has_surplus(self) -> bool:
        """Whether ``compact`` can give memory back."""
        return self._pool.has_surplus

    def compact(self, sequences: Iterable[Sequence], max_moves: int) -> tuple[Mapping[int, int], list[TableEntry]]:
        """Move blocks down from the ids that a lowered capacity gives up, and lower ``size`` as far as that frees the top.

        Args:
            sequences: all that run. A block that others hold too (see ``detach``) stays.
            max_moves: most blocks to move now.
        Returns:
            The new id of each moved block, whose content the caller copies before anybody reads it; and the changed
            entries of block tables.
        """
        lowest = self._pool.capacity
        holders: dict[int, list[TableEntry]] = {}
        for seq in sequences:
            for index, block in enumerate(seq.block_table):
                if block >= lowest:
                    holders.setdefault(block, []).append(TableEntry(seq, index))
        movable = (one for one in self._pool.surplus() if self._pool.num_refs(one) == len(holders.get(one, ())))
        moved = self._pool.move(islice(movable, max_moves))
        entries = [entry for block in moved for entry in holders.get(block, ())]
        for seq, at in entries:
            seq.block_table[at] = moved[seq.block_table[at]]
        self._pool.trim()
        return moved, entries

    def evict_surplus(self) -> None:
        """Lower ``size`` at the cost of what is cached above it; for when there is no step to copy it in."""
        self._pool.evict_surplus()
        self._pool.trim()

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def match_prefix(self, seq: Sequence) -> PrefixMatch:
        """Look a waiting sequence up. Its last token is never matched: it must be computed, to get logits."""
        num_tokens = len(seq.token_ids)
        blocks: list[int] = []
        if self.enable_prefix_caching:
            self._hash_blocks(seq, num_tokens // self.block_size)
            blocks = self._pool.find(seq.block_hashes[: (num_tokens - 1) // self.block_size])
        num_needed = self.num_blocks_for(num_tokens) - self._pool.num_used_of(blocks)
        return PrefixMatch(blocks, len(blocks) * self.block_size, num_needed)

    def can_admit(self, match: PrefixMatch) -> bool:
        return match.num_blocks_needed <= self._pool.num_admissible

    def still_blocked(self, seq: Sequence, match: PrefixMatch) -> bool:
        """Tell without a look-up whether a waiting sequence cannot be admitted; False if only a look-up can tell.

        Args:
            match: of an earlier look-up. The cache holds more of the sequence now only if it holds the next block.
        """
        num_matched = len(match.blocks)
        next_hash = seq.block_hashes[num_matched : num_matched + 1]
        if self.enable_prefix_caching and self._pool.find(next_hash):
            return False
        return self.num_blocks_for(len(seq.token_ids)) - num_matched > self._pool.num_admissible

    def admit(self, seq: Sequence, match: PrefixMatch) -> None:
        """Give a waiting sequence blocks for all its tokens. ``match`` is fresh and ``can_admit`` said yes."""
        for block in match.blocks:  # before anything is taken, which might evict them
            self._pool.share(block)
        num_new = self.num_blocks_for(len(seq.token_ids)) - len(match.blocks)
        seq.block_table = match.blocks + self._pool.take(num_new)
        seq.num_computed_tokens = match.num_tokens

    def grow(self, sequences: list[Sequence]) -> None:
        """Append one block to each running sequence. The caller has checked ``num_growable_blocks``."""
        for seq, block in zip(sequences, self._pool.take(len(sequences)), strict=True):
            seq.block_table.append(block)

    def register(self, seq: Sequence, start: int, end: int) -> None:
        """Make the blocks findable that tokens ``[start, end)``, just computed, have filled."""
        first, last = start // self.block_size, end // self.block_size
        if first == last or not self.enable_prefix_caching:
            return
        self._hash_blocks(seq, last)
        self._pool.register(seq.block_table[first:last], seq.block_hashes[first:last])

    def forget(self, seq: Sequence) -> None:
        """Make the sequence's blocks unfindable; its content is no longer shared, and is free once released."""
        self._pool.forget(seq.block_table)

    def detach(self, seq: Sequence) -> list[int]:
        """Take a sequence's blocks away and return them, still in use: ``release`` ends that."""
        blocks, seq.block_table = seq.block_table, []
        seq.num_computed_tokens = 0
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Give the blocks of a sequence back, tail first: a prefix is then evicted from its end, and its head, which more
        sequences share, last."""
        self._pool.release(reversed(blocks))

    def _hash_blocks(self, seq: Sequence, num_blocks: int) -> None:
        extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size, num_blocks, seq.cache_salt)

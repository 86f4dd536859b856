"""Block tables of sequences over one block pool, and the names of full blocks."""

from array import array
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from itertools import islice
from math import inf
from typing import NamedTuple

import numpy as np

from flyball_protocol import KVBlocks
from flyball_runtime.core.kv_layout import most_blocks
from flyball_runtime.core.request import Sequence
from flyball_runtime.kv_cache.block_pool import BlockPool
from flyball_runtime.kv_cache.host_tier import HostTier

_ROOT = b""
"""Hash before the first block of a prompt without a salt."""

_SALT = b"cache_salt"
"""BLAKE2b's personalization for salts: no block of tokens, whatever its bytes, hashes to what a salt does."""

_ADAPTER = b"adapter"
"""The same for adapters."""

_TOKEN_BYTES = array("I").itemsize


def hash_prompt(
    token_ids: list[int], block_size: int, salt: str | None = None, adapter: int | None = None
) -> list[bytes]:
    """The names of all full blocks of a prompt."""
    hashes: list[bytes] = []
    extend_block_hashes(hashes, array("I", token_ids), block_size, len(token_ids) // block_size, salt, adapter)
    return hashes


def extend_block_hashes(
    hashes: list[bytes],
    token_ids: "array[int]",
    block_size: int,
    num_blocks: int,
    salt: str | None = None,
    adapter: int | None = None,
) -> None:
    """Append to ``hashes`` until it names the first ``num_blocks`` full blocks of ``token_ids``, an array of ``"I"``.

    A block's K and V depend on every token before it, so its hash covers the previous block's hash and its own tokens:
    equal hashes mean equal whole prefixes. The hash is cryptographic (BLAKE2b, whole) because clients choose the
    tokens: a collision would serve one client's context to another, and a fast hash lets a client construct one. It
    costs well under a microsecond per block. Tokens enter as fixed-width integers, so no two lists read the same.

    Whatever else K and V are kept apart by enters before the first block: the request's ``cache_salt`` and the number of its
    adapter, so that prompts with different ones, or with one and without, have no name in common.
    """
    done = len(hashes)
    if done >= num_blocks:
        return
    packed = token_ids[done * block_size : num_blocks * block_size].tobytes()
    previous = hashes[-1] if hashes else _root(salt, adapter)
    stride = block_size * _TOKEN_BYTES
    for offset in range(0, len(packed), stride):
        previous = blake2b(previous + packed[offset : offset + stride]).digest()
        hashes.append(previous)


def _root(salt: str | None, adapter: int | None) -> bytes:
    root = _ROOT if salt is None else blake2b(salt.encode(), person=_SALT).digest()
    return root if adapter is None else blake2b(root + adapter.to_bytes(8, "big"), person=_ADAPTER).digest()


class PrefixMatch(NamedTuple):
    """What the prefix cache holds of a sequence; valid until the cache changes.

    Attributes:
        num_tokens: how many of its first tokens need not be computed.
        tables: for each group, the blocks that hold them, with HOLE for those behind the group's window, and None for those
            whose content is in host memory.
        num_holes: how many those are, by group.
        num_new: how many more blocks admission gives it, by group.
        num_blocks_needed: blocks that admission would turn from free or cached into used.
        partial: for each group, the block that holds the last of them, if it has room for more. The sequence gets a copy
            of it, in its first new block.
        is_fork: whether a running sequence of the same fork group has them, and not the prefix cache.
        num_host_tokens: how many of them are found only because of host memory.
    """

    num_tokens: int
    tables: list[list[int | None]]
    num_holes: list[int]
    num_new: list[int]
    num_blocks_needed: int
    partial: tuple[int, ...] = ()
    is_fork: bool = False
    num_host_tokens: int = 0


class TableTail(NamedTuple):
    """What was appended to a sequence's block table of a group, from entry ``at`` on."""

    group: int
    at: int
    blocks: list[int]


class TableEntry(NamedTuple):
    """An entry of a sequence's block table of a group."""

    seq: Sequence
    group: int
    at: int


Computed = tuple[Sequence, int, int]
"""A sequence and the positions ``[start, end)`` of some of its tokens."""

HOLE = 0
"""Stands in a block table for a block that nothing reads any more."""


class KVCache:
    """Which blocks hold which tokens of which sequence.

    Only full blocks are shared: with any sequence after the step that computed them was committed, with a fork of the same
    request as soon as that step is planned. A sequence gets the blocks of all its tokens when it is admitted and one more, in
    each group of layers, each time its output crosses a block edge, so prompts never compete half-way. What lies behind a
    group's window is given back as the sequence goes on.

    With a host tier, lookups go on where the pool has lost a block and host memory has it. Such blocks are taken in the pool,
    and copied back at the beginning of the step.

    The owner of the tensors computes addresses from ids: ``slot = block_id * block_size + offset``.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        windows: tuple[int | None, ...] = (None,),
        host: HostTier | None = None,
    ) -> None:
        """Start empty.

        Args:
            windows: of each group of layers, in tokens; None sees all (see ``core/kv_layout.py``).
            host: keeps evicted blocks; None: they are lost.
        """
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; a KV block needs at least 1 token. 16 is usual.")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_groups = len(windows)
        self.windows = windows
        self._sliding = [(group, window) for group, window in enumerate(windows) if window is not None]
        self._host = host
        self._pool = BlockPool(num_blocks, None if host is None else host.evict)

    @property
    def slides(self) -> bool:
        """Whether some group has a window."""
        return bool(self._sliding)

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

    @property
    def host_usage(self) -> float:
        """Share of the host tier's slots that hold a block; 0.0 without a tier."""
        return 0.0 if self._host is None else self._host.num_held / self._host.num_slots

    def num_refs(self, block: int) -> int:
        """In how many block tables the block is."""
        return self._pool.num_refs(block)

    @property
    def drains(self) -> bool:
        """Whether more blocks are in use than a lowered capacity allows."""
        return self._pool.drains

    def is_overdue(self, now_s: float) -> bool:
        """Whether a drain has gone on past its deadline."""
        return self._pool.is_overdue(now_s)

    def resize(self, num_blocks: int, deadline_s: float = inf) -> None:
        """Limit used plus cached blocks; see BlockPool. Raises ValueError outside 1..num_blocks."""
        self._pool.resize(num_blocks, deadline_s)

    @property
    def size(self) -> int:
        """There has to be memory for the block ids below it, from the next plan on."""
        return self._pool.size

    @property
    def is_settled(self) -> bool:
        """Whether what is in use fits the capacity, and there is memory for no more than that."""
        return self._pool.is_settled

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
            for group, table in enumerate(seq.block_tables):
                for at, block in enumerate(table):
                    if block >= lowest:  # a HOLE never is
                        holders.setdefault(block, []).append(TableEntry(seq, group, at))
        movable = (one for one in self._pool.surplus() if self._pool.num_refs(one) == len(holders.get(one, ())))
        moved = self._pool.move(islice(movable, max_moves))
        if self._host is not None:
            self._host.move(moved)
        entries = [entry for block in moved for entry in holders.get(block, ())]
        for seq, group, at in entries:
            table = seq.block_tables[group]
            table[at] = moved[table[at]]
        self._pool.trim()
        return moved, entries

    def evict_surplus(self) -> None:
        """Lower ``size`` at the cost of what is cached above it; for when there is no step to copy it in."""
        self._pool.evict_surplus()
        self._pool.trim()

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold ``num_tokens`` tokens, all groups together."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def match_prefix(self, seq: Sequence, num_step_tokens: int | None = None) -> PrefixMatch:
        """Look a waiting sequence up. Tokens whose logits are wanted, like the last, are never matched.

        Args:
            num_step_tokens: most tokens of it that a step computes. Groups with a window then need no blocks for the rest.
        """
        num_tokens = len(seq.token_ids)
        tables: list[list[int | None]] = [[] for _ in self.windows]
        num_host_blocks = 0
        if self.enable_prefix_caching:
            self._hash_blocks(seq, num_tokens // self.block_size)
            hashes = seq.block_hashes[: seq.num_reusable_tokens // self.block_size]
            tables = self._find(hashes)
            if self._host is not None and len(tables[0]) < len(hashes):
                num_pool_blocks, tables = len(tables[0]), self._find_on_host(hashes, tables, self._host)
                num_host_blocks = len(tables[0]) - num_pool_blocks
        match = self._match(num_tokens, num_step_tokens, len(tables[0]) * self.block_size, tables)
        return match._replace(num_host_tokens=num_host_blocks * self.block_size) if num_host_blocks else match

    def match_fork(self, seq: Sequence, source: Sequence, num_step_tokens: int | None = None) -> PrefixMatch | None:
        """Return what a running sequence has computed of a waiting one's tokens; None if it lacks what a window needs.

        The match need not end with a block. ``num_step_tokens`` and tokens that are never matched: as in ``match_prefix``.
        """
        num_matched = min(_num_common(seq, source), source.num_computed_tokens, seq.num_reusable_tokens)
        num_holes = [self._first_needed(window, num_matched) for window in self.windows]
        if any(freed > num for freed, num in zip(source.num_freed_blocks, num_holes, strict=True)):
            return None
        num_full, rest = divmod(num_matched, self.block_size)
        tables: list[list[int | None]] = [
            [*([HOLE] * num), *table[num:num_full]] for table, num in zip(source.block_tables, num_holes, strict=True)
        ]
        partial = tuple(table[num_full] for table in source.block_tables) if rest else ()
        match = self._match(len(seq.token_ids), num_step_tokens, num_matched, tables)
        return match._replace(partial=partial, is_fork=True)

    def _match(
        self, num_tokens: int, num_step_tokens: int | None, num_matched: int, tables: list[list[int | None]]
    ) -> PrefixMatch:
        num_blocks, most = -(-num_tokens // self.block_size), num_tokens if num_step_tokens is None else num_step_tokens
        num_holes, num_new, num_needed = [], [], 0
        for window, table in zip(self.windows, tables, strict=True):
            num_behind = self._first_needed(window, num_matched)
            end = min(num_blocks, num_behind + most_blocks(window, num_tokens, most, self.block_size))
            num_holes.append(num_behind)
            num_new.append(end - len(table))
            num_needed += end - len(table) + table.count(None) + self._pool.num_unused_of(_known(table[num_behind:]))
        return PrefixMatch(num_matched, tables, num_holes, num_new, num_needed)

    def can_join(self, match: PrefixMatch) -> bool:
        """Whether there are blocks for a sequence that continues what runs already."""
        return match.num_blocks_needed <= self._pool.num_growable

    def can_admit(self, match: PrefixMatch, num_reserved: int = 0) -> bool:
        """Whether a sequence can be admitted so that as many blocks are left."""
        return match.num_blocks_needed + num_reserved <= self._pool.num_admissible

    def still_blocked(self, seq: Sequence, match: PrefixMatch) -> bool:
        """Tell without a look-up whether a waiting sequence cannot be admitted; False if only a look-up can tell.

        Args:
            match: of an earlier look-up. The cache holds more of the sequence now only if it holds the next block.
        """
        if self._sliding:
            return False  # it may find less of a window, and more behind it
        num_matched = match.num_tokens // self.block_size
        next_hash = seq.block_hashes[num_matched : num_matched + 1]
        if self.enable_prefix_caching and next_hash and self._run(next_hash, self._host):
            return False
        return self.num_blocks_for(len(seq.token_ids)) - num_matched > self._pool.num_admissible

    def admit(self, seq: Sequence, match: PrefixMatch) -> list[tuple[int, int]]:
        """Give a waiting sequence the blocks of its match and new ones behind them. ``can_admit`` has just said yes.

        Returns:
            Pairs of blocks: the content of the first is to be copied into the second before the sequence runs.
        """
        for table, num_holes in zip(match.tables, match.num_holes, strict=True):
            self._pool.share(_known(table[num_holes:]))  # before anything is taken, which might evict them
        seq.block_tables = [
            self._filled(table) + self._pool.take(num) for table, num in zip(match.tables, match.num_new, strict=True)
        ]
        seq.num_freed_blocks = match.num_holes.copy()
        seq.num_computed_tokens = match.num_tokens
        seq.num_uncomputed_tokens = len(seq.token_ids) - match.num_tokens
        num_full = match.num_tokens // self.block_size
        return [(source, table[num_full]) for source, table in zip(match.partial, seq.block_tables, strict=False)]

    def swap_in(self, seq: Sequence, match: PrefixMatch) -> list[tuple[int, int]]:
        """Make the blocks findable that a sequence just admitted has got for content in host memory.

        Returns:
            Each of them, with the slot that is to be copied into it before the sequence runs.
        """
        if self._host is None:
            return []
        blocks, names = [], []
        for group, (table, own) in enumerate(zip(match.tables, seq.block_tables, strict=True)):
            absent = [at for at, block in enumerate(table) if block is None]
            blocks += [own[at] for at in absent]
            names += _names([seq.block_hashes[at] for at in absent], group)
        self._pool.register(blocks, names)
        return [(block, self._host.read(name)) for block, name in zip(blocks, names, strict=True)]

    def swap_out(self) -> list[tuple[int, int]]:
        """End a step's plan, and return evicted blocks, each with the slot into which it is to be copied before the step."""
        return [] if self._host is None else self._host.save(self.num_groups, self.block_size)

    def lose_memory(self) -> None:
        """Take note that there is only as much memory as ``size`` says, before the next plan."""
        if self._host is not None:
            self._host.lose(self.size)

    def branch(self, seq: Sequence, source: Sequence) -> list[tuple[int, int]]:
        """Have a running sequence go on from the tokens of another one; both have computed equally many.

        It shares the full blocks of the other one, and keeps its own for the rest.

        Returns:
            As ``admit``.
        """
        num_full, rest = divmod(source.num_computed_tokens, self.block_size)
        copies = []
        for group, theirs in enumerate(source.block_tables):
            own = seq.block_tables[group]
            self._pool.share(theirs[source.num_freed_blocks[group] : num_full])
            self._pool.release(reversed(own[seq.num_freed_blocks[group] : num_full]))
            own[:num_full] = theirs[:num_full]
            if rest:
                copies.append((theirs[num_full], own[num_full]))
        seq.num_freed_blocks = source.num_freed_blocks.copy()
        seq.block_hashes = source.block_hashes.copy()
        return copies

    def grow(self, sequences: list[Sequence]) -> None:
        """Append one block per group to each running sequence. The caller has checked ``num_growable_blocks``."""
        blocks = iter(self._pool.take(len(sequences) * self.num_groups))
        for seq in sequences:
            for table in seq.block_tables:
                table.append(next(blocks))

    def num_coverable(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many of a running sequence's first tokens, ``num_tokens`` at most, have blocks or can be given some."""
        lens = [len(seq.block_tables[group]) for group, _ in self._sliding]
        num_blocks, num_free = -(-num_tokens // self.block_size), self.num_growable_blocks
        while sum(num_blocks - num for num in lens if num < num_blocks) > num_free:
            num_blocks -= 1
        return min(num_tokens, num_blocks * self.block_size)

    def cover(self, seq: Sequence, num_tokens: int) -> list[TableTail]:
        """Give a running sequence blocks for its first ``num_tokens`` tokens in the groups that have a window."""
        num_blocks, tails = -(-num_tokens // self.block_size), []
        for group, _ in self._sliding:
            table = seq.block_tables[group]
            if len(table) < num_blocks:
                tails.append(TableTail(group, len(table), self._pool.take(num_blocks - len(table))))
                table += tails[-1].blocks
        return tails

    def register(self, computed: Iterable[Computed]) -> None:
        """Make the blocks findable that the tokens ``[start, end)`` of running sequences, just computed, have filled."""
        if not self.enable_prefix_caching:
            return
        blocks: list[int] = []
        names: list[bytes] = []
        for seq, start, end in computed:
            first, last = start // self.block_size, end // self.block_size
            if len(seq.block_hashes) < last:
                self._hash_blocks(seq, last)
            for group, table in enumerate(seq.block_tables):
                begin = max(first, seq.num_freed_blocks[group])
                blocks += table[begin:last]
                names += _names(seq.block_hashes[begin:last], group)
        self._pool.register(blocks, names)

    def slide(self, seq: Sequence, num_tokens: int) -> None:
        """Give back what lies behind the windows of a sequence whose first ``num_tokens`` tokens are computed and committed."""
        for group, window in self._sliding:
            freed, needed = seq.num_freed_blocks[group], self._first_needed(window, num_tokens)
            if needed > freed:
                table = seq.block_tables[group]
                self._pool.release(table[freed:needed])
                table[freed:needed] = [HOLE] * (needed - freed)
                seq.num_freed_blocks[group] = needed

    def forget(self, seq: Sequence) -> None:
        """Make the sequence's blocks unfindable; its content is no longer shared, and is free once released."""
        self._pool.forget(self._blocks_of(seq))
        if self._host is not None:
            for group in range(self.num_groups):
                self._host.forget(_names(seq.block_hashes, group))

    def detach(self, seq: Sequence) -> list[int]:
        """Take a sequence's blocks away and return them, still in use: ``release`` ends that."""
        blocks = self._blocks_of(seq)
        seq.block_tables, seq.num_freed_blocks = [], []
        seq.num_computed_tokens, seq.num_uncomputed_tokens = 0, len(seq.token_ids)
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Give the blocks of a sequence back, tail first: a prefix is then evicted from its end, and its head, which more
        sequences share, last."""
        self._pool.release(reversed(blocks))

    def _blocks_of(self, seq: Sequence) -> list[int]:
        tables = zip(seq.block_tables, seq.num_freed_blocks, strict=True)
        return [block for table, num_freed in tables for block in table[num_freed:]]

    def _first_needed(self, window: int | None, num_tokens: int) -> int:
        """Return the first block that a token reads which has ``num_tokens`` before it."""
        return 0 if window is None else max(0, num_tokens - window + 1) // self.block_size

    def _filled(self, table: list[int | None]) -> list[int]:
        """Return a match's table with new blocks for what is in host memory."""
        blocks = iter(self._pool.take(table.count(None)))
        return [next(blocks) if block is None else block for block in table]

    def _find_on_host(
        self, hashes: list[bytes], tables: list[list[int | None]], host: HostTier
    ) -> list[list[int | None]]:
        """Return the tables of a longer prefix, partly in host memory, where copying it takes less time than computing it."""
        longer = self._find(hashes, host)
        num_copies = sum(table.count(None) for table in longer)
        start, end = len(tables[0]) * self.block_size, len(longer[0]) * self.block_size
        return longer if num_copies and host.saves_time(num_copies, start, end) else tables

    def _find(self, hashes: list[bytes], host: HostTier | None = None) -> list[list[int | None]]:
        """Return by group the blocks of the longest prefix that every group has, as far as its window reaches."""
        if self.windows == (None,):
            return [self._run(hashes, host)]
        num = len(hashes)
        for group, window in enumerate(self.windows):
            if window is None:
                num = len(self._run(_names(hashes[:num], group), host))
        while (
            shorter := min((self._num_reached(hashes, num, *one, host) for one in self._sliding), default=num)
        ) < num:
            num = shorter
        tables: list[list[int | None]] = []
        for group, window in enumerate(self.windows):
            needed = self._first_needed(window, num * self.block_size)
            tables.append([*([HOLE] * needed), *self._run(_names(hashes[needed:num], group), host)])
        return tables

    def _num_reached(self, hashes: list[bytes], num: int, group: int, window: int, host: HostTier | None) -> int:
        """Return how many blocks, ``num`` at most, a token may have before it whose window in this group is all there."""
        end, at = num, num - 1
        while at >= self._first_needed(window, end * self.block_size):
            if not self._run(_names(hashes[at : at + 1], group), host):
                end = at
            at -= 1
        return end

    def _run(self, names: list[bytes], host: HostTier | None) -> list[int | None]:
        """Return the longest known run of blocks from the start, with None for those in host memory alone."""
        found: list[int | None] = [*self._pool.find(names)]
        if host is None:
            return found
        for name in islice(names, len(found), None):
            block = self._pool.find((name,))
            if not block and not host.holds(name):
                break
            found.append(block[0] if block else None)
        return found

    def _hash_blocks(self, seq: Sequence, num_blocks: int) -> None:
        extend_block_hashes(seq.block_hashes, seq.token_ids, self.block_size, num_blocks, seq.cache_salt, seq.adapter)


def _num_common(seq: Sequence, other: Sequence) -> int:
    """Return how many tokens two sequences begin with alike."""
    num = min(len(seq.token_ids), len(other.token_ids))
    differ = np.frombuffer(seq.token_ids, np.uint32, num) != np.frombuffer(other.token_ids, np.uint32, num)
    return int(differ.argmax()) if differ.any() else num


def _known(table: list[int | None]) -> list[int]:
    """Return the blocks of a match's table that the pool has."""
    return [block for block in table if block is not None]


def _names(hashes: list[bytes], group: int) -> list[bytes]:
    """Names of blocks with the same tokens differ by group: their layers do."""
    return hashes if group == 0 else [name + group.to_bytes(2, "big") for name in hashes]

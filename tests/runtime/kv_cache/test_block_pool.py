import pytest

from flyball_protocol import KVBlocks
from flyball_runtime.kv_cache import BlockPool


def counts(pool: BlockPool) -> tuple[int, int, int]:
    kv_blocks: KVBlocks = pool.counts()
    assert kv_blocks.total == pool.num_blocks == kv_blocks.free + kv_blocks.used + kv_blocks.cached
    return kv_blocks.free, kv_blocks.used, kv_blocks.cached


def fill(pool: BlockPool, *names: bytes) -> list[int]:
    """Take a block for each name, register it and release them all, first name first."""
    blocks = pool.take(len(names))
    pool.register(blocks, names)
    pool.release(blocks)
    return blocks


def test_a_block_goes_from_free_to_used_to_cached_and_back():
    pool = BlockPool(4)
    (block,) = pool.take(1)
    assert counts(pool) == (3, 1, 0)
    pool.register([block], [b"a"])
    pool.release([block])
    assert counts(pool) == (3, 0, 1)
    assert pool.find([b"a"]) == [block]
    pool.share([block])
    assert counts(pool) == (3, 1, 0)


def test_a_block_without_content_is_free_after_release():
    pool = BlockPool(2)
    pool.release(pool.take(2))
    assert counts(pool) == (2, 0, 0)


def test_a_shared_block_stays_used_until_the_last_release():
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.register([block], [b"a"])
    pool.share([block])
    pool.release([block])
    assert (pool.num_refs(block), counts(pool)) == (1, (0, 1, 0))
    pool.release([block])
    assert (pool.num_refs(block), counts(pool)) == (0, (0, 0, 1))


def test_forgotten_blocks_stay_used_and_are_free_after_release():
    pool = BlockPool(3)
    first, second, third = blocks = pool.take(3)
    pool.register([first, second], [b"a", b"b"])
    pool.share([first])
    pool.forget([first, third])
    assert pool.find([b"a"]) == [] and pool.find([b"b"]) == [second]
    pool.release(blocks)
    assert (pool.num_refs(first), counts(pool)) == (1, (1, 1, 1))
    pool.release([first])
    assert counts(pool) == (2, 0, 1)


def test_free_blocks_are_taken_before_cached_ones():
    pool = BlockPool(3)
    fill(pool, b"a")
    pool.take(2)
    assert counts(pool) == (0, 2, 1)
    assert pool.find([b"a"])


def test_eviction_takes_the_block_released_first_and_forgets_its_content():
    pool = BlockPool(3)
    a, b, _ = fill(pool, b"a", b"b", b"c")
    assert pool.take(2) == [a, b]
    assert (pool.find([b"a"]), pool.find([b"b"]), len(pool.find([b"c"]))) == ([], [], 1)
    pool.release([a, b])
    assert counts(pool) == (2, 0, 1)


def test_sharing_a_cached_block_renews_it():
    pool = BlockPool(2)
    a, b = fill(pool, b"a", b"b")
    pool.share([a])
    pool.release([a])
    assert pool.take(1) == [b]


def test_find_stops_at_the_first_unknown_hash():
    pool = BlockPool(3)
    a, b, _ = fill(pool, b"a", b"b", b"c")
    assert pool.find([b"a", b"b", b"x", b"c"]) == [a, b]
    assert pool.find([b"x", b"a"]) == []


def test_the_second_block_of_equal_content_stays_private():
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.register([first], [b"a"])
    pool.register([second], [b"a"])
    assert pool.find([b"a"]) == [first]
    pool.release([second])
    assert counts(pool) == (1, 1, 0)
    pool.release([first])
    assert pool.find([b"a"]) == [first]


@pytest.mark.parametrize("capacity", [0, 5, -1])
def test_capacity_outside_the_pool_is_refused(capacity: int):
    with pytest.raises(ValueError, match=f"capacity is {capacity} blocks; it must be from 1 to 4"):
        BlockPool(4).resize(capacity)


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockPool(0)


def test_lowering_capacity_evicts_cached_blocks_at_once_oldest_first():
    pool = BlockPool(4)
    fill(pool, b"a", b"b", b"c")
    pool.resize(1)
    assert counts(pool) == (3, 0, 1)
    assert pool.find([b"c"])


def test_used_and_cached_stay_within_capacity():
    pool = BlockPool(4)
    pool.resize(2)
    a, _ = fill(pool, b"a", b"b")
    assert (counts(pool), pool.num_admissible) == ((2, 0, 2), 2)
    assert pool.take(1) == [a], "a free block would make 3 used or cached"
    assert counts(pool) == (2, 1, 1)


def test_a_drain_admits_nothing_but_lets_running_sequences_grow_to_the_old_capacity():
    pool = BlockPool(6)
    pool.resize(5)
    used = pool.take(4)
    pool.resize(2)
    assert (pool.num_admissible, pool.num_growable) == (0, 1)
    used += pool.take(1)
    assert pool.num_growable == 0
    pool.release(used[:2])
    assert (pool.num_admissible, pool.num_growable) == (0, 2)
    pool.release(used[2:3])
    assert (pool.num_admissible, pool.num_growable) == (0, 0), "drained: the old capacity is gone"


def test_each_resize_has_a_deadline_of_its_own():
    pool = BlockPool(6)
    used = pool.take(4)
    pool.resize(5, deadline_s=1.0)
    assert not pool.is_overdue(9.0), "nothing drains"
    pool.resize(2, deadline_s=3.0)
    assert (pool.is_overdue(2.9), pool.is_overdue(3.0)) == (False, True)
    pool.resize(3, deadline_s=8.0)
    assert (pool.is_overdue(7.9), pool.is_overdue(8.0)) == (False, True)
    pool.resize(2)
    assert not pool.is_overdue(1e9), "this one may take as long as it takes"
    pool.resize(3, deadline_s=8.0)
    pool.release(used[:1])
    assert not pool.is_overdue(9.0), "drained"


def test_a_drain_caches_nothing():
    pool = BlockPool(4)
    used = pool.take(4)
    pool.register(used, [b"a", b"b", b"c", b"d"])
    pool.resize(2)
    pool.release(used[:2])
    assert counts(pool) == (2, 2, 0)


def test_raising_capacity_works_at_once():
    pool = BlockPool(4)
    pool.resize(1)
    pool.take(1)
    pool.resize(3)
    assert (pool.num_admissible, pool.num_growable) == (2, 2)


def test_raising_capacity_in_a_drain_keeps_room_to_grow():
    pool = BlockPool(8)
    pool.take(7)
    pool.resize(2)
    pool.resize(4)
    assert (pool.num_admissible, pool.num_growable) == (0, 1)


# memory


def test_the_lowest_free_block_is_taken():
    pool = BlockPool(4)
    blocks = pool.take(4)
    pool.release([blocks[2], blocks[0], blocks[3]])
    assert pool.take(2) == [0, 2]


def test_memory_that_nobody_uses_is_given_up_at_once_and_taken_again():
    pool = BlockPool(8)
    pool.take(3)
    pool.resize(4)
    assert (pool.size, pool.has_surplus) == (4, False)
    pool.resize(6)
    assert pool.size == 6


def test_a_drain_keeps_its_memory_until_what_is_in_use_fits():
    pool = BlockPool(8)
    blocks = pool.take(6)
    pool.resize(4)
    assert (pool.size, pool.has_surplus, pool.num_growable) == (8, False, 2)
    pool.release(blocks[:1])
    assert (pool.size, pool.has_surplus) == (8, False)
    pool.release(blocks[1:2])
    assert (pool.size, pool.has_surplus, pool.surplus()) == (6, True, [5, 4])


def test_moved_blocks_keep_references_content_and_order():
    pool = BlockPool(8)
    low, high = pool.take(4), pool.take(4)
    pool.register(high, [b"a", b"b", b"c", b"d"])
    pool.share([high[3]])
    pool.release(high[:3])
    pool.release(low)
    pool.resize(5)
    assert pool.surplus() == [7, 6, 5]
    assert pool.move([7, 6, 5]) == {7: 0, 6: 1, 5: 2}
    pool.trim()
    assert (pool.size, pool.num_refs(0), pool.num_refs(7)) == (5, 2, 0)
    assert pool.find([b"a", b"b", b"c", b"d"]) == [4, 2, 1, 0]
    assert counts(pool) == (4, 1, 3)
    assert pool.take(2) == [4, 3], "a is the oldest"
    assert pool.take(1) == [2]


def test_surplus_without_a_step_to_move_it_in_is_forgotten():
    pool = BlockPool(6)
    pool.take(1)
    fill(pool, b"a", b"b", b"c")
    pool.resize(3)
    assert (pool.surplus(), pool.size) == ([3], 4)
    pool.evict_surplus()
    pool.trim()
    assert (pool.size, counts(pool), pool.find([b"b"])) == (3, (4, 1, 1), [2])


def test_a_new_pool_is_free_and_tells_its_capacity():
    pool = BlockPool(4)
    assert [pool.num_refs(block) for block in range(4)] == [0] * 4
    pool.resize(3)
    counts = pool.counts()
    assert (counts.total, counts.capacity, counts.free, counts.used, counts.cached) == (4, 3, 4, 0, 0)

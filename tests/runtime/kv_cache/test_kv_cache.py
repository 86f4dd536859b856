import pytest

from flyball_runtime.core.request import Sequence
from flyball_runtime.kv_cache import KVCache
from flyball_runtime.kv_cache.kv_cache import HOLE
from sequences import make_sequence

BLOCK_SIZE = 4


def admit(kv: KVCache, seq: Sequence) -> int:
    """Admit, compute and register a whole sequence; return how many tokens the prefix cache held."""
    match = kv.match_prefix(seq)
    assert kv.can_admit(match)
    kv.admit(seq, match)
    kv.register([(seq, seq.num_computed_tokens, len(seq.token_ids))])
    seq.num_computed_tokens = len(seq.token_ids)
    return match.num_tokens


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "num_found_again"),
    [(1, 1, 0), (3, 1, 0), (4, 1, 0), (5, 2, 4), (8, 2, 4), (9, 3, 8), (16, 4, 12), (17, 5, 16)],
)
def test_full_blocks_are_found_again_but_never_the_last_token(num_tokens: int, num_blocks: int, num_found_again: int):
    kv = KVCache(16, BLOCK_SIZE)
    prompt = list(range(num_tokens))
    first, second = make_sequence(prompt), make_sequence(prompt)
    assert admit(kv, first) == 0
    assert len(first.block_table) == kv.num_blocks_for(num_tokens) == num_blocks
    assert admit(kv, second) == num_found_again
    shared = num_found_again // BLOCK_SIZE
    assert second.block_table[:shared] == first.block_table[:shared]
    assert not set(second.block_table[shared:]) & set(first.block_table)
    assert [kv.num_refs(block) for block in first.block_table[:shared]] == [2] * shared


def test_a_prefix_is_found_after_its_owner_is_gone():
    kv = KVCache(8, BLOCK_SIZE)
    prompt = list(range(10))
    first = make_sequence(prompt)
    admit(kv, first)
    kv.release(kv.detach(first))
    assert (first.block_table, first.num_computed_tokens) == ([], 0)
    assert (kv.counts().used, kv.counts().cached) == (0, 2)
    assert admit(kv, make_sequence([*prompt[:8], 77])) == 8


@pytest.mark.parametrize("hashed_by", [(BLOCK_SIZE, None), (None, BLOCK_SIZE), (BLOCK_SIZE, BLOCK_SIZE)])
def test_it_does_not_matter_who_hashed_a_prompt(hashed_by: tuple[int | None, int | None]):
    kv = KVCache(16, BLOCK_SIZE)
    first, second = (make_sequence(range(10), hashed_by=one) for one in hashed_by)
    assert (admit(kv, first), admit(kv, second)) == (0, 8)


@pytest.mark.parametrize("hashed_by", [BLOCK_SIZE, None])
def test_a_prefix_is_shared_within_a_salt_only_prompt_and_output(hashed_by: int | None):
    kv = KVCache(64, BLOCK_SIZE)
    for salt in (None, "a", "b"):
        owner = make_sequence(range(9), hashed_by=hashed_by, cache_salt=salt)
        assert admit(kv, owner) == 0
        owner.token_ids.extend([9, 10, 11, 12])
        kv.register([(owner, 9, 12)])
    for salt in (None, "a", "b"):
        assert admit(kv, make_sequence(range(13), hashed_by=hashed_by, cache_salt=salt)) == 12
    assert admit(kv, make_sequence(range(13), hashed_by=hashed_by, cache_salt="c")) == 0


def test_nothing_is_found_before_it_is_registered():
    kv = KVCache(8, BLOCK_SIZE)
    first = make_sequence(range(9))
    kv.admit(first, kv.match_prefix(first))
    assert kv.match_prefix(make_sequence(range(9))).num_tokens == 0
    kv.register([(first, 0, 5)])
    assert kv.match_prefix(make_sequence(range(9))).num_tokens == 4


def test_without_prefix_caching_nothing_is_shared_or_kept():
    kv = KVCache(8, BLOCK_SIZE, enable_prefix_caching=False)
    first = make_sequence(range(9))
    assert admit(kv, first) == 0
    assert admit(kv, make_sequence(range(9))) == 0
    kv.release(kv.detach(first))
    assert kv.counts().cached == 0
    assert first.block_hashes == []


def test_output_tokens_fill_blocks_that_others_find():
    kv = KVCache(8, BLOCK_SIZE)
    seq = make_sequence(range(3))
    admit(kv, seq)
    seq.token_ids.extend([3, 4])
    kv.register([(seq, 3, 4)])
    assert kv.match_prefix(make_sequence([0, 1, 2, 3, 4])).tables == [seq.block_table]


def test_equal_blocks_computed_side_by_side_have_one_owner_each():
    kv = KVCache(8, BLOCK_SIZE)
    first, second = make_sequence(range(9)), make_sequence(range(9))
    for seq in (first, second):
        kv.admit(seq, kv.match_prefix(seq))
    for seq in (first, second):
        kv.register([(seq, 0, 9)])
    assert not set(first.block_table) & set(second.block_table)
    assert kv.match_prefix(make_sequence(range(9))).tables == [first.block_table[:2]]
    kv.release(kv.detach(second))
    assert (kv.counts().used, kv.counts().cached) == (3, 0)


def test_the_tail_of_a_prefix_is_evicted_before_its_head():
    kv = KVCache(4, BLOCK_SIZE)
    seq = make_sequence(range(16))
    admit(kv, seq)
    kv.release(kv.detach(seq))
    admit(kv, make_sequence(7))
    assert kv.match_prefix(make_sequence(range(16))).num_tokens == 8


def test_blocks_needed_leave_out_what_others_hold_and_count_what_is_only_cached():
    kv = KVCache(8, BLOCK_SIZE)
    running, gone = make_sequence(range(8)), make_sequence(range(100, 108))
    admit(kv, running)
    admit(kv, gone)
    kv.release(kv.detach(gone))
    assert kv.match_prefix(make_sequence([*range(8), 8])).num_blocks_needed == 1
    assert kv.match_prefix(make_sequence([*range(100, 108), 8])).num_blocks_needed == 3


def test_admission_may_use_its_own_cached_prefix_as_the_last_blocks():
    kv = KVCache(3, BLOCK_SIZE)
    first = make_sequence(range(9))
    admit(kv, first)
    kv.release(kv.detach(first))
    again = make_sequence(range(12))
    assert admit(kv, again) == 8
    assert kv.counts().used == 3
    assert not kv.can_admit(kv.match_prefix(make_sequence(1)))


def test_admission_does_not_evict_the_prefix_it_found():
    kv = KVCache(4, BLOCK_SIZE)
    old, prefix = make_sequence(range(4)), make_sequence(range(100, 108))
    for seq in (prefix, old):
        admit(kv, seq)
        kv.release(kv.detach(seq))
    match = kv.match_prefix(longer := make_sequence([*range(100, 108), *range(8)]))
    kv.admit(longer, match)
    assert longer.block_table[:2] == match.tables[0]
    assert len(set(longer.block_table)) == 4


def test_growth_appends_one_block_to_each():
    kv = KVCache(4, BLOCK_SIZE)
    first, second = make_sequence(4), make_sequence(4)
    admit(kv, first)
    admit(kv, second)
    kv.grow([first, second])
    assert (len(first.block_table), len(second.block_table), kv.num_growable_blocks) == (2, 2, 0)


def test_block_size_must_be_positive():
    with pytest.raises(ValueError, match="block_size is 0"):
        KVCache(4, 0)


def test_a_block_may_hold_one_token():
    assert KVCache(4, 1).num_blocks_for(3) == 3


def test_a_blocked_sequence_is_looked_up_again_as_soon_as_it_may_fit():
    """8 blocks, 3 used by a sequence that shares 2 with the blocked one, which needs 4 more; 2 used by fillers."""
    kv = KVCache(8, 4)
    prefix = list(range(1, 9))
    shares, *fillers = make_sequence([*prefix, 90]), make_sequence(3), make_sequence(3)
    for seq in (shares, *fillers):
        kv.admit(seq, kv.match_prefix(seq))
    kv.register([(shares, 0, 9)])
    blocked = make_sequence([*prefix, *range(50, 63)])
    match = kv.match_prefix(blocked)
    assert (match.num_blocks_needed, kv.can_admit(match), kv.still_blocked(blocked, match)) == (4, False, True)
    kv.release(kv.detach(fillers[0]))
    assert (kv.still_blocked(blocked, match), kv.can_admit(kv.match_prefix(blocked))) == (False, True)


def test_cached_blocks_move_down_too_a_bounded_number_at_a_time():
    kv = KVCache(8, BLOCK_SIZE)
    filler, seq = make_sequence(4 * BLOCK_SIZE), make_sequence(4 * BLOCK_SIZE)
    for one in (filler, seq):
        kv.admit(one, kv.match_prefix(one))
    assert seq.block_table == [4, 5, 6, 7]
    kv.register([(seq, 0, 4 * BLOCK_SIZE)])
    for one in (seq, filler):
        kv.release(kv.detach(one))
    kv.resize(4)
    assert kv.compact([], 3) == ({7: 0, 6: 1, 5: 2}, [])
    assert (kv.size, kv.has_surplus) == (5, True)
    assert kv.compact([], 3) == ({4: 3}, [])
    assert (kv.size, kv.has_surplus) == (4, False)
    again = make_sequence([*seq.token_ids, 1])
    assert kv.match_prefix(again).tables == [[3, 2, 1, 0]]
    assert kv._pool.take(2) == [0, 1], "its end is still the first to go"


def test_a_block_that_an_ended_sequence_still_holds_stays_where_it_is():
    kv = KVCache(8, BLOCK_SIZE)
    gone, stays = make_sequence(5 * BLOCK_SIZE), make_sequence(2 * BLOCK_SIZE)
    for one in (gone, stays):
        kv.admit(one, kv.match_prefix(one))
    blocks = kv.detach(gone)
    kv.release(blocks[:3])
    kv.resize(4)
    assert kv.compact([stays], 8) == ({6: 0, 5: 1}, [(stays, 0, 1), (stays, 0, 0)])
    assert (stays.block_table, kv.size) == ([1, 0], 5), "block 4 is in use by a step in flight"
    kv.release(blocks[3:])
    assert kv.size == 4


# groups of layers


def test_each_group_has_blocks_of_its_own():
    kv = KVCache(16, BLOCK_SIZE, windows=(None, 8))
    seq = make_sequence(range(10))
    assert admit(kv, seq) == 0
    assert seq.block_tables == [[0, 1, 2], [3, 4, 5]]
    kv.grow([seq])
    assert seq.block_tables == [[0, 1, 2, 6], [3, 4, 5, 7]]
    assert (kv.num_blocks_for(10), kv.counts().used) == (6, 8)


@pytest.mark.parametrize(
    ("num_tokens", "num_freed"), [(10, 0), (11, 1), (14, 1), (15, 2), (22, 3), (23, 4)], ids=lambda value: str(value)
)
def test_what_lies_behind_a_window_is_given_back(num_tokens: int, num_freed: int):
    """The token after ``num_tokens`` attends to 8, its own included: from ``num_tokens - 7`` on."""
    kv = KVCache(16, BLOCK_SIZE, windows=(None, 8))
    seq = make_sequence(24)
    kv.admit(seq, kv.match_prefix(seq))
    kv.slide(seq, num_tokens)
    assert (seq.num_freed_blocks, kv.counts().used) == ([0, num_freed], 12 - num_freed)
    assert len(kv.detach(seq)) == 12 - num_freed


def test_a_window_that_is_still_cached_is_enough():
    """The first sequence leaves all of its prompt in the group that sees all, and the last blocks of the other."""
    kv = KVCache(16, BLOCK_SIZE, windows=(None, 8))
    first = make_sequence(range(17))
    admit(kv, first)
    kv.slide(first, 17)
    behind = kv.match_prefix(make_sequence([*range(16), 99]))
    assert (behind.num_tokens, behind.tables[1][:2]) == (16, [HOLE, HOLE])
    kv.release(kv.detach(first))
    filler = make_sequence(4 * BLOCK_SIZE)
    kv.admit(filler, kv.match_prefix(filler))
    again = make_sequence([*range(16), 99])
    assert admit(kv, again) == 16
    assert again.block_tables[1][:2] == [HOLE, HOLE]
    assert again.num_freed_blocks == [0, 2]


def test_a_window_that_is_gone_costs_what_lies_before_it():
    kv = KVCache(12, BLOCK_SIZE, windows=(None, 8))
    first = make_sequence(range(17))
    admit(kv, first)
    lost = first.block_tables[1][3]
    kv._pool.forget([lost])
    match = kv.match_prefix(make_sequence([*range(16), 99]))
    assert (match.num_tokens, match.tables[1][0]) == (12, HOLE)
    assert match.tables[1][1:] == first.block_tables[1][1:3]

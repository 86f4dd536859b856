"""Evicted blocks that host memory keeps, and prefixes that are found there."""

import pytest

from flyball_runtime.core.request import Sequence
from flyball_runtime.kv_cache import HostTier, KVCache
from sequences import make_sequence

BLOCK_SIZE = 4


def run(kv: KVCache, seq: Sequence) -> tuple[int, list[tuple[int, int]], list[tuple[int, int]]]:
    """Take a sequence through the pool in one step; return the tokens found, and what the step copies out and in."""
    match = kv.match_prefix(seq)
    assert kv.can_admit(match)
    kv.admit(seq, match)
    swap_ins = kv.swap_in(seq, match)
    swap_outs = kv.swap_out()
    kv.register([(seq, seq.num_computed_tokens, len(seq.token_ids))])
    seq.num_computed_tokens = len(seq.token_ids)
    kv.release(kv.detach(seq))
    return match.num_tokens, swap_outs, swap_ins


def test_an_evicted_prefix_comes_back_from_host_memory() -> None:
    host = HostTier(8)
    kv = KVCache(4, BLOCK_SIZE, host=host)
    prompt = list(range(13))
    assert run(kv, make_sequence(prompt)) == (0, [], [])
    found, swap_outs, swap_ins = run(kv, make_sequence(16))
    assert (found, swap_ins) == (0, [])
    assert sorted(block for block, _ in swap_outs) == [0, 1, 2], "all that the first one has filled"
    slots = dict(swap_outs)
    found, swap_outs, swap_ins = run(kv, make_sequence(prompt))
    assert found == 12
    assert [slot for _, slot in swap_ins] == [slots[0], slots[1], slots[2]], "in the order of the prompt"
    assert len(swap_outs) == 4
    assert host.num_held == 7, "what was copied back stays"


def test_blocks_that_are_copied_back_are_found_in_the_pool_at_once() -> None:
    kv = KVCache(8, BLOCK_SIZE, host=HostTier(8))
    prompt = list(range(13))
    run(kv, make_sequence(prompt))
    run(kv, make_sequence(32))
    first, second = make_sequence(prompt), make_sequence(prompt)
    match = kv.match_prefix(first)
    assert (match.num_tokens, match.num_host_tokens, match.num_blocks_needed) == (12, 12, 4)
    kv.admit(first, match)
    assert len(kv.swap_in(first, match)) == 3
    again = kv.match_prefix(second)
    assert (again.num_tokens, again.num_host_tokens) == (12, 0)
    assert again.tables[0] == first.block_table[:3]


def test_the_least_recently_used_is_given_up_first() -> None:
    host = HostTier(2)
    kv = KVCache(2, BLOCK_SIZE, host=host)
    prompts = [[index] * 8 for index in range(3)]
    for prompt in prompts:
        run(kv, make_sequence(prompt))
    assert kv.match_prefix(make_sequence([*prompts[0], 9])).num_tokens == 0, (
        "its blocks made room for those of the next"
    )
    assert kv.match_prefix(make_sequence([*prompts[1], 9])).num_tokens == 8


def test_a_slot_that_a_step_reads_is_not_written_by_it() -> None:
    host = HostTier(1)
    kv = KVCache(2, BLOCK_SIZE, host=host)
    run(kv, make_sequence([1] * 5))
    assert len(run(kv, make_sequence([2] * 8))[1]) == 1
    found, swap_outs, swap_ins = run(kv, make_sequence([1] * 5))
    assert (found, len(swap_ins)) == (4, 1)
    assert swap_outs == [], "there is no other slot"


def test_a_block_that_is_still_in_host_memory_is_not_copied_again() -> None:
    kv = KVCache(2, BLOCK_SIZE, host=HostTier(8))
    for _ in range(2):
        run(kv, make_sequence([1] * 8))
        run(kv, make_sequence([2] * 8))
    assert run(kv, make_sequence([1] * 8))[1] == []


def test_a_moved_block_is_copied_from_where_it_was() -> None:
    """Blocks move down in a plan that evicts them then: their content is where it was before the step."""
    kv = KVCache(6, BLOCK_SIZE, host=HostTier(8))
    keeps = make_sequence([3] * 12)
    kv.admit(keeps, kv.match_prefix(keeps))
    run(kv, make_sequence([1] * 12))
    kv.release(kv.detach(keeps))
    kv.resize(3)
    moved, _ = kv.compact([], 8)
    assert set(moved) == {3, 4, 5}
    match = kv.match_prefix(taker := make_sequence([2] * 12))
    kv.admit(taker, match)
    assert {block for block, _ in kv.swap_out()} == {3, 4, 5}


def test_memory_that_is_given_back_before_a_step_has_nothing_to_copy() -> None:
    host = HostTier(8)
    kv = KVCache(4, BLOCK_SIZE, host=host)
    run(kv, make_sequence([1] * 16))
    kv.resize(2)
    kv.evict_surplus()
    kv.lose_memory()
    assert all(block < kv.size for block, _ in kv.swap_out())


def test_what_a_failed_sequence_computed_is_forgotten() -> None:
    host = HostTier(8)
    kv = KVCache(4, BLOCK_SIZE, host=host)
    prompt = [*range(13)]
    run(kv, make_sequence(prompt))
    run(kv, make_sequence(16))
    failed = make_sequence(prompt)
    match = kv.match_prefix(failed)
    kv.admit(failed, match)
    kv.swap_in(failed, match)
    kv.swap_out()
    kv.forget(failed)
    kv.release(kv.detach(failed))
    assert kv.match_prefix(make_sequence(prompt)).num_tokens == 0


@pytest.mark.parametrize(("block_copy_s", "found"), [(0.001, 12), (0.1, 0)])
def test_nothing_is_copied_that_is_computed_faster(block_copy_s: float, found: int) -> None:
    host = HostTier(8, block_copy_s=block_copy_s, prefill_s=lambda start, end: (end - start) * 0.001)
    kv = KVCache(4, BLOCK_SIZE, host=host)
    prompt = list(range(13))
    run(kv, make_sequence(prompt))
    run(kv, make_sequence(16))
    assert run(kv, make_sequence(prompt))[0] == found
    assert (host.num_held > 0) == (found > 0), "nor is it copied out"


def test_prefixes_are_found_by_tokens_salt_and_adapter() -> None:
    kv = KVCache(4, BLOCK_SIZE, host=HostTier(8))
    prompt = list(range(13))
    run(kv, make_sequence(prompt, adapter=1, cache_salt="a"))
    run(kv, make_sequence(16))
    for adapter, salt, found in ((None, "a", 0), (1, None, 0), (2, "a", 0), (1, "a", 12)):
        assert kv.match_prefix(make_sequence(prompt, adapter=adapter, cache_salt=salt)).num_tokens == found


def test_groups_with_a_window_need_its_blocks_only() -> None:
    kv = KVCache(8, BLOCK_SIZE, windows=(None, 8), host=HostTier(16))
    prompt = list(range(13))
    run(kv, make_sequence(prompt))
    run(kv, make_sequence(13))
    match = kv.match_prefix(make_sequence(prompt))
    assert match.num_tokens == 12
    assert [table.count(None) for table in match.tables] == [3, 2]
    assert match.num_holes == [0, 1]

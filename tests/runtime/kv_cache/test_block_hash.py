import struct
from array import array

import hypothesis.strategies as st
from hypothesis import assume, given, settings

from flyball_runtime.kv_cache.kv_cache import extend_block_hashes, hash_prompt

SALTS = st.none() | st.text(min_size=1, max_size=40)
PROMPTS = st.lists(st.integers(0, 2), min_size=4, max_size=12)


def hashes_of(token_ids: list[int], block_size: int = 4) -> list[bytes]:
    return hash_prompt(token_ids, block_size)


def test_only_full_blocks_are_hashed():
    assert [len(hashes_of(list(range(n)))) for n in (0, 3, 4, 5, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_covers_all_tokens_before_it():
    first, second = hashes_of([1, 2, 3, 4, 5, 6, 7, 8]), hashes_of([9, 2, 3, 4, 5, 6, 7, 8])
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_order_and_block_edges_matter():
    assert hashes_of([1, 2, 3, 4]) != hashes_of([4, 3, 2, 1])
    assert hashes_of([1, 2, 3, 4], block_size=2)[0] != hashes_of([1, 2, 3, 4], block_size=4)[0]
    assert hashes_of([12, 3, 0, 0]) != hashes_of([1, 23, 0, 0])


def test_extending_gives_what_hashing_at_once_gives():
    token_ids = array("I", range(100, 140))
    hashes: list[bytes] = []
    for num_blocks in (1, 1, 4, 3, 10):
        extend_block_hashes(hashes, token_ids, 4, num_blocks)
    assert hashes == hashes_of(token_ids)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(first=SALTS, second=SALTS, prompts=st.tuples(PROMPTS, PROMPTS))
def test_prompts_with_different_salts_have_no_hash_in_common(
    first: str | None, second: str | None, prompts: tuple[list[int], list[int]]
):
    assume(first != second)
    assert not set(hash_prompt(prompts[0], 4, first)) & set(hash_prompt(prompts[1], 4, second))


def test_prompts_of_different_adapters_have_no_hash_in_common():
    prompt = list(range(12))
    chains = [hash_prompt(prompt, 4, salt, adapter) for salt in (None, "A", "B") for adapter in (None, 0, 1, 256)]
    assert len({name for chain in chains for name in chain}) == 3 * len(chains)
    assert hash_prompt(prompt, 4, "A", 1) == chains[6]


def test_an_equal_salt_gives_equal_hashes_and_extending_a_salted_chain_needs_it_no_more():
    hashes = hash_prompt([1, 2, 3, 4], 4, "tenant")
    extend_block_hashes(hashes, array("I", range(1, 9)), 4, 2, "tenant")
    assert hashes == hash_prompt([1, 2, 3, 4, 5, 6, 7, 8], 4, "tenant")


def test_a_salt_that_reads_like_packed_tokens_does_not_continue_another_prompt():
    tokens = [0x41, 0x42, 0x43, 0x44]
    mimic = struct.pack("4I", *tokens).decode()
    unsalted = hash_prompt([*tokens, 5, 6, 7, 8], 4)
    assert not set(hash_prompt([5, 6, 7, 8], 4, mimic)) & set(unsalted)
    assert not set(hash_prompt([*tokens, 5, 6, 7, 8], 4, "A")) & set(hash_prompt([5, 6, 7, 8], 4, "A" + mimic))

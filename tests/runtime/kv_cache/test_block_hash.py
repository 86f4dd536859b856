from flyball_runtime.kv_cache.block_hash import extend_block_hashes, hash_prompt


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
    token_ids = list(range(100, 140))
    hashes: list[bytes] = []
    for num_blocks in (1, 1, 4, 3, 10):
        extend_block_hashes(hashes, token_ids, 4, num_blocks)
    assert hashes == hashes_of(token_ids)

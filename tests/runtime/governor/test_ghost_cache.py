"""The ghost cache against caches of each size that are simulated block by block."""

from collections import OrderedDict
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball_runtime.governor import GhostCache
from flyball_runtime.governor.ghost_cache import MAX_SAMPLED, SIZES

BLOCK = 16


class ExactCache:
    """Evicts the least recently used block; a prefix counts as far as all of it is there."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self.num_found = 0

    def look_up(self, names: list[bytes], num_findable: int) -> None:
        for name in names[:num_findable]:
            if name not in self._blocks:
                break
            self.num_found += BLOCK
        self.use(names)

    def use(self, names: list[bytes]) -> None:
        for name in reversed(names):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)


def names(path: list[int]) -> list[bytes]:
    """Names of blocks, each of which stands for all of the path up to it."""
    return [repr(path[: end + 1]).encode() for end in range(len(path))]


PATH = st.lists(st.integers(0, 2), min_size=0, max_size=6)


@settings(deadline=None, max_examples=80)
@given(requests=st.lists(st.tuples(PATH, PATH, st.booleans()), max_size=30), num_blocks=st.integers(4, 24))
def test_without_sampling_it_is_exact(requests: list[tuple[list[int], list[int], bool]], num_blocks: int):
    ghost = GhostCache(num_blocks)
    sizes = [max(1, round(size * num_blocks)) for size in SIZES]
    exact = [ExactCache(size) for size in sizes]
    queried = 0
    for prompt, output, aligned in requests:
        num_tokens = len(prompt) * BLOCK + (0 if aligned and prompt else 5)
        queried += num_tokens
        ghost.look_up(names(prompt), num_tokens, BLOCK)
        ghost.use(names(prompt + output))
        for cache in exact:
            cache.look_up(names(prompt), (num_tokens - 1) // BLOCK)
            cache.use(names(prompt + output))
    curve = ghost.curve()
    if not curve:
        assert all(cache.num_found == 0 for cache in exact)
        return
    assert [point.num_blocks for point in curve] == sizes
    weightless = [cache.num_found / queried for cache in exact]
    assert [point.share for point in curve] == pytest.approx(weightless, rel=0.04, abs=1e-9)


def conversations(rng: Random, num_requests: int) -> list[list[bytes]]:
    """Return prompts that go on from earlier ones, the more often the later those were."""
    known: list[list[bytes]] = []
    for number in range(num_requests):
        before = known[-min(len(known), 1 + int(rng.expovariate(1 / 60)))] if known and rng.random() < 0.7 else []
        known.append(before[:200] + [b"%d:%d" % (number, at) for at in range(rng.randint(1, 60))])
    return known


def test_a_sample_of_the_names_is_nearly_exact():
    num_blocks = 8000
    ghost, exact = GhostCache(num_blocks), [ExactCache(round(size * num_blocks)) for size in SIZES]
    queried = 0
    for one in conversations(Random(1), 1500):
        num_tokens = len(one) * BLOCK + 3
        queried += num_tokens
        ghost.look_up(one, num_tokens, BLOCK)
        for cache in exact:
            cache.look_up(one, len(one))
    assert ghost._sampled_share < 0.2
    for point, cache in zip(ghost.curve(), exact, strict=True):
        assert point.share == pytest.approx(cache.num_found / queried, abs=0.05)


def test_memory_is_bounded_and_the_curve_never_falls():
    rng = Random(2)
    ghost = GhostCache(100_000, blocks_per_name=2)
    for number in range(300):
        ghost.look_up([b"%d:%d" % (number, at) for at in range(rng.randint(1, 3000))], 50_000, BLOCK)
    assert len(ghost._stamps) == len(ghost._names) == len(ghost._last_use) <= MAX_SAMPLED
    shares = [point.share for point in ghost.curve()]
    assert shares == sorted(shares)


def test_it_says_nothing_before_a_block_could_be_found():
    ghost = GhostCache(100)
    assert ghost.curve() == ()
    ghost.look_up([], 5, BLOCK)
    ghost.look_up([b"a"], 16, BLOCK)
    assert ghost.curve() == (), "a prompt of one block must be computed"


def test_two_groups_of_layers_need_twice_the_blocks():
    ghost = GhostCache(100, blocks_per_name=2)
    first, others = names([1] * 20), [b"%d" % number for number in range(20)]
    for prompt in (first, others, first):
        ghost.look_up(prompt, 20 * BLOCK + 1, BLOCK)
    small = [point.share for point in ghost.curve() if point.num_blocks < 80]
    large = [point.share for point in ghost.curve() if point.num_blocks >= 100]
    assert max(small) < 0.3 and min(large) > 0.3

"""A model that is nothing but its KV cache, so that a wrong block id shows."""

from flyball_runtime.core.sequence import Sequence
from flyball_runtime.scheduler import BatchPlan

VOCAB_SIZE = 12


def extend(content: int, token_id: int) -> int:
    """What the cache holds at a position: a digest of all tokens up to it."""
    return hash((content, token_id))


def next_token(content: int) -> int:
    """The token that the model samples after a context."""
    return (content >> 7) % VOCAB_SIZE


def contents(token_ids: list[int]) -> list[int]:
    content, result = 0, []
    for token_id in token_ids:
        content = extend(content, token_id)
        result.append(content)
    return result


def expected_output(prompt: list[int], num_tokens: int, stop_token_ids: frozenset[int]) -> list[int]:
    """What a request alone on the machine would get."""
    content, output = contents(prompt)[-1], []
    while len(output) < num_tokens:
        output.append(next_token(content))
        if output[-1] in stop_token_ids:
            break
        content = extend(content, output[-1])
    return output


class FakeModel:
    """Writes and reads slots as attention does: each step writes its tokens' slots, then reads all up to them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._slots: list[int | None] = [None] * (num_blocks * block_size)

    def run(self, plan: BatchPlan) -> list[int]:
        """Compute a step; return a token for each sequence that samples.

        Raises:
            AssertionError: a computed position of a sequence does not hold that sequence's own prefix.
        """
        for seq, start, num in zip(plan.sequences, plan.starts, plan.num_scheduled, strict=True):
            own = contents(seq.token_ids)
            for position in range(start, start + num):
                self._slots[self._slot(seq, position)] = own[position]
        sampled = []
        for seq, start, num, samples in zip(plan.sequences, plan.starts, plan.num_scheduled, plan.samples, strict=True):
            self.check(seq, start + num)
            if samples:
                last = self._slots[self._slot(seq, start + num - 1)]
                assert last is not None
                sampled.append(next_token(last))
        return sampled

    def check(self, seq: Sequence, num_tokens: int) -> None:
        held = [self._slots[self._slot(seq, position)] for position in range(num_tokens)]
        assert held == contents(seq.token_ids[:num_tokens]), f"{seq!r} reads what is not its own: {seq.block_table}"

    def _slot(self, seq: Sequence, position: int) -> int:
        block, offset = divmod(position, self._block_size)
        return seq.block_table[block] * self._block_size + offset

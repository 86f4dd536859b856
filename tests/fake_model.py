"""A model that is nothing but its KV cache, so that a wrong block id, table or token shows."""

from array import array
from collections import Counter

import msgspec

from flyball_runtime.core.beam_search import BeamSearch
from flyball_runtime.core.request import Sequence, TokenLogprobs
from flyball_runtime.scheduler import BatchPlan

VOCAB_SIZE = 12


def extend(content: int, token_id: int, adapter: int | None = None) -> int:
    """What the cache holds at a position: a digest of all tokens up to it, and of the adapter that computed them."""
    return hash((content, token_id) if adapter is None else (content, token_id, adapter))


def next_token(content: int) -> int:
    """The token that the model samples after a context."""
    return (content >> 7) % VOCAB_SIZE


def contents(token_ids: list[int], adapter: int | None = None) -> list[int]:
    content, result = 0, []
    for token_id in token_ids:
        content = extend(content, token_id, adapter)
        result.append(content)
    return result


def expected_output(
    prompt: list[int], num_tokens: int, stop_token_ids: frozenset[int], adapter: int | None = None
) -> list[int]:
    """What a request alone on the machine would get."""
    content, output = contents(prompt, adapter)[-1], []
    while len(output) < num_tokens:
        output.append(next_token(content))
        if output[-1] in stop_token_ids:
            break
        content = extend(content, output[-1], adapter)
    return output


def candidates(content: int) -> TokenLogprobs:
    """All tokens that may follow a context, with made-up log probabilities; the likeliest first."""
    logprobs = {token: -0.1 - (hash((content, token, 1)) >> 9) % 1000 / 250 for token in range(VOCAB_SIZE)}
    ids = sorted(logprobs, key=lambda token: -logprobs[token])
    return TokenLogprobs(ids[0], logprobs[ids[0]], ids, [logprobs[token] for token in ids])


def expected_hypotheses(
    prompt: list[int],
    num_tokens: int,
    stop_token_ids: frozenset[int],
    settings: BeamSearch,
    adapter: int | None = None,
) -> list[tuple[list[int], float]]:
    """What a beam search of a request alone on the machine would find, and the scores: written as transformers does it."""
    width, penalty = settings.width, settings.length_penalty
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, num_tokens + 1):
        following = []
        for total, output in running:
            one = candidates(contents(prompt + output, adapter)[-1])
            following += [(total + p, [*output, t]) for t, p in zip(one.top_ids, one.top_logprobs, strict=True)]
        following.sort(key=lambda entry: -entry[0])
        top = following[: max(2, 1 + len(stop_token_ids)) * width]
        ends = [length == num_tokens or output[-1] in stop_token_ids for _, output in top]
        ended = [entry for entry, end in list(zip(top, ends, strict=True))[:width] if end]
        finished += [(total / length**penalty, output) for total, output in ended]
        finished = sorted(finished, key=lambda entry: -entry[0])[:width]
        running = [entry for entry, end in zip(top, ends, strict=True) if not end][:width]
        if not running or (settings.early_stopping is True and len(finished) == width):
            break
        reach = num_tokens if settings.early_stopping == "never" and penalty > 0 else length
        if len(finished) == width and running[0][0] / reach**penalty <= finished[-1][0]:
            break
    return [(output, score) for score, output in finished]


class FakeModel:
    """Runs plans and knows nothing else: each comes as bytes, as another process would get it.

    It writes and reads slots as attention does: a token's slot gets a digest of the slot before it and of the token.

    Attributes:
        read: the digests behind which the last step has sampled.
        on_host: what host memory holds, by slot.
        num_swaps: blocks copied to host memory (``out``), and from there (``back``).
    """

    def __init__(self, num_blocks: int, block_size: int, windows: tuple[int | None, ...] = (None,)) -> None:
        """Start with nothing written. Windows are of 2 tokens or more: a token reads the one before it."""
        self._block_size = block_size
        self._windows = windows
        self._slots: list[int | None] = [None] * (num_blocks * block_size)
        self._size = len(self._slots)
        self._tables: dict[int, list[list[int]]] = {}
        self._last: dict[int, int] = {}
        self._in_slots: dict[int, int] = {}  # adapters
        self._slot_of: dict[int, int | None] = {}  # adapter slot, by row
        self.on_host: dict[int, list[int | None]] = {}
        self.num_swaps: Counter[str] = Counter()  # blocks: out, back
        self._epoch = 0
        self.read: list[int] = []
        self._num_plans = 0

    def run(self, plan: BatchPlan) -> tuple[list[int], list[int]]:
        """Compute a step; return a token for each entry that samples, and how many drafts are accepted.

        Raises:
            AssertionError: the plan does not go on where the last one ended, or reads a slot that nobody has written.
        """
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=BatchPlan)
        assert plan.number == self._num_plans
        self._num_plans += 1
        self._apply(plan)
        self.read = []
        known = iter(array("I", plan.token_ids))
        sampled: list[int] = []
        num_accepted: list[int] = []
        num_plain = len(plan.rows) - len(plan.num_drafts)
        for index, row in enumerate(plan.rows):
            start, num = plan.starts[index], plan.num_scheduled[index]
            tokens = [self._last[row]] if index < plan.num_decodes else [next(known) for _ in range(num)]
            slot = self._slot_of[row]
            adapter = None if slot is None else self._in_slots[slot]
            held = self._compute(self._tables[row], start, tokens, adapter)
            if index >= num_plain:
                assert tokens[0] == self._last[row] and num == 1 + plan.num_drafts[index - num_plain]
                num_accepted.append(_num_accepted(held, tokens[1:]))
                held = held[: num_accepted[-1] + 1]
            if plan.samples[index]:
                self.read.append(held[-1])
                self._last[row] = next_token(held[-1])
                sampled.append(self._last[row])
        assert next(known, None) is None
        return sampled, num_accepted

    def resize(self, num_blocks: int) -> None:
        """Lose what the blocks from ``num_blocks`` on hold, and refuse to touch them until there is memory again."""
        self._size = num_blocks * self._block_size
        for slot in range(self._size, len(self._slots)):
            self._slots[slot] = None

    def held(self, block: int) -> list[int | None]:
        """Return what a block holds at each of its positions."""
        return self._slots[block * self._block_size : (block + 1) * self._block_size]

    def check(self, seq: Sequence, num_tokens: int) -> None:
        """Raise AssertionError unless what the sequence's next token reads is its own, in every group."""
        own = contents(seq.token_ids[:num_tokens], seq.adapter)
        for table, window in zip(seq.block_tables, self._windows, strict=True):
            first = _first(window, num_tokens)
            held = [self._slots[self._slot(table, position)] for position in range(first, num_tokens)]
            assert held == own[first:], f"{seq!r} reads what is not its own: {table}"

    def _apply(self, plan: BatchPlan) -> None:
        before = list(self._slots)
        read, written = {one.slot for one in plan.swap_ins}, [one.slot for one in plan.swap_outs]
        assert len(set(written)) == len(written) and not read & set(written), (
            "a plan writes no slot twice, nor one it reads"
        )
        for one in plan.swap_outs:
            self.on_host[one.slot] = self.held(one.block)
        targets = [copy.target for copy in plan.block_copies]
        assert len(set(targets)) == len(targets), "a plan copies nothing twice to one place"
        for copy in plan.block_copies:
            for offset in range(self._block_size):
                source, target = (block * self._block_size + offset for block in (copy.source, copy.target))
                self._slots[target] = before[source]
        for one in plan.swap_ins:
            self._slots[one.block * self._block_size : (one.block + 1) * self._block_size] = self.on_host[one.slot]
        self.num_swaps += Counter(out=len(plan.swap_outs), back=len(plan.swap_ins))
        self._in_slots |= {write.slot: write.adapter for write in plan.adapter_writes}
        for start in plan.row_starts:
            self._slot_of[start.row] = start.adapter_slot
            assert start.epoch > self._epoch, "epochs count up"
            self._epoch = start.epoch
            self._tables[start.row], self._last[start.row] = [[] for _ in self._windows], start.last_token_id
        for one in plan.row_tokens:
            self._last[one.row] = one.token_id
        written = [(one.row, one.group, at) for one in plan.table_writes for at, _ in enumerate(one.blocks, one.at)]
        assert len(set(written)) == len(written), "a plan writes no entry twice"
        for write in plan.table_writes:
            table = self._tables[write.row][write.group]
            assert write.at <= len(table), "tables grow at their end"
            table[write.at : write.at + len(write.blocks)] = write.blocks

    def _compute(self, tables: list[list[int]], start: int, tokens: list[int], adapter: int | None) -> list[int]:
        """Return what the cache then holds at each of the tokens."""
        result = []
        content = self._slots[self._slot(tables[0], start - 1)] if start else 0
        for position, token_id in enumerate(tokens, start):
            assert content is not None, f"position {position - 1} was never computed"
            self._read(tables, position)
            content = extend(content, token_id, adapter)
            for table in tables:
                self._slots[self._slot(table, position)] = content
            result.append(content)
        return result

    def _read(self, tables: list[list[int]], position: int) -> None:
        """Read what a token attends to: all groups hold the same for a position, and lack nothing of their windows."""
        for table, window in zip(tables, self._windows, strict=True):
            for before in range(_first(window, position), position):
                held = self._slots[self._slot(table, before)]
                assert held is not None, f"position {before} is not there"
                others = (
                    other
                    for other, reach in zip(tables, self._windows, strict=True)
                    if before >= _first(reach, position)
                )
                assert all(self._slots[self._slot(other, before)] == held for other in others)

    def _slot(self, table: list[int], position: int) -> int:
        block, offset = divmod(position, self._block_size)
        slot = table[block] * self._block_size + offset
        assert slot < self._size, f"block {table[block]} is not there"
        return slot


def _num_accepted(held: list[int], drafts: list[int]) -> int:
    """Return how many drafts are what the model samples in their place, up to the first that is not."""
    agree = [next_token(content) == draft for content, draft in zip(held, drafts, strict=False)]
    return (*agree, False).index(False)


def _first(window: int | None, position: int) -> int:
    """Return the first position that a token at ``position`` attends to."""
    return 0 if window is None else max(0, position - window + 1)

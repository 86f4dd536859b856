"""The sequences that run: each has a row of the executor and KV blocks, which it keeps until no step in flight touches them."""

import heapq
from collections import deque

from flyball_runtime.core.past import Past
from flyball_runtime.core.request import Sequence, SequenceStatus
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.kv_cache import KVCache, PrefixMatch
from flyball_runtime.scheduler.adapters import AdapterSlots
from flyball_runtime.scheduler.forks import Forks
from flyball_runtime.scheduler.plan import BlockSwap, RowStart, Step, TableWrite
from flyball_runtime.scheduler.queue import WaitingQueue


class Seats:
    """Starts and stops sequences.

    Attributes:
        running: by request id, in order of admission.
        in_flight: the steps that are planned and not committed, the oldest first.
        leaving: blocks of what has ended, with the number of the last step that may touch them.
    """

    def __init__(
        self, num_seats: int, kv_cache: KVCache, waiting: WaitingQueue, forks: Forks, adapters: AdapterSlots
    ) -> None:
        self.running: dict[str, Sequence] = {}
        self.in_flight: deque[Step] = deque()
        self.leaving: list[tuple[int, list[int]]] = []
        self._free_rows = list(range(num_seats))  # a heap, so that running rows stay dense at the low end
        self._num_starts = 0
        self._kv = kv_cache
        self._waiting = waiting
        self._forks = forks
        self._adapters = adapters

    def start(self, step: Step, seq: Sequence, match: PrefixMatch, sampling: SamplingParams) -> None:
        """Give a sequence a row with these settings, and its blocks, in a step. The caller has checked that there are some."""
        for source, target in self._kv.admit(seq, match):
            step.copy_block(source, target)
        step.swap_ins += [BlockSwap(block, slot) for block, slot in self._kv.swap_in(seq, match)]
        step.num_host_hit_tokens += match.num_host_tokens
        row = seq.row = heapq.heappop(self._free_rows)
        seq.status = SequenceStatus.RUNNING
        self.running[seq.request_id] = seq
        self._forks.started(seq)
        self._num_starts += 1
        slot = None if seq.adapter is None else self._adapters.take(step, seq.adapter)
        step.row_starts.append(RowStart(row, self._num_starts, seq.token_ids[-1], sampling, Past.of(seq), slot))
        step.table_writes += [TableWrite(row, 0, table.copy(), group) for group, table in enumerate(seq.block_tables)]

    def stop(self, seq: Sequence) -> None:
        """Take row and blocks away. A sequence that is to wait again is in the queue by now."""
        heapq.heappush(self._free_rows, row_of(seq))
        seq.row = None
        del self.running[seq.request_id]
        self._forks.stopped(seq)
        if seq.adapter is not None:
            self._adapters.leave(seq.adapter)
        self._waiting.release(seq)
        blocks = self._kv.detach(seq)
        last_step = next((step for step in reversed(self.in_flight) if seq in step.sequences), None)
        if last_step is None:
            self._kv.release(blocks)
        else:
            self.leaving.append((last_step.plan.number, blocks))

    def let_go(self, number: int) -> None:
        """Free the blocks of ended sequences that no step after this one may touch."""
        for last_step, blocks in self.leaving:
            if last_step <= number:
                self._kv.release(blocks)
        self.leaving = [one for one in self.leaving if one[0] > number]


def row_of(seq: Sequence) -> int:
    """Return the row of a running sequence."""
    assert seq.row is not None, f"{seq!r} runs without a row"
    return seq.row

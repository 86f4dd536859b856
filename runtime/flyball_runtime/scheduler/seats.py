"""The sequences that run: each has a row of the executor and KV blocks, which it keeps until no step in flight touches them."""

import heapq
from bisect import bisect_left, insort
from collections import deque
from itertools import islice
from operator import attrgetter

from flyball_runtime.core.past import Past
from flyball_runtime.core.request import Sequence, SequenceStatus
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.kv_cache import KVCache, PrefixMatch
from flyball_runtime.scheduler.adapters import AdapterSlots
from flyball_runtime.scheduler.forks import Forks
from flyball_runtime.scheduler.plan import BlockSwap, RowStart, Step, TableWrite
from flyball_runtime.scheduler.queue import WaitingQueue

epoch_of = attrgetter("epoch")


class Seats:
    """Starts and stops sequences, and knows what each has to compute next.

    Attributes:
        running: by request id, in order of admission.
        decodes: those that compute one token in each step, in order of admission.
        prefills: those with more to compute, likewise. The rest of what runs waits for a token of a step in flight.
        at_edge: the decodes whose computed tokens end with a block, in any order.
        in_flight: the steps that are planned and not committed, the oldest first.
        leaving: blocks of what has ended, with the number of the last step that may touch them.
    """

    def __init__(
        self, num_seats: int, kv_cache: KVCache, waiting: WaitingQueue, forks: Forks, adapters: AdapterSlots
    ) -> None:
        self.running: dict[str, Sequence] = {}
        self.decodes: list[Sequence] = []
        self.prefills: list[Sequence] = []
        self.at_edge: list[Sequence] = []
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
        seq.epoch = self._num_starts
        self.sort(seq)
        slot = None if seq.adapter is None else self._adapters.take(step, seq.adapter)
        step.row_starts.append(RowStart(row, seq.epoch, seq.token_ids[-1], sampling, Past.of(seq), slot))
        step.table_writes += [TableWrite(row, 0, table.copy(), group) for group, table in enumerate(seq.block_tables)]

    def sort(self, seq: Sequence) -> None:
        """Put a running sequence where it belongs, after a change of its uncomputed tokens or anything but a decode's step."""
        self._take_out(seq)
        start, num_uncomputed = seq.num_computed_tokens, seq.num_uncomputed_tokens
        if num_uncomputed == 1 and start + 1 < seq.max_total_tokens:
            insort(self.decodes, seq, key=epoch_of)
            if start % self._kv.block_size == 0:
                self.at_edge.append(seq)
        elif num_uncomputed > 1 or (seq.pooling is not None and num_uncomputed):
            insort(self.prefills, seq, key=epoch_of)
        # else its last token is pending, its last step is in flight, or it is a computed beam

    def advance(self, step: Step) -> None:
        """Count the tokens of a step's decodes as computed, beams aside."""
        block_size, last = self._kv.block_size, []
        num = step.num_decodes - step.num_beams
        for seq, start in zip(islice(step.sequences, num), step.starts, strict=False):
            seq.num_computed_tokens = end = start + 1
            if end % block_size == 0:
                step.filled.append((seq, start, end))
                self.at_edge.append(seq)
            if end + 1 >= seq.max_total_tokens:
                last.append(seq)
        for seq in last:
            self._take_out(seq)
        step.last = last

    def _take_out(self, seq: Sequence) -> None:
        for ordered in (self.decodes, self.prefills):
            at = bisect_left(ordered, seq.epoch, key=epoch_of)
            if at < len(ordered) and ordered[at] is seq:
                del ordered[at]
        if seq in self.at_edge:
            self.at_edge.remove(seq)

    def stop(self, seq: Sequence) -> None:
        """Take row and blocks away. A sequence that is to wait again is in the queue by now."""
        heapq.heappush(self._free_rows, row_of(seq))
        seq.row = None
        self._take_out(seq)
        del self.running[seq.request_id]
        self._forks.stopped(seq)
        if seq.adapter is not None:
            self._adapters.leave(seq.adapter)
        self._waiting.release(seq)
        blocks = self._kv.detach(seq)
        touching = [step for step in self.in_flight if seq in step.sequences]
        for step in touching:
            step.has_ended = True
        if touching:
            self.leaving.append((touching[-1].plan.number, blocks))
        else:
            self._kv.release(blocks)

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

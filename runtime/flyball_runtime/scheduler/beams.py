"""The beams of all searches: which of them run, how they take over each other's blocks, and when they advance."""

from collections.abc import Callable, Mapping

from flyball_runtime.core.beam_search import BeamSearch
from flyball_runtime.core.request import Sequence, SequenceStatus, TokenLogprobs
from flyball_runtime.kv_cache import KVCache, PrefixMatch
from flyball_runtime.scheduler.outlook import Outlook
from flyball_runtime.scheduler.plan import RowToken, Step, TableWrite
from flyball_runtime.scheduler.queue import WaitingQueue
from flyball_runtime.scheduler.search import Beam, Search, searches
from flyball_runtime.scheduler.seats import Seats, row_of

AddChunk = Callable[[Step, Sequence, int, int], int]
"""Schedules as much of a sequence as a budget allows, and at least so much if it does; returns how many tokens that is."""


class Beams:
    """The searches that have not ended, by the ids of their requests, and the running sequences of their beams.

    Args:
        add_chunk: the scheduler's.
    Attributes:
        searches: by the ids of their requests.
    """

    def __init__(
        self, kv_cache: KVCache, waiting: WaitingQueue, seats: Seats, outlook: Outlook, add_chunk: AddChunk
    ) -> None:
        self._kv = kv_cache
        self._waiting = waiting
        self._seats = seats
        self._outlook = outlook
        self._add_chunk = add_chunk
        self.searches: dict[str, Search] = {}
        self._beam_of: dict[str, tuple[Search, Beam]] = {}  # by the id of the running sequence

    @property
    def num_reserved_seats(self) -> int:
        """Seats that running searches need beside those that they have."""
        return sum(search.settings.width - len(search.running) for search in self._active)

    @property
    def _active(self) -> list[Search]:
        """Those with a running sequence. The root of each other one waits in the queue."""
        return [search for search in self.searches.values() if search.running]

    def add(self, root: Sequence, settings: BeamSearch) -> None:
        """Take up the search of a request that is about to wait in the queue."""
        self.searches[root.request_id] = Search(root, settings)

    def running_of(self, root: Sequence) -> list[Sequence]:
        return self.searches[root.request_id].running

    def beam_of(self, seq: Sequence) -> Beam:
        """Return the beam that a running sequence computes."""
        return self._beam_of[seq.request_id][1]

    def root_of(self, seq: Sequence) -> Sequence:
        """Return the sequence of the request that a running one belongs to."""
        return self._beam_of[seq.request_id][0].root if seq.request_id in self._beam_of else seq

    # in a plan

    def start(self, step: Step, root: Sequence, match: PrefixMatch) -> None:
        """Have a search run whose root was the head of the queue."""
        self._start(step, self.searches[root.request_id], root, match)

    def go_on(self, step: Step) -> None:
        """Tell the executor what the sequences of a step's beams have become, before they take further blocks."""
        for seq in step.beams:
            row, beam = row_of(seq), self.beam_of(seq)
            step.row_tokens.append(RowToken(row, seq.token_ids[-1]))
            if beam.has_moved:
                step.table_writes += [
                    TableWrite(row, 0, table.copy(), group) for group, table in enumerate(seq.block_tables)
                ]
                for source, target in beam.copies:
                    step.copy_block(source, target)
                beam.has_moved, beam.copies = False, []

    def join(self, step: Step, budget: int, most: int) -> int:
        """Start beams of running searches, as far as there are blocks; return how many tokens that schedules.

        Of each search one beam at a time computes more than its last token: several could take each other's blocks.

        Args:
            most: tokens of any step.
        """
        before = step.num_tokens
        for search in self._active:
            for beam in search.missing:
                left = budget - (step.num_tokens - before)
                if search.is_behind or not self._join(step, search, beam, left, most):
                    break
        return step.num_tokens - before

    def _join(self, step: Step, search: Search, beam: Beam, budget: int, most: int) -> bool:
        """Start a beam, if need be in the place of others of its search that are computed; False when it cannot run now."""
        seq = search.carry(beam, self._kv.block_size)
        match = self._match(search, seq, most)
        while not self._kv.can_join(match):
            idle = search.idle[-1:]
            if self._seats.in_flight or not idle:
                return False
            self.stop(idle)
            step.preempted += idle
            if not search.running:
                return False
            match = self._match(search, seq, most)
        num_remaining = len(seq.token_ids) - match.num_tokens
        if self._outlook.chunk_len(num_remaining, budget) == 0:
            return False
        self._waiting.join(seq)
        self._start(step, search, seq, match)
        step.num_recomputed_tokens += num_remaining - 1
        self._add_chunk(step, seq, budget, 1)
        return True

    def _match(self, search: Search, seq: Sequence, most: int) -> PrefixMatch:
        """Return what other beams, or the prefix cache, have of a beam."""
        best: PrefixMatch | None = None
        for source in search.running:
            match = self._kv.match_fork(seq, source, most)
            if match is not None and (best is None or match.num_tokens > best.num_tokens):
                best = match
                if match.num_tokens == seq.num_reusable_tokens:
                    return match
        cached = self._kv.match_prefix(seq, most)
        return cached if best is None or cached.num_tokens > best.num_tokens else best

    def _start(self, step: Step, search: Search, seq: Sequence, match: PrefixMatch) -> None:
        self._seats.start(step, seq, match, search.sampling)
        beam = next(beam for beam in search.beams if beam.token_ids is seq.token_ids)
        self._assign(search, beam, seq)

    # between plans

    def stop(self, stopped: list[Sequence]) -> None:
        """Take the blocks of some beams of a search. If no other one runs, its request waits in the queue."""
        search = self._beam_of[stopped[0].request_id][0]
        root, goes_on = search.root, any(seq not in stopped for seq in search.running)
        if not goes_on:
            self._waiting.push(root)  # before its client is told that nothing of it runs
        for seq in stopped:
            self._stop(seq)
        if not goes_on:
            search.carry(search.missing[0], self._kv.block_size)
            root.status = SequenceStatus.WAITING
            root.num_preemptions = max(1, root.num_preemptions)

    def report(self, step: Step, candidates: Mapping[int, TokenLogprobs]) -> list[Search]:
        """Note what may follow the beams of a step; return the searches whose beams are all computed now.

        Args:
            candidates: by index of the sequence among those that the step samples.
        """
        computed: dict[str, Search] = {}
        for index, seq in enumerate(step.sampled):
            if searches(seq) and seq.row is not None:
                search, beam = self._beam_of[seq.request_id]
                beam.candidates = candidates[index]
                if search.is_computed:
                    computed[search.root.request_id] = search
        return list(computed.values())

    def advance(self, search: Search) -> bool:
        """Have the sequences of a search go on with the next beams; False if it is over.

        A sequence goes on with a beam that continues its own, or else with any other, whose blocks it then shares.
        """
        children = search.advance()
        heirs: dict[Beam, Beam] = {}
        for beam, parent in children:
            heirs.setdefault(parent, beam)
        spare = [beam.seq for beam in search.beams if beam.seq is not None and beam not in heirs]
        if not children:
            return False
        search.beams = [beam for beam, _ in children]
        for beam, parent in children:
            if parent.seq is None:
                continue
            if heirs[parent] is beam:
                self._assign(search, beam, parent.seq)
            elif spare:
                seq = spare.pop()
                beam.copies, beam.has_moved = self._kv.branch(seq, parent.seq), True
                self._assign(search, beam, seq)
        if spare:
            self.stop(spare)
        return True

    def end(self, root: Sequence) -> None:
        """Stop what runs of a search that is over."""
        for seq in self.searches.pop(root.request_id).running:
            self._stop(seq)

    def _assign(self, search: Search, beam: Beam, seq: Sequence) -> None:
        """Have a running sequence compute a beam from now on."""
        seq.token_ids = beam.token_ids
        seq.num_uncomputed_tokens = len(beam.token_ids) - seq.num_computed_tokens
        self._seats.sort(seq)
        beam.seq = seq
        self._beam_of[seq.request_id] = search, beam

    def _stop(self, seq: Sequence) -> None:
        self._seats.stop(seq)
        _, beam = self._beam_of.pop(seq.request_id)
        beam.seq, beam.copies, beam.has_moved = None, [], False


def plain_first(sequences: list[Sequence]) -> tuple[list[Sequence], int]:
    """Return sequences in an order that puts beams last, and how many beams there are."""
    beams = [seq for seq in sequences if searches(seq)]
    return [seq for seq in sequences if not searches(seq)] + beams, len(beams)

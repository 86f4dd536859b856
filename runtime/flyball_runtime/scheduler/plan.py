"""What one step computes: a plan for whoever runs it, and what the scheduler remembers until the tokens are there."""

from array import array
from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from itertools import islice
from typing import Literal

from msgspec import Struct, field, structs

from flyball_runtime.core.past import Past
from flyball_runtime.core.pooling import PoolSpan
from flyball_runtime.core.prompt_span import PromptSpan
from flyball_runtime.core.request import FinishReason, Hypothesis, Sequence
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.kv_cache import Computed

Ending = FinishReason | Literal["failed"]

Endings = list[tuple[Sequence, Ending]]
"""Sequences that a step has ended, with the reason."""


class RowStart(Struct, frozen=True, array_like=True):
    """A sequence takes a row over.

    Attributes:
        row: index into whatever an executor keeps per running sequence.
        epoch: counts the starts of all rows, so that no two are alike.
        last_token_id: the last token that is known. A decode computes it, unless the row has sampled one by then.
        sampling: its settings, with a seed.
        past: None where the settings do not look at it. From here on an executor knows itself what the row samples.
        adapter_slot: of the LoRA adapter that computes it; None for the base model alone.
    """

    row: int
    epoch: int
    last_token_id: int
    sampling: SamplingParams
    past: Past | None = None
    adapter_slot: int | None = None


class AdapterWrite(Struct, frozen=True, array_like=True):
    """From this plan on, a slot has the LoRA adapter of this number."""

    slot: int
    adapter: int


class RowToken(Struct, frozen=True, array_like=True):
    """The last token of a row, in the place of what the row sampled last."""

    row: int
    token_id: int


class TableWrite(Struct, frozen=True, array_like=True):
    """From entry ``at`` on, a row's block table of a group of layers holds ``blocks``. A plan writes no entry twice.

    What an entry holds that is behind the group's window says nothing, and is not read.
    """

    row: int
    at: int
    blocks: list[int]
    group: int = 0


class BlockCopy(Struct, frozen=True, array_like=True):
    """The content of block ``source`` is to be in block ``target`` too. All of a plan's are read before any is written."""

    source: int
    target: int


class BlockSwap(Struct, frozen=True, array_like=True):
    """Block ``block`` and slot ``slot`` of host memory, one of which gets the content of the other."""

    block: int
    slot: int


class BatchPlan(Struct, frozen=True, kw_only=True):
    """One step, decided: a value that says all that an executor has to know, if it has run every plan before it.

    It can be sent to every rank of a replica, kept and run again, or run while the next one is planned. Before the step an
    executor does the ``swap_outs``, ``block_copies`` and ``swap_ins``, in this order, then the ``adapter_writes``,
    ``row_starts``, ``row_tokens`` and ``table_writes``. In the step ``rows[i]`` computes its tokens ``[starts[i], starts[i] +
    num_scheduled[i])``. The first ``num_decodes`` entries compute one token each, the row's last; the tokens of the others
    are in ``token_ids``, one entry after another, each an unsigned 32-bit integer in the machine's order: nobody has to make
    a Python integer of each on the way to a tensor.

    Attributes:
        number: how many plans came before.
        samples: True where an entry reaches the sequence's last token, so that its logits give a new one, the
            ``starts[i] + num_scheduled[i]``-th of the sequence. It becomes the row's last. Never of a pooled sequence.
        num_tokens: of all entries.
        num_context_tokens: K, the tokens in the cache that the decodes read, their own included.
        prefill_work: Q, the pairs of a token and one that it attends to, over all entries but the decodes.
        num_drafts: at least 1 each.
        swap_outs: blocks to copy to host memory. No slot is in ``swap_ins`` too.
        swap_ins: blocks to copy from there.
    """

    number: int
    rows: list[int]
    starts: list[int]
    num_scheduled: list[int]
    samples: list[bool]
    num_decodes: int
    num_tokens: int
    num_context_tokens: int
    prefill_work: int
    token_ids: bytes
    row_starts: list[RowStart]
    table_writes: list[TableWrite]
    block_copies: list[BlockCopy]
    prompt_spans: list[PromptSpan] = []
    pool_spans: list[PoolSpan] = []
    num_drafts: list[int] = []
    row_tokens: list[RowToken] = []
    adapter_writes: list[AdapterWrite] = []
    swap_outs: list[BlockSwap] = []
    swap_ins: list[BlockSwap] = []

    @property
    def num_prefill_tokens(self) -> int:
        num_prefill_tokens = self.num_tokens - self.num_decodes
        if self.num_drafts:
            num_prefill_tokens -= len(self.num_drafts) + sum(self.num_drafts)
        return num_prefill_tokens


class BlockedBy(StrEnum):
    """What kept the head of the queue out of a step: the limit to raise if it should wait less.

    When several do, the first in this order that applies: seats and blocks stay short for many steps, while a spent
    budget is back in the next one, and raising it would not help a request that has no seat or no blocks.
    """

    NONE = "none"
    """Nobody waits."""
    SEQS = "seqs"
    """max_num_seqs sequences are running."""
    KV = "kv"
    """Too few KV blocks for the prompt, or running sequences had to be preempted for blocks in this step."""
    RESERVE = "reserve"
    """The blocks for the prompt are there, but would be taken from what running sequences are expected to need."""
    BUDGET = "budget"
    """The step's tokens are spent; without chunked prefill: too few are left for the whole prompt."""
    STEP_TIME = "step_time"
    """The step would be predicted to take longer than the target. Said by a step-time governor."""
    ADAPTERS = "adapters"
    """All adapter slots are those of other running sequences. Requests for the base model go on."""


class Step(Struct):
    """One planned step, from its first decode until it is committed.

    Attributes:
        plan: for the executor; there once the step is whole.
        num_beams: how many of the decodes, the last ones, are beams. What these sample is not used.
        sequences: whose the plan's entries are, in its order.
        preempted: sequences that lost their blocks for this step.
        admitted: sequences that run for the first time, and were looked up in the prefix cache.
        lacks_blocks: whether a prompt in progress is computed in a smaller chunk, or in none, for want of KV blocks.
        num_moved_blocks: how many blocks are copied out of memory that is given up.
        blocked_by: why the head of the queue is not in it.
        num_cached_tokens: prompt tokens found in the prefix cache, by request id, of the sequences first admitted in
            this step that had any.
        num_prefix_queried_tokens: prompt tokens of the sequences first admitted in this step.
        num_recomputed_tokens: tokens that sequences readmitted in this step had computed before their preemption and
            must compute again.
        num_host_hit_tokens: tokens of sequences started in this step that are copied back from host memory.
        filled: the decodes whose tokens fill a block, beams aside, and where those are.
        last: the decodes that end with their next tokens at the latest, beams aside.
        has_ended: whether a sequence has ended since the step was planned.
        drafts: of the last entries.
        num_accepted: of each of them, once the step is committed.
        got_tokens: the sequences that have got tokens, in the plan's order, likewise.
        num_taken: how many tokens those with drafts have got, by request id, likewise.
        hypotheses: what the beam searches have found that ended with the step, by request id, likewise.
    """

    sequences: list[Sequence]
    starts: list[int]
    num_scheduled: list[int]
    samples: list[bool]
    num_decodes: int
    num_tokens: int
    num_context_tokens: int
    prefill_work: int = 0
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    row_starts: list[RowStart] = []
    table_writes: list[TableWrite] = []
    block_copies: list[BlockCopy] = []
    prompt_spans: list[PromptSpan] = []
    pool_spans: list[PoolSpan] = []
    row_tokens: list[RowToken] = []
    adapter_writes: list[AdapterWrite] = []
    swap_outs: list[BlockSwap] = []
    swap_ins: list[BlockSwap] = []
    num_beams: int = 0
    preempted: list[Sequence] = []
    admitted: list[Sequence] = []
    lacks_blocks: bool = False
    num_moved_blocks: int = 0
    blocked_by: BlockedBy = BlockedBy.NONE
    num_cached_tokens: dict[str, int] = {}
    num_prefix_queried_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_host_hit_tokens: int = 0
    filled: list[Computed] = []
    last: list[Sequence] = []
    has_ended: bool = False
    drafts: "list[array[int]]" = []
    num_accepted: Collection[int] = ()
    got_tokens: list[Sequence] = []
    num_taken: dict[str, int] = {}
    hypotheses: dict[str, list[Hypothesis]] = {}
    plan: BatchPlan = None  # type: ignore[assignment]  # until seal()

    @classmethod
    def of_decodes(cls, decodes: list[Sequence], starts: list[int], num_beams: int = 0) -> "Step":
        """Start with one token of each of ``decodes``, the last of which are beams; takes the lists over."""
        num = len(decodes)
        step = cls(decodes, starts, [1] * num, [True] * num, num, num, num_context_tokens=sum(starts) + num)
        step.num_beams = num_beams
        return step

    @property
    def beams(self) -> list[Sequence]:
        """The decodes that are beams."""
        return self.sequences[self.num_decodes - self.num_beams : self.num_decodes]

    @property
    def num_prefix_hit_tokens(self) -> int:
        return sum(self.num_cached_tokens.values()) if self.num_cached_tokens else 0

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that sample, in the plan's order."""
        return [seq for seq, samples in zip(self.sequences, self.samples, strict=True) if samples]

    @property
    def drafted(self) -> "list[tuple[Sequence, array[int]]]":
        """The sequences with drafts, in the plan's order."""
        return list(zip(self.sequences[len(self.sequences) - len(self.drafts) :], self.drafts, strict=True))

    def add_chunk(self, seq: Sequence, num_tokens: int) -> None:
        """Add ``num_tokens`` more of a sequence, whose tokens are all known."""
        start = seq.num_computed_tokens
        end = start + num_tokens
        if seq.num_unscored_tokens:
            self._add_span(seq, end)
        if seq.pooling is not None:
            self._add_pool_span(seq, start, end)
        self._add_entry(seq, start, seq.token_ids[start:end])
        self.samples.append(seq.pooling is None and end == len(seq.token_ids))

    def _add_span(self, seq: Sequence, end: int) -> None:
        """Have prompt tokens scored in an entry that is about to be added and computes those up to ``end``."""
        at, end = seq.num_scored_tokens, min(end, seq.num_prompt_tokens - 1)
        if end > at:
            targets = seq.token_ids[at + 1 : end + 1].tobytes()
            self.prompt_spans.append(PromptSpan(len(self.sequences), at, seq.sampling.prompt_logprobs or 0, targets))
            seq.num_scored_tokens = end

    def _add_pool_span(self, seq: Sequence, start: int, end: int) -> None:
        """Have hidden states of an entry that is about to be added pooled."""
        ends = end == seq.num_prompt_tokens
        if seq.pooling == "mean":
            self.pool_spans.append(PoolSpan(len(self.sequences), start, end if ends else 0))
        elif ends:
            self.pool_spans.append(PoolSpan(len(self.sequences), end - 1, 1))

    def verify(self, index: int, drafts: "array[int]") -> None:
        """Have the decode at ``index`` compute drafts too. Nothing but further drafts is added to the step afterwards."""
        seq, start = self.sequences.pop(index), self.starts.pop(index)
        self.num_scheduled.pop(index)
        self.samples.pop(index)
        self.num_decodes -= 1
        self.num_tokens -= 1
        self.num_context_tokens -= start + 1
        self.prompt_spans = [structs.replace(span, entry=span.entry - 1) for span in self.prompt_spans]
        self.pool_spans = [structs.replace(span, entry=span.entry - 1) for span in self.pool_spans]
        self.drafts.append(drafts)
        self._add_entry(seq, start, seq.token_ids[start:] + drafts)
        self.samples.append(True)

    def fill_drafts(self, token_ids: Collection[int]) -> None:
        """Take the drafts that the executor's draft model has put into the places of the plan's, one entry after another."""
        tokens = iter(token_ids)
        self.drafts = [array("I", islice(tokens, len(drafts))) for drafts in self.drafts]

    def _add_entry(self, seq: Sequence, start: int, token_ids: "array[int]") -> None:
        num_tokens = len(token_ids)
        self.sequences.append(seq)
        self.starts.append(start)
        self.num_scheduled.append(num_tokens)
        self.token_ids += token_ids
        self.num_tokens += num_tokens
        self.prefill_work += num_tokens * start + num_tokens * (num_tokens + 1) // 2

    def copy_block(self, source: int, target: int) -> None:
        """Have the content that ``source`` is to have before the step in ``target``, whatever was to be there."""
        slot = next((one.slot for one in self.swap_ins if one.block == source), None)
        if slot is not None:
            self.swap_ins.append(BlockSwap(target, slot))
            return
        origin = next((one.source for one in self.block_copies if one.target == source), source)
        # a cached block may have been moved to the target, and then evicted
        self.block_copies = [one for one in self.block_copies if one.target != target]
        self.block_copies.append(BlockCopy(origin, target))

    def move_blocks(self, moved: Mapping[int, int]) -> None:
        """Have the content that some blocks are to have before the step in others, in their places."""
        self.num_moved_blocks += len(moved)
        targets = {one.target for one in self.block_copies} | {one.block for one in self.swap_ins}
        self.swap_ins = [BlockSwap(moved.get(one.block, one.block), one.slot) for one in self.swap_ins]
        self.block_copies = [BlockCopy(one.source, moved.get(one.target, one.target)) for one in self.block_copies]
        self.block_copies += [BlockCopy(old, new) for old, new in moved.items() if old not in targets]

    def seal(self, number: int) -> None:
        """Make the plan. Nothing is added to the step afterwards."""
        self.plan = BatchPlan(
            number=number,
            rows=[seq.row for seq in self.sequences],  # type: ignore[misc]
            starts=self.starts,
            num_scheduled=self.num_scheduled,
            samples=self.samples,
            num_decodes=self.num_decodes,
            num_tokens=self.num_tokens,
            num_context_tokens=self.num_context_tokens,
            prefill_work=self.prefill_work,
            token_ids=self.token_ids.tobytes(),
            row_starts=self.row_starts,
            table_writes=self.table_writes,
            block_copies=self.block_copies,
            prompt_spans=self.prompt_spans,
            pool_spans=self.pool_spans,
            num_drafts=[len(drafts) for drafts in self.drafts],
            row_tokens=self.row_tokens,
            adapter_writes=self.adapter_writes,
            swap_outs=self.swap_outs,
            swap_ins=self.swap_ins,
        )

    def take(
        self,
        sampled_token_ids: Collection[int | None],
        block_size: int,
        spoiled: Collection[int] = (),
        num_accepted: Collection[int] = (),
    ) -> tuple[Endings, list[Computed]]:
        """Append to its sequences what the step has sampled, except to those that have ended since the plan.

        Args:
            spoiled: as for ``Scheduler.commit``.
        Returns:
            What ``Scheduler.commit`` does, and where tokens were computed that fill blocks.
        """
        if len(self.sequences) == self.num_decodes and not self.num_beams:
            return self._take_decodes(list(sampled_token_ids))
        tokens = iter(sampled_token_ids)
        endings, filled = self._take_decodes(list(islice(tokens, self.num_decodes - self.num_beams)))
        if self.num_beams:
            self._take_beams(tokens, endings, filled, block_size)
        if len(self.sequences) > self.num_decodes:
            self._take_chunks(tokens, endings, filled, spoiled)
        if self.drafts:
            self.num_accepted = num_accepted
            self._take_verified(tokens, endings, filled)
        return endings, filled

    def _take_decodes(self, token_ids: list[int | None]) -> tuple[Endings, list[Computed]]:
        """Append their tokens to the decodes that are no beams.

        Some 256 of them take part in each step, so the loop does only what every one needs. Which blocks they fill, and
        which of them reach their lengths, is known since the step was planned.
        """
        decodes, filled = self.sequences[: len(token_ids)], self.filled
        endings: Endings = []
        if self.has_ended or None in token_ids:
            going_on = [(seq, token) for seq, token in zip(decodes, token_ids, strict=True) if seq.row is not None]
            endings = [(seq, "failed") for seq, token in going_on if token is None]
            failed = {seq for seq, _ in endings}
            filled = [one for one in filled if one[0].row is not None and one[0] not in failed]
            decodes = [seq for seq, token in going_on if token is not None]
            token_ids = [token for _, token in going_on if token is not None]
        for seq, token in zip(decodes, token_ids, strict=True):
            seq.token_ids.append(token)  # type: ignore[arg-type]
            if token in seq.stop_token_ids:
                endings.append((seq, "stop"))
        self.got_tokens += decodes
        if self.last:
            ended = {seq for seq, _ in endings}
            endings += [(seq, "length") for seq in self.last if seq.row is not None and seq not in ended]
        if len(endings) > 1:
            endings.sort(key=lambda one: one[0].epoch)
        return endings, filled

    def _take_beams(
        self, tokens: Iterator[int | None], endings: Endings, filled: list[Computed], block_size: int
    ) -> None:
        """Go on with the decodes that are beams. They get their tokens when all beams of a search are computed."""
        starts = self.starts[self.num_decodes - self.num_beams : self.num_decodes]
        for seq, start, token in zip(self.beams, starts, islice(tokens, self.num_beams), strict=True):
            if seq.row is None:
                continue
            if token is None:
                endings.append((seq, "failed"))
            elif (start + 1) % block_size == 0:
                filled.append((seq, start, start + 1))

    def _take_chunks(
        self, tokens: Iterator[int | None], endings: Endings, filled: list[Computed], spoiled: Collection[int]
    ) -> None:
        """Go on with the entries behind the decodes."""
        num = self.num_decodes
        part = slice(num, len(self.sequences) - len(self.drafts))
        chunks = zip(self.sequences[part], self.starts[part], self.num_scheduled[part], self.samples[part], strict=True)
        for entry, (seq, start, num_tokens, samples) in enumerate(chunks, num):
            token = next(tokens) if samples else None
            if seq.row is None:
                continue
            if (samples and token is None) or entry in spoiled:
                endings.append((seq, "failed"))
                continue
            filled.append((seq, start, start + num_tokens))
            if token is not None and seq.sampling.beam_search is None:
                seq.token_ids.append(token)
                self.got_tokens.append(seq)
                if ending := _ending(seq, token):
                    endings.append((seq, ending))
            elif seq.pooling is not None and start + num_tokens == seq.num_prompt_tokens:
                endings.append((seq, "stop"))

    def _take_verified(self, tokens: Iterator[int | None], endings: Endings, filled: list[Computed]) -> None:
        """Go on with the entries that verify drafts. What comes behind the token that ends a sequence is dropped."""
        for (seq, drafts), num_accepted, token in zip(self.drafted, self.num_accepted, tokens, strict=True):
            if seq.row is None:
                continue
            if token is None:
                endings.append((seq, "failed"))
                continue
            start = len(seq.token_ids)
            for one in (*drafts[:num_accepted], token):
                seq.token_ids.append(one)
                if ending := _ending(seq, one):
                    endings.append((seq, ending))
                    break
            self.got_tokens.append(seq)
            end = len(seq.token_ids)
            filled.append((seq, start - 1, min(start + num_accepted, end)))
            self.num_taken[seq.request_id] = end - start
            seq.num_computed_tokens = end - 1


def _ending(seq: Sequence, last_token_id: int) -> Ending | None:
    """Return why a sequence ends with its last token, or None."""
    if last_token_id in seq.stop_token_ids:
        return "stop"
    return "length" if len(seq.token_ids) >= seq.max_total_tokens else None

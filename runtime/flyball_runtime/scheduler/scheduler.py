"""The scheduler: plan steps, commit what they computed."""

import logging
from collections.abc import Collection, Iterator, Mapping
from math import inf

from flyball_protocol import Envelope, Limits, Objectives
from flyball_runtime.core.errors import EmptyPrompt, InvalidRequest, PromptTooLong
from flyball_runtime.core.request import Sequence, SequenceStatus, TokenLogprobs
from flyball_runtime.governor import MIN_CHUNK
from flyball_runtime.kv_cache import KVCache, PrefixMatch
from flyball_runtime.scheduler.adapters import AdapterSlots
from flyball_runtime.scheduler.beams import Beams, plain_first
from flyball_runtime.scheduler.drafts import Drafter
from flyball_runtime.scheduler.forks import Forks, num_shareable
from flyball_runtime.scheduler.limits import SchedulerConfig, inside, violations
from flyball_runtime.scheduler.outlook import Forecast, Lengths, Outlook, Pace
from flyball_runtime.scheduler.plan import BlockedBy, BlockSwap, Endings, Step, TableWrite
from flyball_runtime.scheduler.policies import POLICIES, Policy, choose_victim, edf, order_of, srpf
from flyball_runtime.scheduler.queue import WaitingQueue
from flyball_runtime.scheduler.search import searches
from flyball_runtime.scheduler.seats import Seats, epoch_of, row_of

logger = logging.getLogger(__name__)

MAX_BLOCK_COPIES = 64
"""Blocks that one step moves at most: some 100 MiB in a model of 8B parameters."""


class Scheduler:
    """Continuous batching without phases (after vLLM v1): each sequence has tokens, and some of them are computed.

    One step is ``plan()``, the model, ``commit()``. A plan spends one token budget: decodes first, so that a long
    prompt never holds up running streams; then chunks of prompts in progress; then new sequences, clients in turn, the
    head of the queue blocking the rest. A sequence is admitted when a seat, blocks for its whole prompt and some
    budget are there; layers with a sliding window have blocks for the window and one step's tokens instead, and take the
    next chunk's when what lies behind the window has been given back. Else only decodes take further blocks. When none is
    left, sequences are preempted: they lose their blocks and are computed again later (nothing new is admitted in such a step).

    The next step may be planned before the last is committed: a plan counts what it computes as computed, and a token
    that it samples as there, though nobody knows it yet. A sequence that turns out to have ended is then in a step more than
    it needed, and the token is dropped. Its blocks are free once the last step that may touch them is committed.
    Preemption waits until nothing is in flight, since what is may end sequences and free their blocks.

    What keeps every request moving: the envelope makes one sequence of ``max_model_len`` tokens fit under any limits,
    preemption never takes the first sequence in policy order while another one runs, and every admission gives each
    running sequence at least one token of the budget, so decodes never outnumber it.

    Drafts come last: what budget, time and blocks are left over, decodes take to have further tokens of theirs verified. How
    many tokens such a step gives is known when it is committed, so nothing is planned before, and nothing is drafted while
    other steps are in flight.

    Of a fork group, whose sequences have one prompt, one computes it. The others leave the queue meanwhile, and share its
    blocks when they are admitted: the last, partial one is copied, and the last token computed by each.

    A beam search is one request with one place in the queue. Once it runs, each of its beams is a sequence, and they advance
    together when all are computed. A beam that goes on from another one shares its blocks in the same way. Beams are preempted
    one by one, and join the others again without the queue; those that are computed give up their blocks for those that are
    not, so a search goes on even if its beams do not fit side by side. When its last beam is preempted, it waits in the queue.

    A sequence with a LoRA adapter needs a slot for it, which all that run with this adapter share. Where every slot is in use,
    it is held outside the queue; requests for the base model pass it, those with adapters do not.

    Lowered limits drain: running sequences go on, all of them decode in every step, and nobody is admitted until what
    runs is under the new limit. Not thread-safe; sequences are changed here only.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCache,
        *,
        policy: Policy | None = None,
        pace: Pace | None = None,
        forecast: Forecast | None = None,
        lengths: Lengths | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """Start with nothing to do.

        Args:
            policy: the order of requests, in the place of ``config.policy``.
            pace: asked for each chunk of a prompt; without chunked prefill nobody is.
            forecast: tells whether a deadline can be met; without it, one is lost when it has passed.
            lengths: of outputs; without it, requests are expected to get all tokens that they may, and no KV blocks are
                held back for what runs.
            drafter: guesses tokens of sequences that decode, to have several verified at once; without it none are.
        Raises:
            ConfigError: the KV cache cannot hold one sequence of ``max_model_len`` tokens.
        """
        self.config = config
        self.envelope: Envelope = config.envelope(kv_cache.num_blocks, kv_cache.block_size, kv_cache.windows)
        self._kv = kv_cache
        self._policy = policy or POLICIES[config.policy]
        self._outlook = Outlook(
            kv_cache, chunked=config.enable_chunked_prefill, pace=pace, forecast=forecast, lengths=lengths
        )
        self._drafter = drafter
        self._waiting = WaitingQueue(self._policy, config.fair_share)
        self._forks = Forks()
        self._adapters = AdapterSlots(config.max_loras)
        self._seats = Seats(config.max_num_seqs, kv_cache, self._waiting, self._forks, self._adapters)
        self._running, self._in_flight = self._seats.running, self._seats.in_flight
        self._beams = Beams(kv_cache, self._waiting, self._seats, self._outlook, self._add_chunk)
        self._unfinished: dict[str, Sequence] = {}
        self._num_submitted = 0
        self._num_planned = 0
        self._last_look_up: tuple[Sequence, PrefixMatch] | None = None
        self.set_limits(inside(config.start_limits(kv_cache.num_blocks), self.envelope))

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._forks.num_held + self._adapters.num_held

    @property
    def num_in_flight(self) -> int:
        """Steps that are planned and not committed."""
        return len(self._in_flight)

    @property
    def kv_drains(self) -> bool:
        """Whether more KV blocks are in use than a lowered limit allows."""
        return self._kv.drains

    @property
    def running(self) -> Iterator[Sequence]:
        """In order of admission."""
        return iter(self._running.values())

    @property
    def num_reserved_seats(self) -> int:
        """Seats that are kept for beams of running searches."""
        return self._beams.num_reserved_seats

    @property
    def limits(self) -> Limits:
        """The limits aimed at."""
        return self._limits

    @property
    def effective(self) -> Limits:
        """The limits that hold this moment: the target, or where a lowered one still drains, what is in use.

        Of the KV cache that is the blocks in use, and once those fit the target, the memory that is still to be given back.
        """
        target, num_running, kv = self._limits, len(self._running), self._kv
        if num_running <= self._most_running and kv.is_settled:
            return target
        num_blocks = kv.num_used_blocks if kv.num_used_blocks > kv.capacity else kv.size
        return Limits(
            max_num_seqs=max(target.max_num_seqs, num_running),
            kv_cache_fraction=num_blocks / kv.num_blocks if num_blocks > kv.capacity else target.kv_cache_fraction,
            max_num_batched_tokens=max(target.max_num_batched_tokens, num_running),
            step_time_target_ms=target.step_time_target_ms,
        )

    def set_limits(self, limits: Limits, kv_deadline_s: float = inf) -> None:
        """Aim at ``limits``. Raising one works at once; lowering one drains.

        Args:
            kv_deadline_s: from when on plans preempt for a lowered KV limit, by the clock of ``plan``.
        Raises:
            ValueError: outside the envelope.
        """
        reasons = violations(limits, self.envelope)
        if reasons:
            raise ValueError(" ".join(reasons))
        self._limits = limits
        self._most_running = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._outlook.set_step_time_target(limits.step_time_target_ms)
        self._kv.resize(round(limits.kv_cache_fraction * self._kv.num_blocks), kv_deadline_s)

    def set_objectives(self, objectives: Objectives | None) -> None:
        """Give requests without a deadline the one of the objectives; those that come from now on."""
        self._outlook.objectives = objectives

    def forget_adapter(self, adapter: int) -> None:
        """Free the slot of an adapter that is unloaded. No unfinished sequence has it."""
        self._adapters.forget(adapter)

    def give_back(self) -> None:
        """Give up memory above a lowered KV limit, where nothing runs whose blocks a step would have to move.

        Call it before memory is given back while no step is in flight.
        """
        if not self._running and self._kv.has_surplus:
            self._last_look_up = None
            self._kv.evict_surplus()
        self._kv.lose_memory()

    def submit(self, seq: Sequence) -> None:
        """Queue a new sequence. How many may wait is the front door's decision (``EngineClient``).

        Raises:
            EmptyPrompt, PromptTooLong: it could never run.
            InvalidRequest: a request of this id has not ended yet, or a beam search has more beams than there are seats.
        """
        if seq.num_prompt_tokens == 0:
            raise EmptyPrompt()
        least = seq.num_prompt_tokens + (seq.pooling is None)
        if not least <= seq.max_total_tokens <= self.config.max_model_len:
            raise PromptTooLong(seq.num_prompt_tokens, seq.sampling.max_tokens, self.config.max_model_len)
        if seq.request_id in self._unfinished:
            raise InvalidRequest(f"request_id {seq.request_id} is in use; wait for it to end or choose another.")
        if (beam_search := seq.sampling.beam_search) is not None:
            beam_search.check_seats(self.config.max_num_seqs)
            self._beams.add(seq, beam_search)
        seq.arrival_index = self._num_submitted
        self._num_submitted += 1
        self._unfinished[seq.request_id] = seq
        self._outlook.predict(seq)
        self._waiting.push(seq)

    def abort(self, request_id: str) -> bool:
        """End a request and give its blocks up; False when none of this id is unfinished."""
        seq = self._unfinished.get(request_id)
        if seq is None:
            return False
        if seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        elif seq.status is SequenceStatus.HELD and not self._adapters.drop(seq):
            self._forks.drop(seq)
        self._end(seq)
        return True

    def plan(self, now_s: float = 0.0) -> Step | None:
        """Decide the next step; None when there is nothing to compute, or not before a step in flight is committed.

        Args:
            now_s: by the clock of the sequences' ``arrived_s`` and of the deadline of ``set_limits``.
        """
        if self._in_flight and self._in_flight[-1].drafts:
            return None
        planned = self._plan_decodes(now_s)
        if planned is None:
            return None
        step, prefills = planned
        budget = self._limits.max_num_batched_tokens - step.num_tokens
        if self._beams.searches:
            budget -= self._beams.join(step, budget, self._limits.max_num_batched_tokens)
        if prefills:
            if self._policy in (edf, srpf):
                prefills.sort(key=lambda seq: (seq.is_late, order_of(seq)))
            budget -= self._add_chunks(step, prefills, budget)
        while prefills and not step.sequences and not self._in_flight:
            self._make_room(step, prefills)
            budget -= self._add_chunks(step, prefills, budget)
        if self._beams.searches and not step.sequences:
            budget -= self._beams.join(step, budget, self._limits.max_num_batched_tokens)
        if self._kv.has_surplus:
            self._compact(step)
        if self.num_waiting:
            step.blocked_by = self._admit(step, budget, now_s)
        if not step.sequences:
            return None
        if self._drafter is not None and not self._in_flight and not step.preempted:
            self._add_drafts(step, self._drafter, self._limits.max_num_batched_tokens - step.num_tokens)
        self._advance(step)
        return step

    def commit(
        self,
        step: Step,
        sampled_token_ids: Collection[int | None],
        spoiled: Collection[int] = (),
        num_accepted: Collection[int] = (),
        candidates: Mapping[int, TokenLogprobs] | None = None,
    ) -> Endings:
        """Record what the model computed in the oldest step in flight.

        ``step.got_tokens`` then names the sequences that got a token, their last; where drafts were accepted,
        ``step.num_taken`` says how many each got. A stop token is kept as the sequence's last token.

        Args:
            sampled_token_ids: one for each entry that samples, in the plan's order; None where the model's logits gave
                none. Such a sequence has failed, and its blocks leave the prefix cache: what they hold cannot be trusted.
            spoiled: entries whose hidden states are not finite; their pooled sequences have failed likewise.
            num_accepted: how many drafts are what the model chose, up to the first that is not, for each entry with drafts.
            candidates: the likeliest tokens, by index into ``sampled_token_ids``, at least of the beams.

        Returns:
            Each sequence that ended, with the reason; those that had ended since the plan are left out. Of a beam search the
            sequence of its request, when it has failed or is over; ``step.hypotheses`` then says what was found.

        Raises:
            ValueError: not as many tokens or counts as the plan asks for, or another step is older.
        """
        if not self._in_flight or self._in_flight[0] is not step:
            raise ValueError("commit() takes steps in the order in which they were planned, each once.")
        if len(sampled_token_ids) != (num_sampled := step.samples.count(True)):
            raise ValueError(f"got {len(sampled_token_ids)} sampled tokens for a plan that samples {num_sampled}.")
        if len(num_accepted) != len(step.drafts):
            raise ValueError(f"got {len(num_accepted)} counts of accepted drafts for {len(step.drafts)} entries.")
        self._in_flight.popleft()
        endings, filled = step.take(sampled_token_ids, self._kv.block_size, spoiled, num_accepted)
        if self._drafter is not None:
            for (seq, drafts), num in zip(step.drafted, num_accepted, strict=True):
                self._drafter.verified(seq, len(drafts), num)
                if seq.row is not None:
                    self._seats.sort(seq)
        if self._beams.searches:
            endings = list({self._beams.root_of(seq): ending for seq, ending in endings}.items())
        for seq, ending in endings:
            if ending == "failed":
                for one in self._running_of(seq):
                    self._kv.forget(one)
                self._end(seq)
        if filled:
            self._kv.register(filled)
        if self._kv.slides:
            self._slide(step)
        for seq, ending in endings:
            if ending != "failed":
                self._end(seq)
        if self._beams.searches:
            endings += self._advance_beams(step, candidates or {})
        if self._seats.leaving:
            self._seats.let_go(step.plan.number)
        return endings

    def _slide(self, step: Step) -> None:
        for seq, start, num in zip(step.sequences, step.starts, step.num_scheduled, strict=True):
            if seq.row is not None:
                self._kv.slide(seq, min(start + num, seq.num_computed_tokens))  # less where drafts were rejected

    def _plan_decodes(self, now_s: float) -> tuple[Step, list[Sequence]] | None:
        """Return a step of all decodes, each with a block for its token, and the sequences with more to compute.

        None when there are too few blocks, and what is in flight may free some.
        """
        preempted: list[Sequence] = []
        self._outlook.calm_down()
        step, growing = self._all_decodes()
        while self._kv.is_overdue(now_s) or (
            growing and len(growing) * self._kv.num_groups > self._kv.num_growable_blocks
        ):
            if self._in_flight:
                return None
            preempted.append(self._preempt())
            step, growing = self._all_decodes()
        if preempted:
            self._outlook.preempted(len(self._running))
            step.preempted = preempted
        if step.num_beams:
            self._beams.go_on(step)
        self._seats.at_edge.clear()
        if growing:
            self._kv.grow(growing)
            step.table_writes += [
                TableWrite(row_of(seq), len(table) - 1, table[-1:], group)
                for seq in growing
                for group, table in enumerate(seq.block_tables)
            ]
        return step, self._seats.prefills.copy()

    def _all_decodes(self) -> tuple[Step, list[Sequence]]:
        """Return a step of all decodes, and those among them whose blocks are full."""
        block_size, decodes = self._kv.block_size, self._seats.decodes.copy()
        growing: list[Sequence] = []
        if self._seats.at_edge:
            at_edge = sorted(self._seats.at_edge, key=epoch_of)
            growing = [seq for seq in at_edge if seq.num_computed_tokens == len(seq.block_tables[0]) * block_size]
        num_beams = 0
        if self._beams.searches:
            decodes, num_beams = plain_first(decodes)
        return Step.of_decodes(decodes, [seq.num_computed_tokens for seq in decodes], num_beams), growing

    def _add_drafts(self, step: Step, drafter: Drafter, budget: int) -> None:
        """Have decodes compute drafts behind their tokens, with what is left of budget, time and blocks."""
        if budget <= 0 or len(self._running) > drafter.max_batch_size:
            return
        drafted = [(seq, drafts) for seq in step.sequences[: step.num_decodes] if (drafts := drafter.draft(seq))]
        if not drafted:
            return
        drafted.sort(key=lambda one: drafter.expected(one[0]), reverse=True)
        expected = [(len(drafts), len(drafts) * drafter.expected(seq)) for seq, drafts in drafted]
        num_worth = self._outlook.num_worth(step, expected)
        for seq, _ in drafted[num_worth:]:
            drafter.pause(seq)
        num_left = self._outlook.num_drafts(step, num_worth, sum(num for num, _ in expected[:num_worth]), budget)
        for seq, drafts in drafted[:num_worth]:
            if fitting := drafts[: self._grow_for_drafts(step, seq, min(num_left, len(drafts)))]:
                step.verify(step.sequences.index(seq, 0, step.num_decodes), fitting)
                num_left -= len(fitting)

    def _grow_for_drafts(self, step: Step, seq: Sequence, num_drafts: int) -> int:
        """Return for how many drafts a decode has blocks, after giving it more if each running sequence can still take one."""
        num_fitting = len(seq.block_table) * self._kv.block_size - seq.num_computed_tokens - 1
        num_new = -(-(num_drafts - num_fitting) // self._kv.block_size)
        if num_new <= 0:
            return num_drafts
        if (num_new + len(self._running)) * self._kv.num_groups > self._kv.num_growable_blocks:
            return num_fitting
        self._kv.grow([seq] * num_new)
        step.table_writes += [
            TableWrite(row_of(seq), len(table) - num_new, table[-num_new:], group)
            for group, table in enumerate(seq.block_tables)
        ]
        return num_drafts

    def _compact(self, step: Step) -> None:
        """Have blocks moved out of memory that a lowered limit gives up, where the step can do it."""
        self._last_look_up = None  # it names blocks
        if not step.sequences:
            self._kv.evict_surplus()
            return
        moved, entries = self._kv.compact(self._running.values(), MAX_BLOCK_COPIES)
        step.move_blocks(moved)
        for write in step.table_writes:  # blocks that this very step takes may be among the moved
            write.blocks[:] = [moved.get(block, block) for block in write.blocks]
        written = {(one.row, one.group, at) for one in step.table_writes for at, _ in enumerate(one.blocks, one.at)}
        step.table_writes += [
            TableWrite(row_of(seq), at, [seq.block_tables[group][at]], group)
            for seq, group, at in entries
            if (row_of(seq), group, at) not in written
        ]

    def _advance(self, step: Step) -> None:
        """Count a whole step as computed."""
        step.swap_outs = [BlockSwap(block, slot) for block, slot in self._kv.swap_out()]
        step.seal(self._num_planned)
        self._num_planned += 1
        self._in_flight.append(step)
        self._seats.advance(step)
        if step.num_beams or len(step.sequences) > step.num_decodes:
            self._advance_others(step)

    def _advance_others(self, step: Step) -> None:
        """Count as computed what is no single token of a sequence that decodes: of most steps, nothing."""
        num_decodes, num_chunks = step.num_decodes, len(step.sequences) - len(step.drafts)
        for seq in step.beams:
            seq.num_computed_tokens += 1
            seq.num_uncomputed_tokens -= 1  # the next token is known when all beams of the search are computed
            self._seats.sort(seq)
        for seq, num, samples in zip(
            step.sequences[num_decodes:num_chunks],
            step.num_scheduled[num_decodes:num_chunks],
            step.samples[num_decodes:num_chunks],
            strict=True,
        ):
            seq.num_computed_tokens += num
            seq.num_uncomputed_tokens += (samples and not searches(seq)) - num
            self._seats.sort(seq)
        for seq, drafts in step.drafted:
            seq.num_computed_tokens += 1 + len(drafts)

    def _admit(self, step: Step, budget: int, now_s: float) -> BlockedBy:
        """Admit from the head of the queue while limits allow; return what keeps the next one out."""
        running, most, outlook = self._running.values(), self._limits.max_num_batched_tokens, self._outlook
        if self._forks.num_held:
            self._queue_again(self._forks.take_ready())
        if self._adapters.num_held:
            self._queue_again(self._adapters.take_ready())
        if self._waiting and len(running) < self._limits.max_num_seqs:
            self._waiting.settle()
        while self._waiting:
            if (step.preempted and step.sequences) or step.lacks_blocks:
                return BlockedBy.KV
            if len(running) >= self._limits.max_num_seqs:
                return BlockedBy.SEQS
            seq = self._waiting.head()
            if running and len(running) + self.num_reserved_seats + seq.num_seats > self._limits.max_num_seqs:
                return BlockedBy.SEQS
            if self._policy is edf and outlook.is_too_late(seq, step, running, most, now_s):
                self._waiting.demote_head()
                continue
            if self._adapters.must_wait(seq):
                self._waiting.remove(seq)
                self._adapters.hold(seq)
                seq.status = SequenceStatus.HELD
                continue
            match = self._look_up(seq, budget)
            if seq.fork_group is not None and self._holds(seq, match):
                continue
            if not self._kv.can_admit(match):
                return BlockedBy.KV
            if running and not self._kv.can_admit(match, outlook.num_reserved_blocks(running, self._num_planned)):
                return BlockedBy.RESERVE
            if not outlook.has_time_for(seq, step, running):
                return BlockedBy.STEP_TIME
            num_remaining = len(seq.token_ids) - match.num_tokens
            if outlook.chunk_len(num_remaining, budget) == 0:
                return BlockedBy.BUDGET
            if outlook.paced(step, match.num_tokens, num_remaining, budget) == 0:
                return BlockedBy.STEP_TIME
            self._last_look_up = None  # it would not hold any more if the sequence were preempted
            self._waiting.admit_head(match.num_tokens)
            self._start(step, seq, match)
            outlook.admitted(seq)
            _count_admission(step, seq, match, self._kv.enable_prefix_caching)
            budget -= self._add_chunk(step, seq, budget)
        return BlockedBy.ADAPTERS if self._adapters.num_held else BlockedBy.NONE

    def _look_up(self, seq: Sequence, budget: int) -> PrefixMatch:
        """Look the head of the queue up in the prefix cache; return its last look-up if that is enough to refuse it again.

        Where a sequence of its fork group has computed more of it than is cached, return that instead.
        """
        if self._last_look_up is not None and self._last_look_up[0] is seq:
            match = self._last_look_up[1]
            if self._kv.still_blocked(seq, match) or (budget <= 0 and self._kv.can_admit(match)):
                return match
        match = self._kv.match_prefix(seq, self._limits.max_num_batched_tokens)
        if seq.fork_group is not None and (source := self._forks.source_of(seq)) is not None:
            fork = self._kv.match_fork(seq, source, self._limits.max_num_batched_tokens)
            return match if fork is None or fork.num_tokens <= match.num_tokens else fork
        self._last_look_up = (seq, match)
        return match

    def _holds(self, seq: Sequence, match: PrefixMatch) -> bool:
        """Take the head of the queue out, if waiting for another sequence of its fork group saves a block or more."""
        if num_shareable(seq) - match.num_tokens < self._kv.block_size or not self._forks.must_wait(seq):
            return False
        self._waiting.remove(seq)
        self._forks.hold(seq)
        seq.status = SequenceStatus.HELD
        return True

    def _queue_again(self, held: list[Sequence]) -> None:
        """Put held sequences back into the queue, in their old places."""
        for seq in held:
            seq.status = SequenceStatus.WAITING
            self._waiting.push(seq)

    def _add_chunks(self, step: Step, prefills: list[Sequence], budget: int) -> int:
        """Schedule more of the prompts in progress; return how many tokens that is."""
        before = step.num_tokens
        for seq in prefills:
            least = 0 if step.num_tokens > step.num_decodes else MIN_CHUNK
            budget -= self._add_chunk(step, seq, budget, least)
        return step.num_tokens - before

    def _make_room(self, step: Step, prefills: list[Sequence]) -> None:
        """Preempt one of some prompts that hold each other up: none of them gets a block for its next token."""
        seq = self._preempt()
        if seq in prefills:
            prefills.remove(seq)
        step.preempted.append(seq)
        self._outlook.preempted(len(self._running))

    def _add_chunk(self, step: Step, seq: Sequence, budget: int, least: int = 0) -> int:
        """Schedule as much of the sequence as budget and pace allow; return how many tokens that is."""
        start = seq.num_computed_tokens
        num_tokens = self._outlook.paced(step, start, len(seq.token_ids) - start, budget, least)
        if num_tokens > 0 and self._kv.slides:
            num_tokens = self._cover(step, seq, start + num_tokens) - start
        if num_tokens > 0:
            step.add_chunk(seq, num_tokens)
        return num_tokens

    def _cover(self, step: Step, seq: Sequence, end: int) -> int:
        """Give a sequence blocks up to token ``end``, or as far as there are any; return how far that is.

        A single token that is left over is computed as a decode, and those take blocks in all groups or in none.
        """
        last = len(seq.token_ids) - 1
        wanted = end + (end == last)
        covered = self._kv.num_coverable(seq, wanted)
        if covered < wanted:
            step.lacks_blocks = True
            end = covered - (covered == last)
        if end > seq.num_computed_tokens:
            tails = self._kv.cover(seq, end + (end == last))
            step.table_writes += [TableWrite(row_of(seq), at, blocks, group) for group, at, blocks in tails]
        return max(end, seq.num_computed_tokens)

    def _preempt(self) -> Sequence:
        """Take the blocks of the sequence that the policy would run last; it waits and is computed again."""
        assert len(self._running) > 1, "a lone sequence always fits: the envelope says so"
        seq = choose_victim(self._running.values())
        logger.debug(
            "request_id=%s preempted: no free KV block for decodes; %r, %s", seq.request_id, seq, self._kv.counts()
        )
        seq.num_lost_tokens = seq.num_computed_tokens
        seq.num_preemptions += 1
        if searches(seq):
            self._beams.stop([seq])
            return seq
        self._waiting.push(seq)
        self._seats.stop(seq)
        seq.status = SequenceStatus.WAITING
        return seq

    def _start(self, step: Step, seq: Sequence, match: PrefixMatch) -> None:
        """Have the head of the queue run, which has just been taken out."""
        if searches(seq):
            self._beams.start(step, seq, match)
        else:
            self._seats.start(step, seq, match, seq.sampling)

    def _running_of(self, seq: Sequence) -> list[Sequence]:
        """Return the running sequences of a request."""
        if searches(seq):
            return self._beams.running_of(seq)
        return [seq] if seq.row is not None else []

    def _advance_beams(self, step: Step, candidates: Mapping[int, TokenLogprobs]) -> Endings:
        """Have searches go on whose beams are all computed; end those that are over."""
        endings: Endings = []
        for search in self._beams.report(step, candidates):
            if self._beams.advance(search):
                continue
            step.hypotheses[search.root.request_id] = search.hypotheses
            self._end(search.root)
            endings.append((search.root, search.finish(self._kv.block_size)))
        return endings

    def _end(self, seq: Sequence) -> None:
        """End a request, given its sequence, which is in no queue any more."""
        if searches(seq):
            self._beams.end(seq)
        elif seq.row is not None:
            self._seats.stop(seq)
        seq.status = SequenceStatus.FINISHED
        del self._unfinished[seq.request_id]


def _count_admission(step: Step, seq: Sequence, match: PrefixMatch, queried: bool) -> None:
    if seq.num_preemptions > 0:
        step.num_recomputed_tokens += max(0, seq.num_lost_tokens - match.num_tokens)
        seq.num_lost_tokens = 0
        return
    seq.num_cached_tokens = match.num_tokens
    if match.is_fork:
        return
    step.admitted.append(seq)
    if match.num_tokens:
        step.num_cached_tokens[seq.request_id] = match.num_tokens
    if queried and seq.sampling.prompt_logprobs is None and seq.pooling != "mean":
        step.num_prefix_queried_tokens += seq.num_prompt_tokens

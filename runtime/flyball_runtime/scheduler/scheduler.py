"""The scheduler: plan a step, commit what it computed."""

import heapq
import logging
from collections.abc import Collection

from flyball_protocol import Envelope, Limits
from flyball_runtime.core.errors import EmptyPrompt, InvalidRequest, PromptTooLong
from flyball_runtime.core.request import FinishReason
from flyball_runtime.core.sequence import Sequence, SequenceStatus
from flyball_runtime.kv_cache import KVCache, PrefixMatch
from flyball_runtime.scheduler.batch import BatchDraft, BatchPlan
from flyball_runtime.scheduler.blocked_by import BlockedBy
from flyball_runtime.scheduler.config import SchedulerConfig
from flyball_runtime.scheduler.limits import violations
from flyball_runtime.scheduler.policies import POLICIES, choose_victim
from flyball_runtime.scheduler.waiting_queue import WaitingQueue

logger = logging.getLogger(__name__)


class Scheduler:
    """Continuous batching without phases (after vLLM v1): each sequence has tokens, and some of them are computed.

    One step is ``plan()``, the model, ``commit()``. A plan spends one token budget: decodes first, so that a long
    prompt never holds up running streams; then chunks of prompts in progress; then new sequences, clients in turn, the
    head of the queue blocking the rest. A sequence is admitted when a seat, blocks for its whole prompt and some
    budget are there. Only decodes take further blocks; when none is left, sequences are preempted: they lose
    their blocks and are computed again later (nothing new is admitted in such a step).

    What keeps every request moving: the envelope makes one sequence of ``max_model_len`` tokens fit under any limits,
    preemption never takes the first sequence in policy order while another one runs, and every admission gives each
    running sequence at least one token of the budget, so decodes never outnumber it.

    Lowered limits drain: running sequences go on, all of them decode in every step, and nobody is admitted until what
    runs is under the new limit. Not thread-safe; sequences are changed here only.
    """

    def __init__(self, config: SchedulerConfig, kv_cache: KVCache) -> None:
        """Raises ConfigError when the KV cache cannot hold one sequence of ``max_model_len`` tokens."""
        self.config = config
        self.envelope: Envelope = config.envelope(kv_cache.num_blocks, kv_cache.block_size)
        self._kv = kv_cache
        self._policy = POLICIES[config.policy]
        self._waiting = WaitingQueue(self._policy, config.fair_share)
        self._running: dict[str, Sequence] = {}  # in order of admission
        self._unfinished: dict[str, Sequence] = {}
        self._free_rows = list(range(config.max_num_seqs))  # a heap, so that running rows stay dense at the low end
        self._num_submitted = 0
        self._blocked_by = BlockedBy.NONE
        self._last_look_up: tuple[int, PrefixMatch] | None = None  # of the waiting sequence with this arrival index
        self.set_limits(config.start_limits())

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def blocked_by(self) -> BlockedBy:
        """Why the head of the queue was not in the last plan."""
        return self._blocked_by

    @property
    def limits(self) -> Limits:
        """The limits aimed at."""
        return self._limits

    @property
    def effective(self) -> Limits:
        """The limits that hold this moment: the target, or where a lowered one still drains, what is in use."""
        target, num_running, num_used = self._limits, len(self._running), self._kv.num_used_blocks
        lowest = min(target.max_num_seqs, target.max_num_batched_tokens)
        if num_running <= lowest and num_used <= self._kv.capacity:
            return target
        kv_drains = num_used > self._kv.capacity
        return Limits(
            max_num_seqs=max(target.max_num_seqs, num_running),
            kv_cache_fraction=num_used / self._kv.num_blocks if kv_drains else target.kv_cache_fraction,
            max_num_batched_tokens=max(target.max_num_batched_tokens, num_running),
            step_time_target_ms=target.step_time_target_ms,
        )

    def set_limits(self, limits: Limits) -> None:
        """Aim at ``limits``. Raising one works at once; lowering one drains.

        Raises:
            ValueError: outside the envelope, or with a step-time target.
        """
        reasons = violations(limits, self.envelope)
        if reasons:
            raise ValueError(" ".join(reasons))
        self._limits = limits
        self._kv.set_capacity(round(limits.kv_cache_fraction * self._kv.num_blocks))

    def submit(self, seq: Sequence) -> None:
        """Queue a new sequence. How many may wait is the front door's decision (``EngineClient``).

        Raises:
            EmptyPrompt, PromptTooLong: it could never run.
            InvalidRequest: a request of this id has not ended yet.
        """
        if seq.num_prompt_tokens == 0:
            raise EmptyPrompt()
        if not seq.num_prompt_tokens < seq.max_total_tokens <= self.config.max_model_len:
            raise PromptTooLong(seq.num_prompt_tokens, seq.sampling.max_tokens, self.config.max_model_len)
        if seq.request_id in self._unfinished:
            raise InvalidRequest(f"request_id {seq.request_id} is in use; wait for it to end or choose another.")
        seq.arrival_index = self._num_submitted
        self._num_submitted += 1
        self._unfinished[seq.request_id] = seq
        self._waiting.push(seq)

    def abort(self, request_id: str) -> bool:
        """End a request and free its blocks; False when none of this id is unfinished. Call it between steps."""
        seq = self._unfinished.get(request_id)
        if seq is None:
            return False
        if seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        else:
            self._stop_running(seq)
        self._finish(seq)
        return True

    def fail(self, seq: Sequence) -> None:
        """End a running sequence whose computation went wrong. Call it after the model and before ``commit``.

        Its blocks leave the prefix cache too: what they hold cannot be trusted.
        """
        self._kv.forget(seq)
        self._stop_running(seq)
        self._finish(seq)

    def plan(self) -> BatchPlan | None:
        """Decide the next step; None when no request is unfinished."""
        draft, prefills = self._plan_decodes()
        budget = self._limits.max_num_batched_tokens - draft.num_tokens
        for seq in prefills:
            budget -= self._add_chunk(draft, seq, budget)
        draft.blocked_by = self._blocked_by = self._admit(draft, budget)
        return draft.freeze() if draft.sequences else None

    def commit(
        self, plan: BatchPlan, sampled_token_ids: Collection[int | None]
    ) -> list[tuple[Sequence, FinishReason | None]]:
        """Record what the model computed.

        Args:
            sampled_token_ids: one for each sequence that samples, in the plan's order; None for one that has ended since.

        Returns:
            Each sequence that got a token (its last), with the reason if that ended it. A stop token is kept as the
            sequence's last token. Sequences that were aborted or failed since the plan are left out.

        Raises:
            ValueError: not as many tokens as the plan samples.
        """
        if len(sampled_token_ids) != sum(plan.samples):
            raise ValueError(
                f"got {len(sampled_token_ids)} sampled tokens for a plan that samples {sum(plan.samples)}."
            )
        block_size = self._kv.block_size
        tokens = iter(sampled_token_ids)
        results: list[tuple[Sequence, FinishReason | None]] = []
        # the hot loop: some 256 turns a step, so the checks of the common case are spelled out here
        for seq, start, num, samples in zip(plan.sequences, plan.starts, plan.num_scheduled, plan.samples, strict=True):
            token = next(tokens) if samples else None
            if seq.row is None:
                continue  # aborted or failed since the plan
            seq.num_computed_tokens = start + num
            if start % block_size + num >= block_size:
                self._kv.register(seq, start, start + num)
            if token is None:
                continue
            token_ids = seq.token_ids
            token_ids.append(token)
            if token in seq.stop_token_ids or len(token_ids) >= seq.max_total_tokens:
                self._stop_running(seq)
                self._finish(seq)
                results.append((seq, "stop" if token in seq.stop_token_ids else "length"))
            else:
                results.append((seq, None))
        return results

    def _plan_decodes(self) -> tuple[BatchDraft, list[Sequence]]:
        """Return a draft of all decodes, each with a block for its token, and the sequences with more to compute."""
        preempted: list[Sequence] = []
        draft, growing, prefills = self._sort_running()
        while len(growing) > self._kv.num_growable_blocks:
            preempted.append(self._preempt())
            draft, growing, prefills = self._sort_running()
        self._kv.grow(growing)
        draft.preempted = preempted
        return draft, prefills

    def _sort_running(self) -> tuple[BatchDraft, list[Sequence], list[Sequence]]:
        """Return a draft of all decodes, those among them whose blocks are full, and all other sequences."""
        block_size = self._kv.block_size
        decodes: list[Sequence] = []
        starts: list[int] = []
        growing: list[Sequence] = []
        prefills: list[Sequence] = []
        for seq in self._running.values():
            start = seq.num_computed_tokens
            if len(seq.token_ids) - start != 1:
                prefills.append(seq)
                continue
            decodes.append(seq)
            starts.append(start)
            if start % block_size == 0 and start == len(seq.block_table) * block_size:
                growing.append(seq)
        return BatchDraft.of_decodes(decodes, starts), growing, prefills

    def _admit(self, draft: BatchDraft, budget: int) -> BlockedBy:
        """Admit from the head of the queue while limits allow; return what keeps the next one out."""
        if len(self._running) < self._limits.max_num_seqs:
            self._waiting.settle()
        while self._waiting:
            if draft.preempted:
                return BlockedBy.KV
            if len(self._running) >= self._limits.max_num_seqs:
                return BlockedBy.SEQS
            seq = self._waiting.head()
            match = self._look_up(seq, budget)
            if not self._kv.can_admit(match):
                return BlockedBy.KV
            if self._chunk_len(len(seq.token_ids) - match.num_tokens, budget) == 0:
                return BlockedBy.BUDGET
            self._last_look_up = None  # it would not hold any more if the sequence were preempted
            self._start_running(self._waiting.admit_head(match.num_tokens), match)
            _count_admission(draft, seq, match, self._kv.enable_prefix_caching)
            budget -= self._add_chunk(draft, seq, budget)
        return BlockedBy.NONE

    def _look_up(self, seq: Sequence, budget: int) -> PrefixMatch:
        """Look the head of the queue up in the prefix cache; return its last look-up if that is enough to refuse it again."""
        if self._last_look_up is not None and self._last_look_up[0] == seq.arrival_index:
            match = self._last_look_up[1]
            if self._kv.still_blocked(seq, match) or (budget <= 0 and self._kv.can_admit(match)):
                return match
        match = self._kv.match_prefix(seq)
        self._last_look_up = (seq.arrival_index, match)
        return match

    def _add_chunk(self, draft: BatchDraft, seq: Sequence, budget: int) -> int:
        """Schedule as much of the sequence as the budget allows; return how many tokens that is."""
        num_tokens = self._chunk_len(len(seq.token_ids) - seq.num_computed_tokens, budget)
        if num_tokens > 0:
            draft.add_chunk(seq, num_tokens)
        return num_tokens

    def _chunk_len(self, num_remaining: int, budget: int) -> int:
        if self.config.enable_chunked_prefill:
            return max(0, min(num_remaining, budget))
        return num_remaining if num_remaining <= budget else 0

    def _preempt(self) -> Sequence:
        """Take the blocks of the sequence that the policy would run last; it waits and is computed again."""
        assert len(self._running) > 1, "a lone sequence always fits: the envelope says so"
        seq = choose_victim(self._running.values(), self._policy)
        logger.debug(
            "request_id=%s preempted: no free KV block for decodes; %r, %s", seq.request_id, seq, self._kv.counts()
        )
        seq.num_lost_tokens = seq.num_computed_tokens
        seq.num_preemptions += 1
        self._waiting.push(seq)
        self._stop_running(seq)
        seq.status = SequenceStatus.WAITING
        return seq

    def _start_running(self, seq: Sequence, match: PrefixMatch) -> None:
        self._kv.admit(seq, match)
        seq.row = heapq.heappop(self._free_rows)
        seq.status = SequenceStatus.RUNNING
        self._running[seq.request_id] = seq

    def _stop_running(self, seq: Sequence) -> None:
        assert seq.row is not None, f"{seq!r} runs without a row"
        heapq.heappush(self._free_rows, seq.row)
        seq.row = None
        del self._running[seq.request_id]
        self._waiting.release(seq)
        self._kv.free(seq)

    def _finish(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.FINISHED
        del self._unfinished[seq.request_id]


def _count_admission(draft: BatchDraft, seq: Sequence, match: PrefixMatch, queried: bool) -> None:
    if seq.num_preemptions > 0:
        draft.num_recomputed_tokens += max(0, seq.num_lost_tokens - match.num_tokens)
        seq.num_lost_tokens = 0
        return
    seq.num_cached_tokens = match.num_tokens
    draft.num_prefix_hit_tokens += match.num_tokens
    if queried:
        draft.num_prefix_queried_tokens += seq.num_prompt_tokens

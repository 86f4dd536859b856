"""Random histories of the scheduler and its KV cache, each step checked against what must always hold.

The default run is the same every time. ``FLYBALL_FUZZ_EXAMPLES=5000 pytest <this file>`` explores new ones.
"""

import itertools
import os
import random
from array import array
from collections import Counter, deque

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fake_model import VOCAB_SIZE, FakeModel, candidates, contents, expected_hypotheses, expected_output
from flyball_protocol import Limits, StepModel
from flyball_runtime.core.beam_search import BeamSearch
from flyball_runtime.core.kv_layout import most_blocks
from flyball_runtime.core.pooling import Pooling
from flyball_runtime.core.request import Sequence, SequenceStatus, TokenLogprobs
from flyball_runtime.core.speculation import SpeculativeConfig
from flyball_runtime.governor import Governor, OutputLengths
from flyball_runtime.kv_cache import BlockPool, HostTier, KVCache
from flyball_runtime.scheduler import BatchPlan, BlockedBy, Drafter, Ending, Scheduler, SchedulerConfig, Step
from flyball_runtime.scheduler.policies import POLICIES
from flyball_runtime.scheduler.queue import OUTPUT_TOKEN_WEIGHT
from flyball_runtime.scheduler.search import Search, searches
from sequences import make_sequence

MAX_MODEL_LEN = 24
MAX_WAITING = 12
MAX_IN_FLIGHT = 3
STOP_TOKEN = 3
EXAMPLES = os.environ.get("FLYBALL_FUZZ_EXAMPLES")
NUM_LONG_HISTORIES = 20 if EXAMPLES is None else int(EXAMPLES)
PREFIXES = ([1] * 24, [1, 2] * 12, [1] * 8 + [2] * 16)
"""Prompts start with one of these, cut anywhere: they share whole blocks, part of one, or nothing."""

PROMPTS = st.builds(
    lambda prefix, cut, tail: (prefix[:cut] + tail)[: MAX_MODEL_LEN - 1],
    st.sampled_from(PREFIXES),
    st.integers(0, 22),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
)
WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None,), (3,), (None, 5), (6, None, 6), (2, 9))
SHARES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
BEAMS = (
    None,
    None,
    None,
    BeamSearch(width=2),
    BeamSearch(width=3, early_stopping=True),
    BeamSearch(width=4, length_penalty=0.0, early_stopping="never"),
    BeamSearch(width=1, length_penalty=2.0),
)
ADAPTERS = (None, None, None, 0, 1, 2, 3)
TARGETS_MS = st.sampled_from([None, 0.5, 1.5, 4.0])

POOLINGS: tuple[Pooling | None, ...] = (None, "mean", None, None, "last", None, None)

STEP_MODEL = StepModel(base_s=0.001, token_s=0.0001, context_token_s=0.00001)
"""A step takes some milliseconds, of the order of the targets and deadlines here."""


class Oracle(Drafter):
    """Knows what comes, also behind a stop token, and is wrong now and then."""

    def draft(self, seq: Sequence) -> "array[int]":
        if not (drafts := super().draft(seq)):
            return drafts
        most = min(len(drafts), seq.max_total_tokens - len(seq.token_ids) - 1)
        coming = expected_output(seq.token_ids.tolist(), most, frozenset(), seq.adapter)
        if len(seq.token_ids) % 3 == 0:
            wrong = len(seq.token_ids) // 3 % most
            coming[wrong] = (coming[wrong] + 1) % VOCAB_SIZE
        return array("I", coming)


def drafter(num_tokens: int, max_batch_size: int) -> Oracle | None:
    if not num_tokens:
        return None
    config = SpeculativeConfig(
        num_speculative_tokens=num_tokens, prompt_lookup_max=1, disable_by_batch_size=max_batch_size
    )
    return Oracle(config)


def hashes_of(pool: BlockPool) -> list[tuple[int, bytes]]:
    """Return the blocks that can be found, with their hashes."""
    return [(block, name) for block, name in enumerate(pool._hashes) if name is not None]


def between(low: float, high: float, share: float) -> float:
    return min(high, low + (high - low) * share)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4, 5]),
        spare_tokens=st.integers(0, 40),
        max_num_seqs=st.integers(1, 6),
        spare_budget=st.integers(0, 12),
        chunked=st.booleans(),
        caching=st.booleans(),
        windows=st.sampled_from(WINDOWS),
        policy=st.sampled_from(sorted(POLICIES)),
        fair_share=st.booleans(),
        learns=st.booleans(),
        drafts=st.sampled_from([0, 0, 1, 3, 6]),
        max_loras=st.integers(1, 3),
        num_slots=st.sampled_from([0, 1, 5, 30]),
        prompts=st.lists(PROMPTS, min_size=4, max_size=MAX_WAITING),
    )
    def start(
        self,
        block_size: int,
        spare_tokens: int,
        max_num_seqs: int,
        spare_budget: int,
        chunked: bool,
        caching: bool,
        windows: tuple[int | None, ...],
        policy: str,
        fair_share: bool,
        learns: bool,
        drafts: int,
        max_loras: int,
        num_slots: int,
        prompts: list[list[int]],
    ) -> None:
        config = SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=(max_num_seqs if chunked else MAX_MODEL_LEN) + spare_budget,
            enable_chunked_prefill=chunked,
            policy=policy,
            fair_share=fair_share,
            max_loras=max_loras,
        )
        num_blocks = spare_tokens // block_size * len(windows) + sum(
            most_blocks(window, MAX_MODEL_LEN, config.max_num_batched_tokens, block_size) for window in windows
        )
        self.host = HostTier(num_slots) if num_slots and caching else None
        self.kv = KVCache(num_blocks, block_size, caching, windows, self.host)
        governor = Governor(STEP_MODEL) if learns else None
        self.lengths = OutputLengths() if learns else None
        self.scheduler = Scheduler(
            config,
            self.kv,
            pace=governor,
            forecast=governor,
            lengths=self.lengths,
            drafter=drafter(drafts, max_num_seqs - spare_budget % 2),
        )
        self.model = FakeModel(num_blocks, block_size, windows)
        self.named: dict[bytes, list[int]] = {}  # what blocks hold, by hash
        self.num_blocks_there = num_blocks
        self.in_flight: deque[tuple[Step, list[int | None], list[int], dict[int, TokenLogprobs]]] = deque()
        self.ceiling = num_blocks
        self.live: dict[str, Sequence] = {}
        self.scored: Counter[str] = Counter()  # prompt tokens, by request
        self.num_submitted = 0
        self.now_s = 0.0
        self.ended: Counter[str] = Counter()
        self.num_verified: Counter[bool] = Counter()  # drafts, by whether they were accepted
        self.service: Counter[tuple[int, str]] = Counter()
        self.num_searches = 0
        self.num_without_slot = 0
        self.ahead: dict[tuple[tuple[int, str], tuple[int, str]], int] = {}
        self.submit(prompts, 16, 1, "a")

    # rules

    @precondition(lambda self: self.scheduler.num_waiting < MAX_WAITING)
    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=5),
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        client=st.sampled_from("abc"),
        deadline_ms=st.sampled_from([None, 1.0, 8.0, 40.0]),
        forks=st.sampled_from([0, 0, 2, 3]),
        beams=st.sampled_from(BEAMS),
        adapter=st.sampled_from(ADAPTERS),
    )
    def submit(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        priority: int,
        client: str,
        deadline_ms: float | None = None,
        forks: int = 0,
        beams: BeamSearch | None = None,
        adapter: int | None = None,
    ) -> None:
        """The clock goes on by a millisecond with each plan."""
        if beams is not None and beams.width <= self.scheduler.config.max_num_seqs:
            self.submit_one(prompts[0], max_tokens, priority, client, deadline_ms, beams=beams, adapter=adapter)
        for prompt in prompts:
            group = f"group of {self.num_submitted}" if forks else None
            for _ in range(forks or 1):
                self.submit_one(prompt, max_tokens, priority, client, deadline_ms, group, adapter=adapter)

    @rule(num=st.integers(1, 8))
    def steps(self, num: int) -> None:
        """Steps one after the other, with as many in flight as there are."""
        for _ in range(num):
            self.launch()
            self.collect()
            self.holds()

    @precondition(lambda self: len(self.in_flight) < MAX_IN_FLIGHT)
    @rule()
    def launch(self) -> None:
        """Plan a step and run it; nobody has seen its tokens yet."""
        step = self.plan()
        if step is not None:
            if self.kv.size > self.num_blocks_there:
                self.resize()
            sampled, num_accepted = self.model.run(step.plan)
            following = {
                index: candidates(content)
                for index, (seq, content) in enumerate(zip(step.sampled, self.model.read, strict=True))
                if searches(seq)
            }
            self.in_flight.append((step, [*sampled], num_accepted, following))
            self.resize()

    @precondition(lambda self: not self.in_flight)
    @rule()
    def give_back(self) -> None:
        self.scheduler.give_back()
        self.resize()

    @precondition(lambda self: self.scheduler.kv_drains)
    @rule()
    def hurry(self) -> None:
        """After the next plans, what runs fits a lowered KV limit."""
        self.scheduler.set_limits(self.scheduler.limits, kv_deadline_s=0.0)
        while self.in_flight:
            self.collect()
        self.launch()
        assert not self.scheduler.kv_drains

    @precondition(lambda self: self.in_flight)
    @rule()
    def collect(self) -> None:
        if self.in_flight:
            step, sampled, num_accepted, following = self.in_flight.popleft()
            endings = self.scheduler.commit(step, sampled, num_accepted=num_accepted, candidates=following)
            self.record(step, endings)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 20))
    def abort(self, pick: int) -> None:
        self.abort_one(self.pick_live(pick))

    @precondition(lambda self: self.in_flight and self.in_flight[0][0].sampled)
    @rule(pick=st.integers(0, 20))
    def fail_one_of_a_step(self, pick: int) -> None:
        """The model gave no token for one sequence: it ends, what it computed is forgotten, and the others go on."""
        step, sampled, *_ = self.in_flight[0]
        failed = step.sampled[pick % len(step.sampled)]
        root = self.scheduler._beams.root_of(failed)
        sampled[step.sampled.index(failed)] = None
        is_alive, blocks = failed.row is not None, set(self.blocks_of(failed))
        self.collect()
        assert root.status is SequenceStatus.FINISHED or not is_alive
        if is_alive:
            assert not any(blocks & set(self.kv._pool.find([name])) for name in failed.block_hashes)

    @precondition(lambda self: self.live)
    @rule()
    def abort_a_step(self) -> None:
        """Everybody in a step is aborted before it is collected."""
        if len(self.in_flight) < MAX_IN_FLIGHT:
            self.launch()
        for step, *_ in self.in_flight:
            for seq in step.sequences:
                root = self.scheduler._beams.root_of(seq)
                if root.request_id in self.live:
                    self.abort_one(root.request_id)

    @precondition(lambda self: self.live)
    @rule(seqs=SHARES, kv=SHARES, budget=SHARES, target_ms=TARGETS_MS)
    def set_limits(self, seqs: float, kv: float, budget: float, target_ms: float | None = None) -> None:
        """Move each limit to a share of the way from the lowest to the highest that the envelope allows."""
        envelope = self.scheduler.envelope
        limits = Limits(
            max_num_seqs=round(between(1, envelope.max_num_seqs, seqs)),
            kv_cache_fraction=between(envelope.min_kv_cache_fraction, 1.0, kv),
            max_num_batched_tokens=round(
                between(envelope.min_num_batched_tokens, envelope.max_num_batched_tokens, budget)
            ),
            step_time_target_ms=target_ms,
        )
        self.scheduler.set_limits(limits)
        assert self.scheduler.limits == limits
        self.ceiling = max(self.ceiling, self.kv.capacity)

    def teardown(self) -> None:
        """With nothing new, everything ends within a bounded number of steps and nothing stays behind."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3 * MAX_MODEL_LEN * sum(seq.num_seats for seq in self.live.values()) + MAX_IN_FLIGHT):
            self.launch()
            self.collect()
            self.holds()
        assert not self.live, f"still unfinished: {self.live}"
        assert not self.in_flight
        assert self.scheduler.plan() is None
        self.give_back()
        assert self.kv.size == self.kv.capacity
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert self.kv.counts().used == 0
        assert self.scheduler.effective == self.scheduler.limits
        assert self.ended == Counter({str(i): 1 for i in range(self.num_submitted)})

    # helpers of the rules

    def submit_one(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        client: str,
        deadline_ms: float | None,
        fork_group: str | None = None,
        beams: BeamSearch | None = None,
        adapter: int | None = None,
    ) -> None:
        seq = make_sequence(
            prompt,
            max_tokens=max_tokens,
            priority=priority,
            client=client,
            ttft_deadline_ms=deadline_ms,
            request_id=str(self.num_submitted),
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=[STOP_TOKEN],
            hashed_by=self.kv.block_size if self.num_submitted % 2 else None,
            pooling=None if beams is not None else POOLINGS[self.num_submitted % len(POOLINGS)],
            prompt_logprobs=2 if self.num_submitted % 5 == 0 and beams is None else None,
            fork_group=fork_group,
            beam_search=beams,
            adapter=adapter,
        )
        seq.arrived_s = self.now_s
        self.scheduler.submit(seq)
        self.live[seq.request_id] = seq
        self.num_submitted += 1

    def pick_live(self, pick: int) -> str:
        return sorted(self.live)[pick % len(self.live)]

    def abort_one(self, request_id: str) -> None:
        seq = self.live[request_id]
        assert self.scheduler.abort(request_id) is True
        assert self.scheduler.abort(request_id) is False
        self.end(seq)

    # one step, and what holds of its plan

    def resize(self) -> None:
        """Have the memory that the scheduler counts on, as the engine does around a launch."""
        self.num_blocks_there = self.kv.size
        self.model.resize(self.num_blocks_there)

    def plan(self) -> Step | None:
        computed = {seq.request_id: seq.num_computed_tokens for seq in (*self.live.values(), *self.running())}
        before = {seq.request_id: self.num_missing(seq) for seq in self.running()}
        self.now_s += 0.001
        step = self.scheduler.plan(self.now_s)
        if step is None:
            assert not self.live or self.in_flight, "requests wait and nothing is computed"
            return None
        self.check_shape(step, computed)
        self.check_order(step, before)
        self.check_admissions(step, before)
        self.check_blocked_by(step)
        for seq in self.live.values():
            assert searches(seq) or seq.num_computed_tokens >= computed[seq.request_id] or seq in step.preempted
        return step

    def num_missing(self, seq: Sequence) -> int:
        """How many tokens a step could compute of it now."""
        num_tokens = seq.num_computed_tokens + seq.num_uncomputed_tokens
        is_full = seq.pooling is None and num_tokens == seq.max_total_tokens
        return 0 if is_full else seq.num_uncomputed_tokens

    def check_shape(self, step: Step, computed: dict[str, int]) -> None:
        plan = step.plan
        assert plan.num_tokens == sum(plan.num_scheduled)
        assert len({seq.request_id for seq in step.sequences}) == len(step.sequences) > 0
        work = 0
        for index, seq in enumerate(step.sequences):
            start, num = plan.starts[index], plan.num_scheduled[index]
            assert plan.rows[index] == seq.row
            assert num > 0
            assert start == computed.get(seq.request_id, 0) or seq in self.admitted(plan)
            assert start + num == seq.num_computed_tokens
            num_drafts = self.num_drafts(plan, index)
            # as the step found it, and the drafts
            num_tokens = seq.num_computed_tokens + seq.num_uncomputed_tokens
            num_tokens -= plan.samples[index] and not searches(seq)
            assert plan.samples[index] == (seq.pooling is None and start + num == num_tokens)
            assert num_drafts == 0 or (num == 1 + num_drafts and start + 1 == len(seq.token_ids) < seq.max_total_tokens)
            assert len(seq.block_table) * self.kv.block_size >= start + num
            if index >= plan.num_decodes:
                work += sum(position + 1 for position in range(start, start + num))
        self.check_spans(step)
        self.check_pool_spans(step)
        assert plan.num_context_tokens == sum(start + 1 for start in plan.starts[: plan.num_decodes])
        assert plan.prefill_work == work

    def num_drafts(self, plan: BatchPlan, index: int) -> int:
        num_plain = len(plan.rows) - len(plan.num_drafts)
        return 0 if index < num_plain else plan.num_drafts[index - num_plain]

    def check_spans(self, step: Step) -> None:
        """Each prompt token is scored once, in order, behind tokens that the step computes."""
        for span in step.plan.prompt_spans:
            seq, targets = step.sequences[span.entry], array("I", span.targets)
            assert step.starts[span.entry] <= span.at == self.scored[seq.request_id]
            end = span.at + len(targets)
            assert end <= step.starts[span.entry] + step.num_scheduled[span.entry]
            assert targets == seq.token_ids[span.at + 1 : end + 1]
            self.scored[seq.request_id] = end

    def check_pool_spans(self, step: Step) -> None:
        """The last token of a prompt is pooled, or every token, which are then all computed."""
        spans = {span.entry: span for span in step.plan.pool_spans}
        admitted = self.admitted(step.plan)
        for entry, seq in enumerate(step.sequences):
            start, end = step.starts[entry], step.starts[entry] + step.num_scheduled[entry]
            ends = end == seq.num_prompt_tokens
            span = spans.pop(entry, None)
            if seq.pooling == "mean":
                assert span is not None
                assert (span.at, span.num_pooled) == (start, seq.num_prompt_tokens if ends else 0)
                assert seq not in admitted or start == 0
            elif seq.pooling == "last" and ends:
                assert span is not None
                assert (span.at, span.num_pooled) == (end - 1, 1)
            else:
                assert span is None
        assert not spans

    def admitted(self, plan: BatchPlan) -> list[Sequence]:
        rows = {start.row for start in plan.row_starts}
        return [seq for seq in self.running() if seq.row in rows]

    def check_order(self, step: Step, before: dict[str, int]) -> None:
        """Every running decode is in the plan, first; the rest keeps to the budget."""
        plan = step.plan
        started = self.admitted(plan)
        decodes = {name for name, missing in before.items() if missing == 1} & {
            one.request_id for one in self.running() if one.pooling is None and one not in started
        }
        drafted = [seq for seq, _ in step.drafted]
        assert {seq.request_id for seq in (*step.sequences[: plan.num_decodes], *drafted)} == decodes
        assert not drafted or self.scheduler.num_in_flight == 1, "the step itself"
        assert set(plan.num_scheduled[: plan.num_decodes]) <= {1}
        assert plan.num_tokens <= max(self.scheduler.limits.max_num_batched_tokens, plan.num_decodes)
        assert plan.num_tokens <= self.scheduler.config.max_num_batched_tokens

    def check_admissions(self, step: Step, before: dict[str, int]) -> None:
        started = self.admitted(step.plan)
        assert (
            {seq.request_id for seq in step.sequences if seq.request_id not in before}
            <= {seq.request_id for seq in started}
            <= {seq.request_id for seq in step.sequences}
        )
        for seq in started:
            if seq.num_preemptions == 0 and seq.request_id in self.live:
                self.service[self.account(seq)] += seq.num_prompt_tokens - seq.num_cached_tokens
        admitted = [seq for seq in started if not searches(seq)]
        if admitted:
            assert not step.preempted or step.sequences[0] in started
            num_seats = self.scheduler.num_running + self.scheduler.num_reserved_seats
            assert num_seats <= self.scheduler.limits.max_num_seqs
            assert self.kv.counts().used <= self.kv.capacity
        if not self.scheduler.config.enable_chunked_prefill:
            assert all(
                samples or seq.pooling is not None for seq, samples in zip(step.sequences, step.samples, strict=True)
            )
        if step.preempted:
            assert self.scheduler.num_in_flight == 1, "the step itself"
        for seq in step.preempted:
            assert searches(seq) or (seq not in step.sequences and seq.status is SequenceStatus.WAITING)

    def check_blocked_by(self, step: Step) -> None:
        scheduler, counts = self.scheduler, self.kv.counts()
        num_queued = sum(seq.status is SequenceStatus.WAITING for seq in self.live.values())
        without_slot = scheduler._adapters._held
        assert (step.blocked_by in (BlockedBy.NONE, BlockedBy.ADAPTERS)) == (num_queued == 0)
        assert step.blocked_by is not BlockedBy.NONE or not without_slot
        assert step.blocked_by is not BlockedBy.ADAPTERS or without_slot
        adapters = {seq.adapter for seq in self.running() if seq.adapter is not None}
        assert len(adapters) <= scheduler.config.max_loras
        assert not without_slot or len(adapters) == scheduler.config.max_loras
        held = [seq for seq in self.live.values() if seq.status is SequenceStatus.HELD]
        for seq in held:
            if seq.request_id in without_slot:
                self.num_without_slot += 1
                continue
            assert seq.fork_group in {one.fork_group for one in self.running()}, "nobody computes what it waits for"
        if step.blocked_by is BlockedBy.SEQS:
            num_seats = scheduler.num_running + scheduler.num_reserved_seats + scheduler._waiting.head().num_seats
            assert num_seats > scheduler.limits.max_num_seqs
        if step.blocked_by is BlockedBy.KV:
            most = self.kv.num_blocks_for(MAX_MODEL_LEN)
            assert step.preempted or step.lacks_blocks or counts.capacity - counts.used < most
        if step.blocked_by is BlockedBy.RESERVE:
            assert scheduler.num_running > 0
        if step.blocked_by is BlockedBy.BUDGET and scheduler.config.enable_chunked_prefill:
            assert step.num_tokens >= scheduler.limits.max_num_batched_tokens

    def record(self, step: Step, endings: list[tuple[Sequence, Ending]]) -> None:
        num_accepted = sum(step.num_accepted)
        self.num_verified += Counter({True: num_accepted, False: sum(step.plan.num_drafts) - num_accepted})
        for seq in step.got_tokens:
            assert self.live[seq.request_id] is seq, "a sequence got a token after its end"
            self.service[self.account(seq)] += OUTPUT_TOKEN_WEIGHT * step.num_taken.get(seq.request_id, 1)
        for seq, reason in endings:
            assert self.live[seq.request_id] is seq, "a sequence ended twice"
            if searches(seq) and reason != "failed":
                self.check_hypotheses(seq, step)
            self.end(seq)

    def end(self, seq: Sequence) -> None:
        self.note_names(seq)
        assert seq.status is SequenceStatus.FINISHED
        if self.lengths is not None:
            self.lengths.observe(seq.num_prompt_tokens, seq.num_output_tokens, route=seq.client)
        assert seq.block_table == []
        assert seq.row is None
        if not searches(seq):
            self.check_output(seq)
        if seq.num_output_tokens:
            most = 0 if seq.sampling.prompt_logprobs is None else seq.num_prompt_tokens - 1
            assert self.scored[seq.request_id] == most
        self.ended[seq.request_id] += 1
        del self.live[seq.request_id]

    def check_hypotheses(self, seq: Sequence, step: Step) -> None:
        """However its beams were computed, the search has found what it would have found alone."""
        found, settings = step.hypotheses[seq.request_id], seq.sampling.beam_search
        prompt = seq.token_ids[: seq.num_prompt_tokens].tolist()
        most = seq.max_total_tokens - seq.num_prompt_tokens
        expected = expected_hypotheses(prompt, most, seq.stop_token_ids, settings, seq.adapter)
        assert [one.token_ids for one in found] == [token_ids for token_ids, _ in expected]
        assert all(abs(one.score - score) < 1e-6 for one, (_, score) in zip(found, expected, strict=True))
        assert seq.token_ids.tolist() == prompt + found[0].token_ids
        self.service[self.account(seq)] += OUTPUT_TOKEN_WEIGHT * settings.width * max(len(o.token_ids) for o in found)
        self.num_searches += 1

    def check_output(self, seq: Sequence) -> None:
        """Batched, chunked, cached and preempted as it may have been, it got what it would have got alone."""
        token_ids = seq.token_ids.tolist()
        prompt, output = token_ids[: seq.num_prompt_tokens], token_ids[seq.num_prompt_tokens :]
        num_tokens = seq.max_total_tokens - seq.num_prompt_tokens
        assert output == expected_output(prompt, num_tokens, seq.stop_token_ids, seq.adapter)[: len(output)]

    def running(self) -> list[Sequence]:
        return list(self.scheduler.running)

    # what holds between any two calls

    @invariant()
    def holds(self) -> None:
        self.blocks_are_accounted_for()
        self.backlogged_clients_get_the_same_service()
        self.capacity_holds()
        self.hashes_name_what_is_there()
        self.sequences_are_whole()

    def blocks_are_accounted_for(self) -> None:
        counts = self.kv.counts()
        owners = Counter(block for seq in self.running() for block in self.blocks_of(seq))
        leaving = self.scheduler._seats.leaving
        owners.update(block for _, blocks in leaving for block in blocks)
        assert all(last_step >= self.in_flight[0][0].plan.number for last_step, _ in leaving), "nobody touches them"
        assert counts.free + counts.used + counts.cached == counts.total == self.kv.num_blocks
        assert counts.used == len(owners)
        assert self.kv.is_settled == (counts.used <= counts.capacity == self.kv.size)
        for block in range(self.kv.num_blocks):
            assert self.kv.num_refs(block) == owners[block]
        for seq in self.running():
            assert len(set(self.blocks_of(seq))) == len(self.blocks_of(seq))

    def blocks_of(self, seq: Sequence) -> list[int]:
        tables = zip(seq.block_tables, seq.num_freed_blocks, strict=True)
        return [block for table, num_freed in tables for block in table[num_freed:]]

    def backlogged_clients_get_the_same_service(self) -> None:
        """From when two clients both wait until one of them does not, neither gets more than a constant ahead."""
        config = self.scheduler.config
        most = 4 * (OUTPUT_TOKEN_WEIGHT * config.max_num_seqs + 1) * MAX_MODEL_LEN
        backlogged = {self.account(seq) for seq in self.live.values() if seq.status is SequenceStatus.WAITING}
        pairs = [(one, other) for one, other in itertools.combinations(sorted(backlogged), 2) if one[0] == other[0]]
        ahead = {(one, other): self.service[one] - self.service[other] for one, other in pairs}
        self.ahead = {pair: self.ahead.get(pair, now) for pair, now in ahead.items()}
        if config.fair_share and not any(seq.is_late for seq in self.live.values()):
            assert all(abs(now - self.ahead[pair]) <= most for pair, now in ahead.items())

    def account(self, seq: Sequence) -> tuple[int, str]:
        return (seq.priority if self.scheduler.config.policy in ("priority", "edf") else 0, seq.client)

    def capacity_holds(self) -> None:
        counts, effective = self.kv.counts(), self.scheduler.effective
        assert counts.used <= self.ceiling
        assert counts.used + counts.cached <= max(counts.used, counts.capacity)
        if counts.used <= counts.capacity:
            self.ceiling = counts.capacity
        held = counts.used if counts.used > counts.capacity else self.kv.size
        assert counts.capacity <= self.kv.size
        assert round(effective.kv_cache_fraction * counts.total) == held or (
            held == counts.capacity and effective.kv_cache_fraction == self.scheduler.limits.kv_cache_fraction
        )
        assert effective.max_num_seqs == max(self.scheduler.limits.max_num_seqs, self.scheduler.num_running)

    def hashes_name_what_is_there(self) -> None:
        """Blocks, and slots of host memory, hold the tokens that their hashes name. Between plans no slot is in use."""
        for seq in (*self.live.values(), *self.running()):
            self.note_names(seq)
        for block, name in hashes_of(self.kv._pool):
            assert self.model.held(block) == self.named.get(name[:64], self.model.held(block))
        if self.host is not None:
            for slot, name in hashes_of(self.host._slots):
                assert self.model.on_host[slot] == self.named.get(name[:64], self.model.on_host[slot])
            counts = self.host._slots.counts()
            assert counts.used == 0
            assert counts.free + counts.cached == self.host.num_slots

    def note_names(self, seq: Sequence) -> None:
        """Remember what the hashes of a sequence stand for."""
        names, size = seq.block_hashes, self.kv.block_size
        if any(name not in self.named for name in names):
            own = contents(seq.token_ids.tolist(), seq.adapter)
            self.named |= {name: own[at * size : (at + 1) * size] for at, name in enumerate(names)}

    def sequences_are_whole(self) -> None:
        running = self.running()
        rows = [seq.row for seq in running]
        assert len(set(rows)) == len(rows) == self.scheduler.num_running
        assert all(row is not None and row < self.scheduler.config.max_num_seqs for row in rows)
        idle = [seq for seq in self.live.values() if seq.status is not SequenceStatus.RUNNING]
        assert self.scheduler.num_waiting == len(idle)
        for seq in idle:
            assert seq.block_table == []
            assert seq.num_computed_tokens == 0
            assert seq.row is None
        for seq in running:
            if not (
                searches(seq) and self.scheduler._beams.beam_of(seq).has_moved
            ):  # its last block is yet to be copied
                self.model.check(seq, min(seq.num_computed_tokens, len(seq.token_ids)))
            self.tables_reach_far_enough(seq)
            self.windows_are_kept(seq)
        for search in self.scheduler._beams.searches.values():
            self.search_goes_on(search)

    def search_goes_on(self, search: Search) -> None:
        """Its request waits in the queue, or else some of its beams run; and some are yet to be computed."""
        assert bool(search.running) == (search.root.status is SequenceStatus.RUNNING)
        assert not search.is_computed
        assert len(search.beams) <= search.settings.width
        assert all(beam.token_ids is beam.seq.token_ids for beam in search.beams if beam.seq is not None)

    def tables_reach_far_enough(self, seq: Sequence) -> None:
        """A whole prompt has blocks in groups that see all of it; in the others what has been computed, and a step's tokens."""
        most = self.scheduler.config.max_num_batched_tokens
        in_flight = any(seq in step.sequences for step, *_ in self.in_flight)
        tables = zip(self.kv.windows, seq.block_tables, seq.num_freed_blocks, strict=True)
        for window, table, num_freed in tables:
            reach = len(seq.token_ids) - 1 if window is None else min(seq.num_computed_tokens, len(seq.token_ids) - 1)
            assert len(table) * self.kv.block_size >= reach
            num_held = len(table) - num_freed
            assert in_flight or num_held <= most_blocks(window, MAX_MODEL_LEN, most, self.kv.block_size)

    def windows_are_kept(self, seq: Sequence) -> None:
        """What lies behind a window is given back when the step that went past it is committed."""
        in_flight = (step for step, *_ in self.in_flight if seq in step.sequences)
        oldest = next(in_flight, None)
        start = seq.num_computed_tokens if oldest is None else oldest.starts[oldest.sequences.index(seq)]
        for window, num_freed in zip(self.kv.windows, seq.num_freed_blocks, strict=True):
            assert num_freed == (0 if window is None else max(0, start - window + 1) // self.kv.block_size)


@pytest.mark.slow
def test_long_histories_under_load() -> None:
    """Hypothesis favours short histories; these keep the pool full for hundreds of calls."""
    num_verified: Counter[bool] = Counter()
    num_searches = num_without_slot = 0
    num_swaps: Counter[str] = Counter()
    for seed in range(NUM_LONG_HISTORIES):
        rng = random.Random(seed)
        machine = SchedulerMachine()
        machine.start(
            block_size=rng.choice([1, 2, 4, 5]),
            spare_tokens=rng.randint(0, 40),
            max_num_seqs=rng.randint(2, 6),
            spare_budget=rng.randint(0, 12),
            chunked=rng.random() < 0.7,
            caching=rng.random() < 0.8,
            windows=rng.choice(WINDOWS),
            policy=rng.choice(sorted(POLICIES)),
            fair_share=rng.random() < 0.7,
            learns=rng.random() < 0.5,
            drafts=rng.choice([0, 0, 1, 3, 6]),
            max_loras=rng.randint(1, 3),
            num_slots=rng.choice([0, 1, 5, 30]),
            prompts=[[1, 2, 1]],
        )
        for _ in range(200):
            random_call(machine, rng)
            machine.holds()
        machine.teardown()
        num_verified += machine.num_verified
        num_searches += machine.num_searches
        num_without_slot += machine.num_without_slot
        num_swaps += machine.model.num_swaps
    assert num_verified[True] > 10 and num_verified[False] > 10
    assert num_searches > NUM_LONG_HISTORIES
    assert num_without_slot > NUM_LONG_HISTORIES
    assert num_swaps["out"] > num_swaps["back"] > NUM_LONG_HISTORIES


def random_call(machine: SchedulerMachine, rng: random.Random) -> None:
    kind = rng.random()
    if kind < 0.25:
        prompt = ([*rng.choice(PREFIXES)[: rng.randint(0, 22)], rng.randint(0, 2)])[: MAX_MODEL_LEN - 1]
        deadline_ms = rng.choice([None, 1.0, 8.0, 40.0])
        num, forks, beams = rng.randint(1, 3), rng.choice([0, 2]), rng.choice(BEAMS)
        max_tokens, priority, client, adapter = (
            rng.randint(1, 20),
            rng.randint(0, 2),
            rng.choice("abc"),
            rng.choice(ADAPTERS),
        )
        machine.submit([prompt] * num, max_tokens, priority, client, deadline_ms, forks, beams, adapter)
    elif kind < 0.85:
        machine.steps(rng.randint(1, 4))
    elif kind < 0.92:
        machine.set_limits(rng.random(), rng.random(), rng.random(), rng.choice([None, None, 0.5, 1.5, 4.0]))
        if machine.scheduler.kv_drains and rng.random() < 0.2:
            machine.hurry()
    elif machine.live:
        if len(machine.in_flight) < MAX_IN_FLIGHT:
            machine.launch()
        rules = [machine.abort]
        if machine.in_flight and machine.in_flight[0][0].sampled:
            rules.append(machine.fail_one_of_a_step)
        rng.choice(rules)(rng.randint(0, 20))


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=int(EXAMPLES or 150),
    stateful_step_count=30,
    deadline=None,
    derandomize=EXAMPLES is None,
    database=None,
)

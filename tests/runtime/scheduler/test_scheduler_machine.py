"""Random histories of the scheduler and its KV cache, each step checked against what must always hold.

The default run is the same every time. ``FLYBALL_FUZZ_EXAMPLES=5000 pytest <this file>`` explores new ones.
"""

import itertools
import os
import random
from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fake_model import FakeModel, expected_output
from flyball_protocol import Limits
from flyball_runtime.core.sequence import Sequence, SequenceStatus
from flyball_runtime.kv_cache import KVCache
from flyball_runtime.scheduler import BatchPlan, BlockedBy, Scheduler, SchedulerConfig
from flyball_runtime.scheduler.waiting_queue import OUTPUT_TOKEN_WEIGHT
from sequences import make_sequence

MAX_MODEL_LEN = 24
MAX_WAITING = 12
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
SHARES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])


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
        policy=st.sampled_from(["fcfs", "priority"]),
        fair_share=st.booleans(),
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
        policy: str,
        fair_share: bool,
        prompts: list[list[int]],
    ) -> None:
        num_blocks = -(-MAX_MODEL_LEN // block_size) + spare_tokens // block_size
        self.kv = KVCache(num_blocks, block_size, enable_prefix_caching=caching)
        config = SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=(max_num_seqs if chunked else MAX_MODEL_LEN) + spare_budget,
            enable_chunked_prefill=chunked,
            policy=policy,
            fair_share=fair_share,
        )
        self.scheduler = Scheduler(config, self.kv)
        self.model = FakeModel(num_blocks, block_size)
        self.ceiling = num_blocks
        self.live: dict[str, Sequence] = {}
        self.num_submitted = 0
        self.ended: Counter[str] = Counter()
        self.service: Counter[tuple[int, str]] = Counter()
        self.ahead: dict[tuple[tuple[int, str], tuple[int, str]], int] = {}
        self.submit(prompts, 16, 1, "a")

    # rules

    @precondition(lambda self: self.scheduler.num_waiting < MAX_WAITING)
    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=5),
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        client=st.sampled_from("abc"),
    )
    def submit(self, prompts: list[list[int]], max_tokens: int, priority: int, client: str) -> None:
        for prompt in prompts:
            self.submit_one(prompt, max_tokens, priority, client)

    @rule(num=st.integers(1, 8))
    def steps(self, num: int) -> None:
        for _ in range(num):
            self.step()
            self.holds()

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 20))
    def abort(self, pick: int) -> None:
        self.abort_one(self.pick_live(pick))

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 20))
    def abort_while_the_model_runs(self, pick: int) -> None:
        plan = self.scheduler.plan()
        assert plan is not None
        sampled = self.model.run(plan)
        self.abort_one(self.pick_live(pick))
        self.record(self.scheduler.commit(plan, sampled))

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 20))
    def fail_one_of_a_step(self, pick: int) -> None:
        """The model gave no token for one sequence: it ends, what it computed is forgotten, and the others go on."""
        plan = self.scheduler.plan()
        assert plan is not None
        sampled: list[int | None] = [*self.model.run(plan)]
        if plan.sampled:
            failed = plan.sampled[pick % len(plan.sampled)]
            sampled[plan.sampled.index(failed)] = None
            blocks = set(failed.block_table)
            self.scheduler.fail(failed)
            self.end(failed)
            assert not any(blocks & set(self.kv._pool.find([name])) for name in failed.block_hashes)
        self.record(self.scheduler.commit(plan, sampled))

    @precondition(lambda self: self.live)
    @rule()
    def fail_a_step(self) -> None:
        """The model raised: the engine aborts what was in the step and goes on."""
        plan = self.scheduler.plan()
        assert plan is not None
        for seq in plan.sequences:
            self.abort_one(seq.request_id)

    @precondition(lambda self: self.live)
    @rule(seqs=SHARES, kv=SHARES, budget=SHARES)
    def set_limits(self, seqs: float, kv: float, budget: float) -> None:
        """Move each limit to a share of the way from the lowest to the highest that the envelope allows."""
        envelope = self.scheduler.envelope
        limits = Limits(
            max_num_seqs=round(between(1, envelope.max_num_seqs, seqs)),
            kv_cache_fraction=between(envelope.min_kv_cache_fraction, 1.0, kv),
            max_num_batched_tokens=round(
                between(envelope.min_num_batched_tokens, envelope.max_num_batched_tokens, budget)
            ),
        )
        self.scheduler.set_limits(limits)
        assert self.scheduler.limits == limits
        self.ceiling = max(self.ceiling, self.kv.capacity)

    def teardown(self) -> None:
        """With nothing new, everything ends within a bounded number of steps and nothing stays behind."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2 * MAX_MODEL_LEN * len(self.live)):
            self.step()
            self.holds()
        assert not self.live, f"still unfinished: {self.live}"
        assert self.scheduler.plan() is None
        assert self.scheduler.blocked_by is BlockedBy.NONE
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert self.kv.counts().used == 0
        assert self.scheduler.effective == self.scheduler.limits
        assert self.ended == Counter({str(i): 1 for i in range(self.num_submitted)})

    # helpers of the rules

    def submit_one(self, prompt: list[int], max_tokens: int, priority: int, client: str) -> None:
        seq = make_sequence(
            prompt,
            max_tokens=max_tokens,
            priority=priority,
            client=client,
            request_id=str(self.num_submitted),
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=[STOP_TOKEN],
            hashed_by=self.kv.block_size if self.num_submitted % 2 else None,
        )
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

    def step(self) -> None:
        computed = {seq.request_id: seq.num_computed_tokens for seq in self.live.values()}
        running = self.running()
        plan = self.scheduler.plan()
        if plan is None:
            assert not self.live, "requests wait and nothing is computed"
            return
        self.check_shape(plan)
        self.check_order(plan, running)
        self.check_admissions(plan, running)
        self.check_blocked_by(plan)
        for seq in self.live.values():
            assert seq.num_computed_tokens >= computed[seq.request_id] or seq in plan.preempted
        self.record(self.scheduler.commit(plan, self.model.run(plan)))

    def check_shape(self, plan: BatchPlan) -> None:
        assert plan.num_tokens == sum(plan.num_scheduled)
        assert len({seq.request_id for seq in plan.sequences}) == len(plan.sequences) > 0
        for seq, start, num, samples in zip(plan.sequences, plan.starts, plan.num_scheduled, plan.samples, strict=True):
            assert num > 0
            assert start == seq.num_computed_tokens
            assert samples == (start + num == len(seq.token_ids))
            assert len(seq.block_table) * self.kv.block_size >= start + num

    def check_order(self, plan: BatchPlan, running: list[Sequence]) -> None:
        """Every running decode is in the plan, first; the rest keeps to the budget."""
        decodes = [
            seq
            for seq in running
            if len(seq.token_ids) - seq.num_computed_tokens == 1 and seq.status is SequenceStatus.RUNNING
        ]
        assert set(plan.sequences[: plan.num_decodes]) == set(decodes)
        assert set(plan.num_scheduled[: plan.num_decodes]) <= {1}
        assert plan.num_tokens <= max(self.scheduler.limits.max_num_batched_tokens, plan.num_decodes)
        assert plan.num_tokens <= self.scheduler.config.max_num_batched_tokens

    def check_admissions(self, plan: BatchPlan, running: list[Sequence]) -> None:
        admitted = [seq for seq in plan.sequences if seq not in running]
        for seq in admitted:
            if seq.num_preemptions == 0:
                self.service[self.account(seq)] += seq.num_prompt_tokens - seq.num_cached_tokens
        if admitted:
            assert not plan.preempted
            assert self.scheduler.num_running <= self.scheduler.limits.max_num_seqs
            assert self.kv.counts().used <= self.kv.capacity
        if not self.scheduler.config.enable_chunked_prefill:
            assert all(plan.samples)
        for seq in plan.preempted:
            assert seq not in plan.sequences
            assert seq.status is SequenceStatus.WAITING

    def check_blocked_by(self, plan: BatchPlan) -> None:
        scheduler, counts = self.scheduler, self.kv.counts()
        assert plan.blocked_by is scheduler.blocked_by
        assert (plan.blocked_by is BlockedBy.NONE) == (scheduler.num_waiting == 0)
        if plan.blocked_by is BlockedBy.SEQS:
            assert scheduler.num_running >= scheduler.limits.max_num_seqs
        if plan.blocked_by is BlockedBy.KV:
            most = self.kv.num_blocks_for(MAX_MODEL_LEN)
            assert plan.preempted or counts.capacity - counts.used < most
        if plan.blocked_by is BlockedBy.BUDGET and scheduler.config.enable_chunked_prefill:
            assert plan.num_tokens >= scheduler.limits.max_num_batched_tokens

    def record(self, results: list[tuple[Sequence, str | None]]) -> None:
        for seq, reason in results:
            assert self.live[seq.request_id] is seq, "a sequence got a token after its end"
            self.service[self.account(seq)] += OUTPUT_TOKEN_WEIGHT
            if reason is not None:
                self.end(seq)

    def end(self, seq: Sequence) -> None:
        assert seq.status is SequenceStatus.FINISHED
        assert seq.block_table == []
        assert seq.row is None
        self.check_output(seq)
        self.ended[seq.request_id] += 1
        del self.live[seq.request_id]

    def check_output(self, seq: Sequence) -> None:
        """Batched, chunked, cached and preempted as it may have been, it got what it would have got alone."""
        prompt, output = seq.token_ids[: seq.num_prompt_tokens], seq.token_ids[seq.num_prompt_tokens :]
        num_tokens = seq.max_total_tokens - seq.num_prompt_tokens
        assert output == expected_output(prompt, num_tokens, seq.stop_token_ids)[: len(output)]

    def running(self) -> list[Sequence]:
        return [seq for seq in self.live.values() if seq.status is SequenceStatus.RUNNING]

    # what holds between any two calls

    @invariant()
    def holds(self) -> None:
        self.blocks_are_accounted_for()
        self.backlogged_clients_get_the_same_service()
        self.capacity_holds()
        self.sequences_are_whole()

    def blocks_are_accounted_for(self) -> None:
        counts = self.kv.counts()
        owners = Counter(block for seq in self.live.values() for block in seq.block_table)
        assert counts.free + counts.used + counts.cached == counts.total == self.kv.num_blocks
        assert counts.used == len(owners)
        for block in range(self.kv.num_blocks):
            assert self.kv.num_refs(block) == owners[block]
        for seq in self.live.values():
            assert len(set(seq.block_table)) == len(seq.block_table)

    def backlogged_clients_get_the_same_service(self) -> None:
        """From when two clients both wait until one of them does not, neither gets more than a constant ahead."""
        config = self.scheduler.config
        most = 4 * (OUTPUT_TOKEN_WEIGHT * config.max_num_seqs + 1) * MAX_MODEL_LEN
        backlogged = {self.account(seq) for seq in self.live.values() if seq.status is SequenceStatus.WAITING}
        pairs = [(one, other) for one, other in itertools.combinations(sorted(backlogged), 2) if one[0] == other[0]]
        ahead = {(one, other): self.service[one] - self.service[other] for one, other in pairs}
        self.ahead = {pair: self.ahead.get(pair, now) for pair, now in ahead.items()}
        if config.fair_share:
            assert all(abs(now - self.ahead[pair]) <= most for pair, now in ahead.items())

    def account(self, seq: Sequence) -> tuple[int, str]:
        return (seq.priority if self.scheduler.config.policy == "priority" else 0, seq.client)

    def capacity_holds(self) -> None:
        counts, effective = self.kv.counts(), self.scheduler.effective
        assert counts.used <= self.ceiling
        assert counts.used + counts.cached <= max(counts.used, counts.capacity)
        if counts.used <= counts.capacity:
            self.ceiling = counts.capacity
        assert round(effective.kv_cache_fraction * counts.total) == max(counts.used, counts.capacity) or (
            counts.used <= counts.capacity and effective.kv_cache_fraction == self.scheduler.limits.kv_cache_fraction
        )
        assert effective.max_num_seqs == max(self.scheduler.limits.max_num_seqs, self.scheduler.num_running)

    def sequences_are_whole(self) -> None:
        running = self.running()
        rows = [seq.row for seq in running]
        assert len(set(rows)) == len(rows) == self.scheduler.num_running
        assert all(row is not None and row < self.scheduler.config.max_num_seqs for row in rows)
        assert self.scheduler.num_waiting == len(self.live) - len(running)
        for seq in self.live.values():
            if seq.status is SequenceStatus.WAITING:
                assert seq.block_table == []
                assert seq.num_computed_tokens == 0
                assert seq.row is None
            else:
                self.model.check(seq, seq.num_computed_tokens)
                assert len(seq.block_table) * self.kv.block_size >= len(seq.token_ids) - 1


def test_long_histories_under_load() -> None:
    """Hypothesis favours short histories; these keep the pool full for hundreds of calls."""
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
            policy=rng.choice(["fcfs", "priority"]),
            fair_share=rng.random() < 0.7,
            prompts=[[1, 2, 1]],
        )
        for _ in range(200):
            random_call(machine, rng)
            machine.holds()
        machine.teardown()


def random_call(machine: SchedulerMachine, rng: random.Random) -> None:
    kind = rng.random()
    if kind < 0.25:
        prompt = ([*rng.choice(PREFIXES)[: rng.randint(0, 22)], rng.randint(0, 2)])[: MAX_MODEL_LEN - 1]
        machine.submit([prompt] * rng.randint(1, 3), rng.randint(1, 20), rng.randint(0, 2), rng.choice("abc"))
    elif kind < 0.85:
        machine.steps(rng.randint(1, 4))
    elif kind < 0.92:
        machine.set_limits(rng.random(), rng.random(), rng.random())
    elif machine.live:
        rules = [machine.abort, machine.abort_while_the_model_runs, machine.fail_one_of_a_step]
        rng.choice(rules)(rng.randint(0, 20))


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=int(EXAMPLES or 150),
    stateful_step_count=30,
    deadline=None,
    derandomize=EXAMPLES is None,
    database=None,
)

import logging
from array import array

import pytest
from msgspec import structs

from flyball_protocol import Limits
from flyball_runtime.core.errors import ConfigError, EmptyPrompt, InvalidRequest, PromptTooLong
from flyball_runtime.core.request import Sequence, SequenceStatus
from flyball_runtime.governor import MIN_CHUNK
from flyball_runtime.kv_cache import KVCache, PrefixMatch
from flyball_runtime.scheduler import (
    BlockCopy,
    BlockedBy,
    Ending,
    Order,
    RowStart,
    Scheduler,
    SchedulerConfig,
    Step,
    TableWrite,
)
from sequences import TOKEN, make_sequence, step

BLOCK_SIZE = 4
MAX_MODEL_LEN = 32


def make_scheduler(num_blocks: int = 64, *, caching: bool = True, **settings) -> Scheduler:
    defaults = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    kv = KVCache(num_blocks, BLOCK_SIZE, enable_prefix_caching=caching)
    return Scheduler(SchedulerConfig(**(defaults | settings)), kv)


def submit(
    scheduler: Scheduler, *prompts: int | list[int], max_tokens: int | None = None, priority: int = 0
) -> list[Sequence]:
    sequences = [
        make_sequence(prompt, max_tokens=max_tokens, priority=priority, max_model_len=MAX_MODEL_LEN, eos_token_ids=[0])
        for prompt in prompts
    ]
    for seq in sequences:
        scheduler.submit(seq)
    return sequences


def commit(scheduler: Scheduler, plan: Step, token_ids: list[int | None]) -> list[tuple[Sequence, Ending | None]]:
    """Commit a step; return each of its sequences that got a token or ended, with the reason."""
    endings = dict(scheduler.commit(plan, token_ids))
    return [(seq, endings.get(seq)) for seq in plan.sequences if seq in endings or seq in plan.got_tokens]


def scheduled(plan: Step) -> dict[str, int]:
    return {seq.request_id: num for seq, num in zip(plan.sequences, plan.num_scheduled, strict=True)}


def limits(scheduler: Scheduler, **changes) -> Limits:
    values = {name: getattr(scheduler.limits, name) for name in Limits.__struct_fields__}
    return Limits(**(values | changes))


# planning


def test_an_idle_scheduler_plans_nothing():
    scheduler = make_scheduler()
    assert scheduler.plan() is None


def test_a_prompt_then_its_decodes():
    scheduler = make_scheduler()
    (seq,) = submit(scheduler, 6, max_tokens=3)
    plan = step(scheduler)
    assert (plan.starts, plan.num_scheduled, plan.samples) == ([0], [6], [True])
    assert (plan.num_decodes, plan.num_tokens, plan.plan.num_prefill_tokens) == (0, 6, 6)
    plan = step(scheduler)
    assert (plan.starts, plan.num_scheduled, plan.samples) == ([6], [1], [True])
    assert (plan.num_decodes, plan.num_tokens, plan.plan.num_prefill_tokens) == (1, 1, 0)
    assert seq.num_output_tokens == 2


def test_a_plan_does_not_change():
    scheduler = make_scheduler()
    submit(scheduler, 6)
    with pytest.raises(AttributeError):
        scheduler.plan().plan.num_tokens = 0


def test_decodes_come_first_then_chunks_in_progress_then_new_requests():
    scheduler = make_scheduler(max_num_batched_tokens=10)
    (chunked,) = submit(scheduler, 2)
    step(scheduler)
    long, new = submit(scheduler, 16, 5)
    assert scheduled(step(scheduler)) == {chunked.request_id: 1, long.request_id: 9}
    plan = step(scheduler)
    assert list(scheduled(plan).items()) == [(chunked.request_id, 1), (long.request_id, 7), (new.request_id, 2)]
    assert plan.samples == [True, True, False]
    assert plan.num_tokens == 10


def test_a_long_prompt_never_holds_up_a_decode():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    (decoding,) = submit(scheduler, 1)
    step(scheduler)
    submit(scheduler, 30)
    for _ in range(10):
        assert step(scheduler).sequences[0] is decoding


def test_without_chunked_prefill_a_prompt_is_computed_whole_or_not_at_all():
    scheduler = make_scheduler(max_num_batched_tokens=32, enable_chunked_prefill=False)
    first, second = submit(scheduler, 20, 13)
    plan = step(scheduler)
    assert scheduled(plan) == {first.request_id: 20}
    assert plan.blocked_by is BlockedBy.BUDGET
    assert scheduled(step(scheduler)) == {first.request_id: 1, second.request_id: 13}


def test_a_request_that_does_not_fit_holds_up_those_behind_it():
    scheduler = make_scheduler(num_blocks=8)
    submit(scheduler, 20, 20, 1)
    assert len(step(scheduler).sequences) == 1
    assert scheduler.num_waiting == 2


def test_a_found_prefix_is_not_computed_again():
    scheduler = make_scheduler()
    prompt = list(range(1, 14))
    submit(scheduler, prompt, max_tokens=1)
    first = step(scheduler)
    (again,) = submit(scheduler, prompt)
    second = step(scheduler)
    assert (first.num_prefix_queried_tokens, first.num_prefix_hit_tokens) == (13, 0)
    assert (second.num_prefix_queried_tokens, second.num_prefix_hit_tokens) == (13, 12)
    assert (second.starts, second.num_scheduled, again.num_cached_tokens) == ([12], [1], 12)


@pytest.mark.parametrize("num_prompt_tokens", [5, 6, 7, 8])
def test_blocks_filled_by_prompt_or_output_are_found(num_prompt_tokens: int):
    scheduler = make_scheduler()
    (first,) = submit(scheduler, num_prompt_tokens, max_tokens=9 - num_prompt_tokens)
    while scheduler.num_running or scheduler.num_waiting:
        step(scheduler)
    (again,) = submit(scheduler, first.token_ids)
    step(scheduler)
    assert (len(first.token_ids), again.num_cached_tokens) == (9, 8)


def test_without_prefix_caching_no_tokens_are_counted_as_queried():
    scheduler = make_scheduler(caching=False)
    submit(scheduler, 13)
    assert step(scheduler).num_prefix_queried_tokens == 0


def test_rows_are_the_lowest_free_ones():
    scheduler = make_scheduler()
    a, b, c = submit(scheduler, 1, 1, 1)
    step(scheduler)
    assert (a.row, b.row, c.row) == (0, 1, 2)
    scheduler.abort(c.request_id)
    scheduler.abort(a.request_id)
    d, e = submit(scheduler, 1, 1)
    step(scheduler)
    assert (a.row, c.row) == (None, None)
    assert (d.row, b.row, e.row) == (0, 1, 2)


# what blocks the head of the queue


def test_blocked_by_seats():
    scheduler = make_scheduler(max_num_seqs=2)
    submit(scheduler, 1, 1, 1)
    assert step(scheduler).blocked_by is BlockedBy.SEQS
    assert step(scheduler).blocked_by is BlockedBy.SEQS, "said at every step, also without admissions"


def test_blocked_by_kv():
    scheduler = make_scheduler(num_blocks=8)
    submit(scheduler, 20, 20)
    assert step(scheduler).blocked_by is BlockedBy.KV


def test_blocked_by_budget():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    submit(scheduler, 4, 4)
    assert step(scheduler).blocked_by is BlockedBy.BUDGET


def test_missing_blocks_are_named_before_a_spent_budget():
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=20)
    submit(scheduler, 20, 20)
    assert step(scheduler).blocked_by is BlockedBy.KV


class CountingKVCache(KVCache):
    """Counts look-ups."""

    num_looked_up = 0

    def match_prefix(self, seq: Sequence, num_step_tokens: int | None = None) -> PrefixMatch:
        self.num_looked_up += 1
        return super().match_prefix(seq, num_step_tokens)


def test_a_head_that_lacks_blocks_is_not_looked_up_in_every_step():
    kv = CountingKVCache(8, BLOCK_SIZE)
    scheduler = Scheduler(SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=4, max_num_batched_tokens=64), kv)
    submit(scheduler, 20, 16, max_tokens=9)
    assert [step(scheduler).blocked_by for _ in range(8)] == [BlockedBy.KV] * 8
    assert kv.num_looked_up == 2
    step(scheduler)
    assert step(scheduler).blocked_by is BlockedBy.NONE, "the first has ended"
    assert kv.num_looked_up == 3


def test_a_head_is_not_looked_up_in_steps_without_budget():
    kv = CountingKVCache(64, BLOCK_SIZE)
    scheduler = Scheduler(SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=4, max_num_batched_tokens=4), kv)
    submit(scheduler, 30, 4)
    assert [step(scheduler).blocked_by for _ in range(7)] == [BlockedBy.BUDGET] * 7
    assert kv.num_looked_up == 2
    assert step(scheduler).blocked_by is BlockedBy.NONE, "2 of 4 tokens are left, so it is admitted"


def test_a_head_that_lacks_blocks_is_looked_up_when_another_sequence_has_computed_more_of_its_prefix():
    """8 blocks: the first takes 5 for its 20 tokens, the second shares them as soon as they are computed, and needs 1 more."""
    kv = CountingKVCache(8, BLOCK_SIZE)
    scheduler = Scheduler(SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=4, max_num_batched_tokens=4), kv)
    prompt = list(range(1, 21))
    submit(scheduler, prompt, [*prompt, 21, 22], max_tokens=2)
    blocked = []
    while scheduler.num_waiting:
        blocked.append(step(scheduler).blocked_by)
    assert blocked == [BlockedBy.KV] * 3 + [BlockedBy.BUDGET] * 2 + [BlockedBy.NONE]


def test_preemptions_are_no_line_of_the_log_each(caplog: pytest.LogCaptureFixture):
    scheduler = make_scheduler(num_blocks=8, caching=False)
    submit(scheduler, 14, 14, max_tokens=10)
    preempted: list[Sequence] = []
    with caplog.at_level(logging.INFO):
        while (plan := scheduler.plan()) is not None:
            preempted += plan.preempted
            scheduler.commit(plan, [TOKEN] * sum(plan.samples))
    assert preempted
    assert caplog.records == []


def test_blocked_by_nothing_when_nobody_waits():
    scheduler = make_scheduler()
    submit(scheduler, 4)
    assert step(scheduler).blocked_by is BlockedBy.NONE


# what a governor and a simulator need


class Tokens:
    """A pace of so many tokens in a step with decodes."""

    target_s: float | None = None

    def __init__(self, num_tokens: int, max_decodes: int = 1000) -> None:
        self.num_tokens = num_tokens
        self.max_decodes = max_decodes
        self.seen: list[tuple[int, int, int, int]] = []

    def chunk(self, step: Step, start: int, most: int, least: int = 0) -> int:
        self.seen.append((step.num_decodes, step.num_tokens, start, most))
        return max(min(most, self.num_tokens - step.num_tokens), min(least, most), 0) if step.num_decodes else most

    def fits(self, num_decodes: int, num_context_tokens: int) -> bool:
        self.asked = (num_decodes, num_context_tokens)
        return num_decodes <= self.max_decodes


def test_nobody_is_admitted_whose_decodes_a_step_has_no_time_for():
    """A decode, a prompt in progress, and one more: three sequences, with what they will read."""
    pace = Tokens(64, max_decodes=2)
    config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=4, max_num_batched_tokens=10)
    scheduler = Scheduler(config, KVCache(64, BLOCK_SIZE), pace=pace)
    submit(scheduler, 4)
    step(scheduler)
    submit(scheduler, 20)
    step(scheduler)
    (waits,) = submit(scheduler, 7)
    assert step(scheduler).blocked_by is BlockedBy.STEP_TIME
    assert pace.asked == (3, 6 + 20 + 7)
    pace.max_decodes = 0
    for seq in list(scheduler.running):
        scheduler.abort(seq.request_id)
    assert step(scheduler).sequences == [waits], "alone it runs, however long its steps are"


def test_a_pace_takes_tokens_from_a_step_and_is_named_for_it():
    pace = Tokens(5)
    config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=4, max_num_batched_tokens=64)
    scheduler = Scheduler(config, KVCache(64, BLOCK_SIZE), pace=pace)
    submit(scheduler, 4)
    step(scheduler)
    submit(scheduler, 8)
    plan = step(scheduler)
    assert (plan.num_tokens, plan.blocked_by) == (5, BlockedBy.NONE)
    (late,) = submit(scheduler, 3)
    plan = step(scheduler)
    assert (plan.num_tokens, plan.blocked_by) == (5, BlockedBy.STEP_TIME), (
        "the rest of the prompt, whatever the pace says"
    )
    assert list(dict.fromkeys(pace.seen)) == [(0, 0, 0, 4), (1, 1, 0, 8), (1, 1, 4, 4), (1, 5, 0, 3)]
    assert (late.status, scheduler.num_waiting) == (SequenceStatus.WAITING, 1)
    assert len(list(scheduler.running)) == 2


def test_a_pace_never_raises_the_budget_nor_holds_decodes_back():
    for tokens, expected in ((1000, 64), (0, 2)):
        config = SchedulerConfig(max_model_len=96, max_num_seqs=4, max_num_batched_tokens=64)
        scheduler = Scheduler(config, KVCache(64, BLOCK_SIZE), pace=Tokens(tokens))
        submit(scheduler, 2, 2)
        step(scheduler)
        scheduler.submit(make_sequence(90, max_model_len=96))
        assert step(scheduler).num_tokens == expected


def test_a_prompt_once_begun_goes_on_however_slow_the_steps_are():
    config = SchedulerConfig(max_model_len=96, max_num_seqs=4, max_num_batched_tokens=64)
    pace = Tokens(3)
    scheduler = Scheduler(config, KVCache(64, BLOCK_SIZE), pace=pace)
    submit(scheduler, 2)
    step(scheduler)
    scheduler.submit(make_sequence(90, max_model_len=96))
    assert step(scheduler).num_tokens == 3
    pace.num_tokens = 0
    assert step(scheduler).num_tokens == 1 + MIN_CHUNK


def test_without_chunked_prefill_nobody_asks_the_pace():
    config = SchedulerConfig(max_model_len=96, max_num_seqs=4, max_num_batched_tokens=96, enable_chunked_prefill=False)
    pace = Tokens(3)
    scheduler = Scheduler(config, KVCache(64, BLOCK_SIZE), pace=pace)
    submit(scheduler, 2)
    step(scheduler)
    scheduler.submit(make_sequence(90, max_model_len=96))
    assert (step(scheduler).num_tokens, pace.seen) == (91, [])


def test_the_pace_aims_at_what_the_limits_say():
    config = SchedulerConfig(max_model_len=96, max_num_seqs=4, max_num_batched_tokens=64)
    pace = Tokens(3)
    scheduler = Scheduler(config, KVCache(64, BLOCK_SIZE), pace=pace)
    scheduler.set_limits(structs.replace(scheduler.limits, step_time_target_ms=20.0))
    assert pace.target_s == 0.02
    scheduler.set_limits(structs.replace(scheduler.limits, step_time_target_ms=None))
    assert pace.target_s is None


def test_another_policy_may_be_given():
    config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=1, max_num_batched_tokens=64)
    scheduler = Scheduler(
        config, KVCache(64, BLOCK_SIZE), policy=lambda seq: Order((seq.num_prompt_tokens,), (seq.arrival_index,))
    )
    _, short = submit(scheduler, 9, 2)
    assert step(scheduler).sequences == [short]


# ends


def test_max_tokens_ends_a_sequence_with_length():
    scheduler = make_scheduler()
    (seq,) = submit(scheduler, 3, max_tokens=2)
    plan = scheduler.plan()
    assert commit(scheduler, plan, [7]) == [(seq, None)]
    plan = scheduler.plan()
    assert commit(scheduler, plan, [8]) == [(seq, "length")]
    assert list(seq.token_ids[3:]) == [7, 8]
    assert seq.status is SequenceStatus.FINISHED
    assert scheduler.plan() is None


def test_the_model_length_ends_a_sequence_with_length():
    scheduler = make_scheduler()
    (seq,) = submit(scheduler, MAX_MODEL_LEN - 1)
    assert commit(scheduler, scheduler.plan(), [7]) == [(seq, "length")]
    assert len(seq.token_ids) == MAX_MODEL_LEN


def test_a_stop_token_ends_a_sequence_and_stays_its_last():
    scheduler = make_scheduler()
    (seq,) = submit(scheduler, 3, max_tokens=1)
    assert commit(scheduler, scheduler.plan(), [0]) == [(seq, "stop")], "stop wins over length"
    assert seq.token_ids[-1] == 0


def test_an_unfinished_chunk_gets_no_token():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    (seq,) = submit(scheduler, 6)
    assert commit(scheduler, scheduler.plan(), []) == []
    assert (seq.num_computed_tokens, len(seq.token_ids)) == (4, 6)


@pytest.mark.parametrize("sampled", [[], [1, 2]])
def test_a_wrong_number_of_sampled_tokens_is_refused_before_anything_changes(sampled: list[int]):
    scheduler = make_scheduler()
    (seq,) = submit(scheduler, 3)
    plan = scheduler.plan()
    with pytest.raises(ValueError, match=f"got {len(sampled)} sampled tokens for a plan that samples 1"):
        scheduler.commit(plan, sampled)
    assert len(seq.token_ids) == 3
    assert commit(scheduler, plan, [1]) == [(seq, None)]


def test_the_blocks_of_a_finished_sequence_are_free_or_cached():
    scheduler = make_scheduler()
    submit(scheduler, 9, max_tokens=1)
    step(scheduler)
    blocks = scheduler._kv.counts()
    assert (blocks.used, blocks.cached) == (0, 2)


# abort


def test_abort_of_a_running_sequence_frees_its_blocks_at_once():
    scheduler = make_scheduler()
    (seq,) = submit(scheduler, 9)
    step(scheduler)
    assert scheduler.abort(seq.request_id)
    assert scheduler._kv.counts().used == 0
    assert (seq.status, seq.row) == (SequenceStatus.FINISHED, None)
    assert scheduler.plan() is None


def test_abort_of_a_waiting_sequence_takes_it_from_the_queue():
    scheduler = make_scheduler(max_num_seqs=1)
    _, waiting, behind = submit(scheduler, 1, 1, 1)
    step(scheduler)
    assert scheduler.abort(waiting.request_id)
    assert scheduler.num_waiting == 1
    assert behind.status is SequenceStatus.WAITING


def test_abort_of_an_unknown_or_ended_request_does_nothing():
    scheduler = make_scheduler()
    (seq,) = submit(scheduler, 1, max_tokens=1)
    step(scheduler)
    assert not scheduler.abort(seq.request_id)
    assert not scheduler.abort("never seen")


def test_a_sequence_aborted_while_the_model_runs_gets_no_token():
    scheduler = make_scheduler()
    gone, stays = submit(scheduler, 3, 3)
    plan = scheduler.plan()
    scheduler.abort(gone.request_id)
    assert commit(scheduler, plan, [7, 8]) == [(stays, None)]
    assert gone.num_output_tokens == 0


# failure


def test_a_failed_sequence_frees_its_blocks_and_leaves_nothing_in_the_prefix_cache():
    scheduler = make_scheduler()
    failed, stays = submit(scheduler, 9, 3)
    assert commit(scheduler, scheduler.plan(), [None, 8]) == [(failed, "failed"), (stays, None)]
    assert (failed.status, failed.row, failed.num_output_tokens) == (SequenceStatus.FINISHED, None, 0)
    blocks = scheduler._kv.counts()
    assert (blocks.used, blocks.cached) == (1, 0)
    assert not scheduler.abort(failed.request_id)


def test_blocks_that_earlier_steps_cached_are_forgotten_when_a_sequence_fails():
    scheduler = make_scheduler()
    (failed,) = submit(scheduler, 9)
    step(scheduler)
    (shares,) = submit(scheduler, [*failed.token_ids[:8], 5])
    plan = scheduler.plan()
    assert shares.num_cached_tokens == 8
    scheduler.commit(plan, [None, 8])
    (after,) = submit(scheduler, [*failed.token_ids[:8], 6])
    step(scheduler)
    assert after.num_cached_tokens == 0


# steps in flight


def test_the_next_step_is_planned_before_the_last_is_committed():
    scheduler = make_scheduler()
    (seq,) = submit(scheduler, 3, max_tokens=3)
    first, second = scheduler.plan(), scheduler.plan()
    assert (second.starts, second.num_decodes, second.plan.token_ids) == ([3], 1, b"")
    assert (seq.num_computed_tokens, seq.num_uncomputed_tokens, len(seq.token_ids)) == (4, 1, 3)
    assert commit(scheduler, first, [7]) == [(seq, None)]
    third = scheduler.plan()
    assert scheduler.plan() is None, "its last token is pending"
    assert commit(scheduler, second, [8]) == [(seq, None)]
    assert commit(scheduler, third, [9]) == [(seq, "length")]
    assert list(seq.token_ids[3:]) == [7, 8, 9]


def test_steps_are_committed_in_their_order_and_once():
    scheduler = make_scheduler()
    submit(scheduler, 3)
    first, second = scheduler.plan(), scheduler.plan()
    with pytest.raises(ValueError, match="in the order in which they were planned"):
        scheduler.commit(second, [7])
    scheduler.commit(first, [7])
    with pytest.raises(ValueError, match="each once"):
        scheduler.commit(first, [7])


def test_a_token_behind_a_stop_token_is_dropped_and_the_blocks_are_free_when_its_step_has_ended():
    scheduler = make_scheduler(caching=False)
    (seq,) = submit(scheduler, 3)
    first, second = scheduler.plan(), scheduler.plan()
    assert commit(scheduler, first, [0]) == [(seq, "stop")]
    assert (seq.block_table, scheduler._kv.counts().used) == ([], 1), "the second step still writes there"
    assert scheduler.plan() is None
    assert commit(scheduler, second, [7]) == []
    assert (list(seq.token_ids[3:]), scheduler._kv.counts().used) == ([0], 0)


def test_blocks_of_an_aborted_sequence_are_free_when_its_last_step_has_ended():
    scheduler = make_scheduler(caching=False)
    gone, stays = submit(scheduler, 3, 3)
    first, second = scheduler.plan(), scheduler.plan()
    scheduler.abort(gone.request_id)
    third = scheduler.plan()
    assert third.sequences == [stays]
    used = [scheduler._kv.counts().used]
    for planned, tokens in ((first, [7, 8]), (second, [7, 8]), (third, [8])):
        scheduler.commit(planned, tokens)
        used.append(scheduler._kv.counts().used)
    assert used == [3, 3, 2, 2], "the second step may still write to a block of the aborted one"


def test_a_row_goes_to_another_sequence_while_a_step_of_the_last_is_in_flight():
    scheduler = make_scheduler(max_num_seqs=1)
    gone, new = submit(scheduler, 3, 4)
    first = scheduler.plan()
    scheduler.abort(gone.request_id)
    second = scheduler.plan()
    (start,) = second.plan.row_starts
    assert (start.row, start.epoch, second.sequences) == (0, 2, [new])
    assert commit(scheduler, first, [7]) == []
    assert commit(scheduler, second, [8]) == [(new, None)]


def test_nobody_is_preempted_while_a_step_in_flight_may_free_blocks():
    scheduler = make_scheduler(num_blocks=10, caching=False)
    first, second = submit(scheduler, 19, 19)
    step(scheduler)
    ahead = scheduler.plan()
    assert scheduler.plan() is None, "each needs one more of the 10 blocks"
    assert scheduler.num_in_flight == 1
    scheduler.commit(ahead, [7, 0])
    assert second.status is SequenceStatus.FINISHED
    assert (scheduler.plan().sequences, first.num_preemptions) == ([first], 0)


def test_a_plan_says_what_changes_and_no_more():
    scheduler = make_scheduler(max_num_batched_tokens=6)
    (seq,) = submit(scheduler, [5, 6, 7, 8, 9, 10, 11])
    plan = step(scheduler).plan
    assert plan.row_starts == [RowStart(0, 1, 11, seq.sampling)]
    assert plan.table_writes == [TableWrite(0, 0, seq.block_table)]
    token_ids = array("I", plan.token_ids).tolist()
    assert (plan.rows, token_ids, plan.samples, plan.prefill_work) == ([0], [5, 6, 7, 8, 9, 10], [False], 21)
    plan = step(scheduler).plan
    assert (plan.row_starts, plan.table_writes, plan.token_ids) == ([], [], b""), "the row has the last token"
    assert (plan.num_decodes, plan.starts, plan.num_context_tokens) == (1, [6], 7)
    assert (step(scheduler).plan.table_writes, len(seq.block_table)) == ([], 2)
    assert step(scheduler).plan.table_writes == [TableWrite(0, 2, seq.block_table[2:])]


# preemption


def fill_pool(scheduler: Scheduler) -> list[Sequence]:
    """Two sequences that use all 10 blocks, the next decode of each needing one more."""
    sequences = submit(scheduler, 19, 19)
    step(scheduler)
    assert scheduler._kv.counts().used == 10
    step(scheduler)
    return sequences


def test_the_last_arrival_is_preempted_and_waits_first():
    scheduler = make_scheduler(num_blocks=10)
    first, second = fill_pool(scheduler)
    submit(scheduler, 1)
    plan = step(scheduler)
    assert plan.preempted == [second]
    assert plan.blocked_by is BlockedBy.KV
    assert plan.sequences == [first], "nothing is admitted in a step that preempted"
    assert (second.status, second.row, second.block_table, second.num_computed_tokens) == (
        SequenceStatus.WAITING, None, [], 0,
    )  # fmt: skip
    scheduler.abort(first.request_id)
    assert step(scheduler).sequences[0] is second


def test_a_preempted_sequence_keeps_its_tokens_and_counts_what_it_computes_again():
    scheduler = make_scheduler(num_blocks=10, caching=False)
    first, second = fill_pool(scheduler)
    assert step(scheduler).num_recomputed_tokens == 0
    scheduler.abort(first.request_id)
    plan = step(scheduler)
    assert (plan.starts, plan.num_scheduled, plan.num_recomputed_tokens) == ([0], [21], 20)
    assert (second.num_output_tokens, second.num_preemptions) == (3, 1)


def test_what_the_prefix_cache_kept_is_not_recomputed():
    scheduler = make_scheduler(num_blocks=10)
    first, second = fill_pool(scheduler)
    step(scheduler)
    scheduler.abort(first.request_id)
    plan = step(scheduler)
    assert (plan.starts, plan.num_recomputed_tokens) == ([16], 4)
    assert second.num_cached_tokens == 0, "a sequence's own blocks are no prefix hit"
    assert (plan.num_prefix_queried_tokens, plan.num_prefix_hit_tokens) == (0, 0)


def test_what_several_readmitted_sequences_compute_again_adds_up():
    """8 blocks: the first sequence has 6. Its 7th needs both others to go, because each of them needs a 2nd block too."""
    scheduler = make_scheduler(num_blocks=8, caching=False)
    first, second, third = submit(scheduler, 23, 3, 3)
    step(scheduler)
    step(scheduler)
    assert set(step(scheduler).preempted) == {second, third}
    scheduler.abort(first.request_id)
    plan = step(scheduler)
    assert (plan.num_scheduled, plan.num_recomputed_tokens) == ([5, 5], 4 + 4)


def test_a_sequence_that_finds_more_cached_than_it_lost_computes_nothing_again():
    """13 blocks: both prompts start alike, and the second is preempted when it has computed 4 of 25 tokens."""
    scheduler = make_scheduler(num_blocks=13, max_num_batched_tokens=28)
    prompt = list(range(1, 25))
    submit(scheduler, prompt)
    (preempted,) = submit(scheduler, [*prompt, 25])
    assert step(scheduler).num_scheduled == [24, 4]
    assert step(scheduler).preempted == [preempted]
    plan = step(scheduler)
    assert (plan.sequences[1], plan.starts[1], plan.num_recomputed_tokens) == (preempted, 24, 0)


def test_the_lowest_priority_is_preempted():
    scheduler = make_scheduler(num_blocks=10, policy="priority")
    low, high = submit(scheduler, 19, priority=5) + submit(scheduler, 19, priority=1)
    step(scheduler)
    step(scheduler)
    plan = step(scheduler)
    assert (plan.preempted, plan.sequences) == ([low], [high])


def test_priority_is_admitted_in_its_order():
    scheduler = make_scheduler(max_num_seqs=2, policy="priority")
    c, a, b = submit(scheduler, 1, priority=2) + submit(scheduler, 1, 1, priority=1)
    assert step(scheduler).sequences == [a, b]
    assert c.status is SequenceStatus.WAITING


def test_a_lone_sequence_grows_to_the_model_length():
    scheduler = make_scheduler(num_blocks=MAX_MODEL_LEN // BLOCK_SIZE)
    (seq,) = submit(scheduler, 1)
    while scheduler.num_running or scheduler.num_waiting:
        assert step(scheduler).preempted == []
    assert len(seq.token_ids) == MAX_MODEL_LEN


# submit


def test_what_could_never_run_is_refused():
    scheduler = make_scheduler()
    with pytest.raises(EmptyPrompt):
        submit(scheduler, [])
    with pytest.raises(PromptTooLong, match="prompt has 32 tokens"):
        submit(scheduler, MAX_MODEL_LEN)
    with pytest.raises(PromptTooLong):
        scheduler.submit(make_sequence(3, max_model_len=MAX_MODEL_LEN + 1))
    assert scheduler.num_waiting == 0


def test_an_id_in_use_is_refused():
    scheduler = make_scheduler()
    scheduler.submit(make_sequence(1, request_id="x", max_tokens=1))
    with pytest.raises(InvalidRequest, match="request_id x is in use"):
        scheduler.submit(make_sequence(1, request_id="x", max_tokens=1))
    step(scheduler)
    scheduler.submit(make_sequence(1, request_id="x", max_tokens=1))


def test_a_kv_cache_too_small_for_one_sequence_stops_start_up():
    with pytest.raises(ConfigError, match="7 blocks of 4 tokens; one sequence of --max-model-len 32 needs 8"):
        make_scheduler(num_blocks=7)


# live limits


def test_lowering_max_num_seqs_drains():
    scheduler = make_scheduler()
    sequences = submit(scheduler, 1, 1, 1, 1)
    step(scheduler)
    submit(scheduler, 1)
    scheduler.set_limits(limits(scheduler, max_num_seqs=2))
    assert (scheduler.limits.max_num_seqs, scheduler.effective.max_num_seqs) == (2, 4)
    plan = step(scheduler)
    assert (len(plan.sequences), plan.blocked_by) == (4, BlockedBy.SEQS)
    scheduler.abort(sequences[0].request_id)
    assert scheduler.effective.max_num_seqs == 3
    scheduler.abort(sequences[1].request_id)
    assert scheduler.effective == scheduler.limits
    assert step(scheduler).blocked_by is BlockedBy.SEQS
    scheduler.abort(sequences[2].request_id)
    assert step(scheduler).blocked_by is BlockedBy.NONE


def test_lowering_the_kv_fraction_drains_without_preemption():
    scheduler = make_scheduler(num_blocks=16, caching=False)
    first, second = submit(scheduler, 20, 24)
    step(scheduler)
    submit(scheduler, 4)
    scheduler.set_limits(limits(scheduler, kv_cache_fraction=0.5))
    assert (scheduler.effective.kv_cache_fraction, scheduler._kv.capacity) == (11 / 16, 8)
    for _ in range(6):
        plan = step(scheduler)
        assert (plan.sequences, plan.preempted, plan.blocked_by) == ([first, second], [], BlockedBy.KV)
    assert scheduler._kv.counts().used == 15, "running sequences go on growing"
    scheduler.abort(second.request_id)
    assert (scheduler.effective.kv_cache_fraction, scheduler._kv.size) == (14 / 16, 14), (
        "memory is still to be given back"
    )
    assert step(scheduler).blocked_by is BlockedBy.NONE
    assert (scheduler.effective, scheduler._kv.size) == (scheduler.limits, 8)


def test_blocks_move_down_when_memory_is_given_up():
    scheduler = make_scheduler(num_blocks=16)
    gone, stays = submit(scheduler, 17, 18)
    step(scheduler)
    assert stays.block_table == [5, 6, 7, 8, 9]
    scheduler.abort(gone.request_id)
    scheduler.set_limits(limits(scheduler, kv_cache_fraction=0.5))
    assert (scheduler.effective.kv_cache_fraction, scheduler._kv.size) == (10 / 16, 10), "what nobody uses goes at once"
    (behind,) = submit(scheduler, [*stays.token_ids[:16], 1])
    plan = step(scheduler).plan
    assert plan.block_copies == [BlockCopy(9, 3), BlockCopy(8, 4)]
    assert (stays.block_table, scheduler._kv.size) == ([5, 6, 7, 4, 3], 8)
    assert behind.block_table[:4] == [5, 6, 7, 4], "what moved is still found"
    moves = [TableWrite(stays.row, 4, [3]), TableWrite(stays.row, 3, [4])]
    assert plan.table_writes == [*moves, TableWrite(behind.row, 0, behind.block_table)]


def test_with_nothing_to_compute_what_is_cached_above_a_lowered_limit_is_forgotten():
    scheduler = make_scheduler(num_blocks=16)
    seq, _ = submit(scheduler, 31, 31, max_tokens=1)
    step(scheduler)
    scheduler.set_limits(limits(scheduler, kv_cache_fraction=0.5))
    assert (scheduler._kv.size, scheduler._kv.counts().cached) == (15, 8)
    scheduler.give_back()
    assert (scheduler._kv.size, scheduler._kv.counts().cached) == (8, 1)
    assert scheduler.effective == scheduler.limits
    (again,) = submit(scheduler, seq.token_ids[:31])
    step(scheduler)
    assert again.num_cached_tokens == 4


def test_a_drain_past_its_deadline_preempts_until_what_runs_fits():
    scheduler = make_scheduler(num_blocks=16, caching=False)
    first, second, third = submit(scheduler, 12, 12, 12)
    step(scheduler)
    ahead = scheduler.plan()
    scheduler.set_limits(limits(scheduler, kv_cache_fraction=0.5), kv_deadline_s=7.0)
    in_time = scheduler.plan(6.9)
    assert in_time is not None and scheduler.kv_drains
    assert scheduler.plan(7.0) is None, "a step in flight may end somebody"
    scheduler.commit(ahead, [TOKEN] * 3)
    scheduler.commit(in_time, [TOKEN] * 3)
    plan = scheduler.plan(7.0)
    assert plan is not None
    assert (plan.preempted, plan.sequences) == ([third], [first, second])
    assert not scheduler.kv_drains
    assert (scheduler.effective, scheduler._kv.size) == (scheduler.limits, 8)


def test_lowering_the_budget_below_the_decodes_drains():
    scheduler = make_scheduler()
    sequences = submit(scheduler, 1, 1, 1)
    step(scheduler)
    submit(scheduler, 1)
    scheduler.set_limits(limits(scheduler, max_num_batched_tokens=2))
    assert scheduler.effective.max_num_batched_tokens == 3
    plan = step(scheduler)
    assert (plan.num_decodes, plan.blocked_by) == (3, BlockedBy.BUDGET), "decodes are never held back"
    scheduler.abort(sequences[0].request_id)
    assert scheduler.effective == scheduler.limits
    assert step(scheduler).blocked_by is BlockedBy.BUDGET
    scheduler.abort(sequences[1].request_id)
    assert step(scheduler).num_tokens == 2


def test_raising_a_limit_works_in_the_next_step():
    scheduler = make_scheduler()
    scheduler.set_limits(limits(scheduler, max_num_seqs=1))
    submit(scheduler, 1, 1, 1)
    assert len(step(scheduler).sequences) == 1
    scheduler.set_limits(limits(scheduler, max_num_seqs=3))
    assert scheduler.effective == scheduler.limits
    assert len(step(scheduler).sequences) == 3


@pytest.mark.parametrize(
    "change",
    [{"max_num_seqs": 5}, {"kv_cache_fraction": 0.1}, {"max_num_batched_tokens": 65}, {"step_time_target_ms": 1e6}],
)
def test_limits_outside_the_envelope_are_refused(change: dict[str, float]):
    scheduler = make_scheduler()
    before = scheduler.limits
    with pytest.raises(ValueError, match=next(iter(change))):
        scheduler.set_limits(limits(scheduler, **change))
    assert scheduler.limits == before


# what a mutation tool found untested


def test_a_sequence_of_a_step_that_was_aborted_takes_nobody_else_along():
    scheduler = make_scheduler()
    first, second = submit(scheduler, 4, 4)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.abort(first.request_id)
    assert commit(scheduler, plan, [TOKEN, TOKEN]) == [(second, None)]


def test_admission_says_how_much_of_each_prompt_was_cached():
    scheduler = make_scheduler()
    prompts = [list(range(100 * i, 100 * i + 10)) for i in (1, 2, 3)]
    for prompt in prompts[:2]:
        submit(scheduler, prompt, max_tokens=1)
        assert step(scheduler).num_cached_tokens == {}
    one, two, _ = submit(scheduler, *prompts)
    plan = step(scheduler)
    assert plan.num_cached_tokens == {one.request_id: 8, two.request_id: 8}
    assert (plan.num_prefix_hit_tokens, plan.num_prefix_queried_tokens) == (16, 30)
    assert step(scheduler).num_cached_tokens == {}, "said once"


def test_the_head_is_looked_up_again_with_a_budget_of_one_token():
    """The earlier look-up, of a step without budget, may name blocks that were evicted since."""
    kv = CountingKVCache(64, BLOCK_SIZE)
    scheduler = Scheduler(SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=2, max_num_batched_tokens=2), kv)
    submit(scheduler, 2, 4)
    assert (step(scheduler).blocked_by, kv.num_looked_up) == (BlockedBy.BUDGET, 2)
    assert (step(scheduler).num_tokens, kv.num_looked_up) == (2, 3)


@pytest.mark.parametrize("num_tokens", [16, 32])
def test_without_chunks_a_prompt_that_just_fits_the_budget_is_admitted(num_tokens: int):
    scheduler = make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=32, max_model_len=32)
    (seq,) = submit(scheduler, num_tokens - 1)
    assert step(scheduler).num_tokens == num_tokens - 1
    scheduler.abort(seq.request_id)
    submit(scheduler, 32 - num_tokens // 2 - 1, num_tokens // 2 + 1)
    assert step(scheduler).num_tokens == 32, "the second took what the first left"


def test_without_chunks_only_what_is_not_cached_has_to_fit_the_budget():
    scheduler = make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=32)
    prompt = list(range(1, 29))
    submit(scheduler, prompt[:25], max_tokens=1)
    step(scheduler)
    submit(scheduler, 26, prompt)
    assert step(scheduler).num_tokens == 26 + 4, "24 of 28 tokens are cached"


def test_a_last_prompt_token_that_runs_as_a_decode_takes_no_further_block():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    (seq,) = submit(scheduler, 5)
    step(scheduler)
    assert len(seq.block_table) == 2
    assert step(scheduler).num_decodes == 1
    assert len(seq.block_table) == 2


def test_a_prompt_without_budget_is_not_in_the_step():
    scheduler = make_scheduler(max_num_batched_tokens=6)
    decodes, prompt = submit(scheduler, 2, 20)
    step(scheduler)
    scheduler.set_limits(limits(scheduler, max_num_batched_tokens=1))
    plan = step(scheduler)
    assert (plan.sequences, plan.num_scheduled) == ([decodes], [1])
    assert prompt.status is SequenceStatus.RUNNING


def test_every_preemption_counts():
    scheduler = make_scheduler(num_blocks=8, caching=False)
    sequences = submit(scheduler, 2, 2, 2, max_tokens=28)
    recomputed = 0
    while (plan := scheduler.plan()) is not None:
        recomputed += plan.num_recomputed_tokens
        assert all(seq.num_lost_tokens == 0 for seq in plan.sequences)
        scheduler.commit(plan, [TOKEN] * sum(plan.samples))
    assert max(seq.num_preemptions for seq in sequences) >= 2
    assert recomputed > 0


def test_a_prompt_that_is_too_long_is_told_with_its_numbers():
    with pytest.raises(
        PromptTooLong, match="prompt has 40 tokens and max_tokens is 3, 43 together; this model takes 32"
    ):
        submit(make_scheduler(), 40, max_tokens=3)

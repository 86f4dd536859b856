"""Requests with one prompt: computed once, shared block by block, the last one copied."""

import pytest
from msgspec import structs

from flyball_runtime.core.request import Sequence, SequenceStatus
from flyball_runtime.kv_cache import KVCache
from flyball_runtime.scheduler import BlockCopy, Scheduler, SchedulerConfig, Step
from sequences import TOKEN, make_sequence, step

BLOCK_SIZE = 4


def make_scheduler(num_blocks: int = 64, *, caching: bool = False, windows=(None,), **settings) -> Scheduler:
    defaults = {"max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return Scheduler(SchedulerConfig(**(defaults | settings)), KVCache(num_blocks, BLOCK_SIZE, caching, windows))


def submit(scheduler: Scheduler, num: int, num_prompt_tokens: int, group: str | None = "group", **settings):
    prompt = list(range(1, num_prompt_tokens + 1))
    sequences = [make_sequence(prompt, fork_group=group, max_model_len=32, **settings) for _ in range(num)]
    for seq in sequences:
        scheduler.submit(seq)
    return sequences


def spans(plan: Step) -> list[tuple[Sequence, int, int]]:
    return list(zip(plan.sequences, plan.starts, plan.num_scheduled, strict=True))


@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_is_computed_once(caching: bool):
    scheduler = make_scheduler(caching=caching)
    first, second, third = submit(scheduler, 3, 10)
    plan = step(scheduler)
    assert spans(plan) == [(first, 0, 10)]
    assert (scheduler.num_running, scheduler.num_waiting, second.status) == (1, 2, SequenceStatus.HELD)
    plan = step(scheduler)
    assert spans(plan) == [(first, 10, 1), (second, 9, 1), (third, 9, 1)]
    assert plan.samples == [True, True, True]
    assert [seq.block_table[:2] for seq in (second, third)] == [first.block_table[:2]] * 2
    copies = [BlockCopy(first.block_table[2], seq.block_table[2]) for seq in (second, third)]
    assert plan.plan.block_copies == copies
    assert len({seq.block_table[2] for seq in (first, second, third)}) == 3


def test_without_a_group_each_computes_it():
    scheduler = make_scheduler()
    submit(scheduler, 3, 10, group=None)
    assert step(scheduler).num_tokens == 30


def test_a_prompt_that_ends_with_a_block_still_has_its_last_one_copied():
    """Its last token is computed once more, for its logits."""
    scheduler = make_scheduler()
    first, second = submit(scheduler, 2, 8)
    step(scheduler)
    plan = step(scheduler)
    assert spans(plan) == [(first, 8, 1), (second, 7, 1)]
    assert plan.plan.block_copies == [BlockCopy(first.block_table[1], second.block_table[1])]


def test_others_of_the_queue_go_before_those_that_wait_for_a_prompt():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    first, *_ = submit(scheduler, 2, 12)
    (other,) = submit(scheduler, 1, 3, group=None)
    assert spans(step(scheduler)) == [(first, 0, 8)]
    assert spans(step(scheduler)) == [(first, 8, 4), (other, 0, 3)]


def test_a_short_prompt_is_not_waited_for():
    scheduler = make_scheduler()
    first, second = submit(scheduler, 2, BLOCK_SIZE)
    assert spans(step(scheduler)) == [(first, 0, 4), (second, 0, 4)]


def test_what_is_cached_is_not_waited_for():
    scheduler = make_scheduler(caching=True)
    submit(scheduler, 1, 10, group=None, max_tokens=1)
    step(scheduler)
    first, second = submit(scheduler, 2, 10)
    assert spans(step(scheduler)) == [(first, 8, 2), (second, 8, 2)]


@pytest.mark.parametrize("how", ["abort", "fail", "finish"])
def test_the_next_one_computes_the_prompt_if_the_first_is_gone(how: str):
    scheduler = make_scheduler()
    first, second, third = submit(scheduler, 3, 10, max_tokens=1)
    plan = scheduler.plan()
    if how == "abort":
        scheduler.abort(first.request_id)
    scheduler.commit(plan, [None if how == "fail" else TOKEN])
    assert spans(step(scheduler)) == [(second, 0, 10)]
    assert third.status is SequenceStatus.HELD


def test_a_held_sequence_can_be_aborted():
    scheduler = make_scheduler()
    first, second = submit(scheduler, 2, 10)
    step(scheduler)
    assert scheduler.abort(second.request_id) is True
    assert scheduler.abort(second.request_id) is False
    assert scheduler.num_waiting == 0
    assert spans(step(scheduler)) == [(first, 10, 1)]


def test_forks_count_neither_as_queries_nor_as_hits_of_the_prefix_cache():
    scheduler = make_scheduler(caching=True)
    submit(scheduler, 2, 10)
    first, second = step(scheduler), step(scheduler)
    assert (first.num_prefix_queried_tokens, second.num_prefix_queried_tokens) == (10, 0)
    assert (second.num_prefix_hit_tokens, second.num_cached_tokens, second.admitted) == (0, {}, [])


def test_blocks_are_copied_out_of_memory_that_is_given_up():
    """In one plan, the block that a fork copies moves down."""
    scheduler = make_scheduler(16)
    (filler,) = submit(scheduler, 1, 28, group=None)
    first, _ = submit(scheduler, 2, 10)
    step(scheduler)
    scheduler.abort(filler.request_id)
    scheduler.set_limits(structs.replace(scheduler.limits, kv_cache_fraction=0.5))
    source = first.block_table[2]
    plan = scheduler.plan()
    moved = {one.source: one.target for one in plan.plan.block_copies if one.target in first.block_table}
    second = plan.sequences[1]
    assert moved[source] == first.block_table[2] != source
    assert BlockCopy(source, second.block_table[2]) in plan.plan.block_copies


def test_a_block_that_is_moved_and_evicted_in_one_plan_is_not_copied():
    """Two copies into one block could be done in any order."""
    step = Step.of_decodes([], [])
    step.move_blocks({11: 7, 10: 8})
    step.copy_block(4, 7)
    assert step.block_copies == [BlockCopy(10, 8), BlockCopy(4, 7)]
    step.copy_block(8, 3)
    assert step.block_copies[-1] == BlockCopy(10, 3), "what is moved is read where it was"


def test_a_source_that_lacks_what_a_window_needs_is_not_used():
    scheduler = make_scheduler(windows=(4,), max_num_seqs=1)
    first, second = submit(scheduler, 2, 10)
    for _ in range(6):
        step(scheduler)
    assert first.num_freed_blocks[0] * BLOCK_SIZE > second.num_prompt_tokens - 4
    assert scheduler._kv.match_fork(second, first) is None

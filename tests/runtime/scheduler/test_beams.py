"""Beams in the scheduler: seats, shared blocks, copies, preemption. What searches find is checked by the machine."""

import pytest
from msgspec import structs

from flyball_runtime.core.beam_search import BeamSearch
from flyball_runtime.core.errors import InvalidRequest
from flyball_runtime.core.request import Sequence, SequenceStatus, TokenLogprobs
from flyball_runtime.kv_cache import KVCache
from flyball_runtime.scheduler import BlockCopy, BlockedBy, RowToken, Scheduler, SchedulerConfig, Step
from flyball_runtime.scheduler.search import searches
from sequences import make_sequence

BLOCK_SIZE = 4
STOP = 0


def make_scheduler(num_blocks: int = 64, **settings) -> Scheduler:
    defaults = {"max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return Scheduler(SchedulerConfig(**(defaults | settings)), KVCache(num_blocks, BLOCK_SIZE, False))


def submit(scheduler: Scheduler, num_prompt_tokens: int, width: int | None = None, max_tokens: int = 8) -> Sequence:
    settings = None if width is None else BeamSearch(width=width)
    seq = make_sequence(
        num_prompt_tokens, max_tokens=max_tokens, max_model_len=32, eos_token_ids=[STOP], beam_search=settings
    )
    scheduler.submit(seq)
    return seq


def step(scheduler: Scheduler, *likeliest: list[int]) -> Step:
    """Plan and commit a step; the i-th beam in it is followed by these tokens, each a tenth as likely as the one before."""
    plan = scheduler.plan()
    assert plan is not None
    beams = iter(likeliest)
    candidates = {
        index: TokenLogprobs(7, -1.0, ids, [-1.0 - 2.3 * rank for rank in range(len(ids))])
        for index, seq in enumerate(plan.sampled)
        if searches(seq) and (ids := next(beams, [7, 8, 9, 10]))
    }
    scheduler.commit(plan, [7] * sum(plan.samples), candidates=candidates)
    return plan


def test_a_beam_that_goes_on_from_another_shares_its_blocks() -> None:
    scheduler = make_scheduler()
    root = submit(scheduler, 10, width=2)
    step(scheduler, [5, 6])
    assert list(scheduler.running) == [root]
    plan = step(scheduler, [5, 6], [5, 6])
    first, second = scheduler.running
    assert (plan.num_decodes, plan.num_scheduled) == (1, [1, 1])
    assert plan.plan.row_tokens == [RowToken(first.row, 5)]
    assert plan.plan.block_copies == [BlockCopy(first.block_table[2], second.block_table[2])]
    assert first.block_table[:2] == second.block_table[:2] and first.block_table[2] != second.block_table[2]
    # both beams now continue the first one
    assert [seq.token_ids[-2:].tolist() for seq in (first, second)] == [[5, 5], [5, 6]]
    plan = scheduler.plan()
    assert plan.plan.row_tokens == [RowToken(first.row, 5), RowToken(second.row, 6)]
    assert plan.plan.block_copies == [BlockCopy(first.block_table[2], second.block_table[2])]
    assert (plan.num_decodes, plan.num_beams) == (2, 2)


def test_a_beam_in_flight_is_not_planned_again() -> None:
    scheduler = make_scheduler()
    submit(scheduler, 10, width=2)
    plain = submit(scheduler, 4)
    scheduler.plan()
    assert scheduler.plan().sequences == [plain]


def test_a_search_is_admitted_when_it_has_all_its_seats() -> None:
    scheduler = make_scheduler()
    plain = [submit(scheduler, 4) for _ in range(2)]
    search, last = submit(scheduler, 4, width=3), submit(scheduler, 4)
    assert step(scheduler).blocked_by is BlockedBy.SEQS
    assert (list(scheduler.running), scheduler.num_waiting) == (plain, 2)
    scheduler.abort(plain[0].request_id)
    step(scheduler)
    assert list(scheduler.running) == [plain[1], search]
    assert (scheduler.num_reserved_seats, last.status) == (2, SequenceStatus.WAITING)
    step(scheduler)
    assert (scheduler.num_running, scheduler.num_reserved_seats) == (4, 0)


def test_a_search_wider_than_a_lowered_limit_runs_by_itself() -> None:
    scheduler = make_scheduler()
    scheduler.set_limits(structs.replace(scheduler.limits, max_num_seqs=2))
    submit(scheduler, 4, width=4)
    submit(scheduler, 4)
    step(scheduler)
    step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (4, 1)
    assert scheduler.effective.max_num_seqs == 4


def test_more_beams_than_rows_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"at most 4 sequences side by side \(--max-num-seqs\)"):
        submit(make_scheduler(), 4, width=5)


def test_a_search_whose_last_beam_is_preempted_waits_in_the_queue() -> None:
    """Eight blocks, of which an older request comes to need all."""
    scheduler = make_scheduler(8)
    older = submit(scheduler, 16, max_tokens=16)
    search = submit(scheduler, 4, width=2)
    statuses = []
    while older.status is not SequenceStatus.FINISHED:
        step(scheduler)
        statuses.append(search.status)
    assert SequenceStatus.WAITING in statuses and scheduler.num_waiting <= 1
    for _ in range(20):
        if search.status is not SequenceStatus.FINISHED:
            step(scheduler)
    assert search.status is SequenceStatus.FINISHED
    assert scheduler._kv.counts().used == 0


def test_its_client_is_charged_for_all_beams() -> None:
    scheduler = make_scheduler()
    search = submit(scheduler, 4, width=3)
    for _ in range(4):
        step(scheduler)
    account = scheduler._waiting._account(search)
    account.settle()
    # 4 tokens of the prompt; 4 of the first beam, as many of the others; each token weighs 2
    assert account.service == pytest.approx(4 + 2 * 3 * 4, abs=4)

"""LoRA adapters in plans: rows say their slots, and sequences wait for one where all are in use."""

import random
from collections import Counter

import pytest

from flyball_runtime.core.beam_search import BeamSearch
from flyball_runtime.core.request import Sequence, SequenceStatus, TokenLogprobs
from flyball_runtime.kv_cache import KVCache
from flyball_runtime.scheduler import AdapterWrite, BlockedBy, Scheduler, SchedulerConfig, Step
from sequences import TOKEN, make_sequence, step


def make_scheduler(max_loras: int = 1, num_blocks: int = 64, *, caching: bool = True, **settings) -> Scheduler:
    defaults = {"max_model_len": 32, "max_num_seqs": 6, "max_num_batched_tokens": 64, "max_loras": max_loras}
    return Scheduler(SchedulerConfig(**(defaults | settings)), KVCache(num_blocks, 4, caching))


def submit(scheduler: Scheduler, *adapters: int | None, prompt: int = 6, **settings) -> list[Sequence]:
    sequences = [make_sequence(prompt, adapter=adapter, max_model_len=32, **settings) for adapter in adapters]
    for seq in sequences:
        scheduler.submit(seq)
    return sequences


def slots(plan: Step) -> list[int | None]:
    return [start.adapter_slot for start in plan.row_starts]


def test_rows_say_their_slots_and_a_plan_fills_each_slot_once():
    scheduler = make_scheduler(max_loras=2)
    submit(scheduler, None, 7, 8, 7, None)
    plan = step(scheduler)
    (first, second) = plan.adapter_writes
    assert {first.adapter, second.adapter} == {7, 8} and {first.slot, second.slot} == {0, 1}
    assert slots(plan) == [None, first.slot, second.slot, first.slot, None]
    assert plan.plan.adapter_writes == plan.adapter_writes
    assert step(scheduler).adapter_writes == []


def test_requests_for_the_base_model_pass_one_that_waits_for_a_slot_and_others_do_not():
    scheduler = make_scheduler()
    first, waiting, same, base = submit(scheduler, 7, 8, 7, None, max_tokens=3)
    plan = step(scheduler)
    assert plan.sequences == [first, base]
    assert (plan.blocked_by, scheduler.num_waiting) == (BlockedBy.ADAPTERS, 2)
    assert waiting.status is same.status is SequenceStatus.HELD
    (later,) = submit(scheduler, None)
    assert later in step(scheduler).sequences
    step(scheduler)
    assert first.status is SequenceStatus.FINISHED
    plan = step(scheduler)
    assert (plan.sequences[-1], plan.adapter_writes) == (waiting, [AdapterWrite(0, 8)])
    assert same.status is SequenceStatus.HELD, "the slot is taken again"
    while same.status is SequenceStatus.HELD:
        plan = step(scheduler)
    assert waiting.status is SequenceStatus.FINISHED
    assert plan.blocked_by is BlockedBy.NONE


def test_an_adapter_keeps_its_slot_until_another_one_needs_it_the_longest_unused_first():
    scheduler = make_scheduler(max_loras=2)
    submit(scheduler, 7, 8, max_tokens=1)
    writes = {one.adapter: one.slot for one in step(scheduler).adapter_writes}
    submit(scheduler, 7, max_tokens=1)
    assert step(scheduler).adapter_writes == []
    submit(scheduler, 9, max_tokens=1)
    assert step(scheduler).adapter_writes == [AdapterWrite(writes[8], 9)]


def test_an_unloaded_adapter_has_no_slot():
    scheduler = make_scheduler()
    submit(scheduler, 7, max_tokens=1)
    step(scheduler)
    scheduler.forget_adapter(7)
    scheduler.forget_adapter(5)
    submit(scheduler, 8)
    assert step(scheduler).adapter_writes == [AdapterWrite(0, 8)]


def test_a_held_sequence_can_be_aborted_and_those_behind_it_go_on():
    scheduler = make_scheduler()
    first, waiting, same = submit(scheduler, 7, 8, 7)
    step(scheduler)
    assert scheduler.abort(waiting.request_id) is True
    assert scheduler.abort(waiting.request_id) is False
    assert step(scheduler).sequences == [first, same]
    assert scheduler.num_waiting == 0


def test_prompts_are_cached_by_adapter():
    scheduler = make_scheduler(max_loras=3)
    prompt = list(range(1, 11))
    for adapter, num_cached in ((None, 0), (7, 0), (8, 0), (7, 8), (None, 8), (8, 8)):
        (seq,) = submit(scheduler, adapter, prompt=prompt, max_tokens=1)
        step(scheduler)
        assert (adapter, seq.num_cached_tokens) == (adapter, num_cached)


def test_the_beams_of_a_search_share_its_slot():
    scheduler = make_scheduler()
    search, other = submit(scheduler, 7, 8, max_tokens=3, beam_search=BeamSearch(width=3))
    starts = []
    while search.status is not SequenceStatus.FINISHED:
        plan = scheduler.plan()
        starts += slots(plan)
        tops = TokenLogprobs(1, -1.0, [1, 2, 3, 4, 5, 6], [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])
        scheduler.commit(plan, [1] * sum(plan.samples), candidates=dict.fromkeys(range(sum(plan.samples)), tops))
        assert other.status is SequenceStatus.HELD or search.status is SequenceStatus.FINISHED
    assert starts == [0, 0, 0]
    assert scheduler.plan().adapter_writes == [AdapterWrite(0, 8)]


@pytest.mark.parametrize("seed", range(6))
def test_every_row_has_its_adapter_and_every_request_ends(seed: int):
    """Random histories: few blocks, so that some are preempted; steps ahead; aborts. The slots are what the plans say."""
    rng = random.Random(seed)
    max_loras = rng.randint(1, 3)
    settings = {"max_num_batched_tokens": rng.randint(6, 40), "policy": rng.choice(["fcfs", "sjf", "dpr", "edf"])}
    scheduler = make_scheduler(max_loras, num_blocks=rng.randint(8, 10), caching=rng.random() < 0.5, **settings)
    live: dict[str, Sequence] = {}
    in_slots: dict[int, int] = {}
    of_rows: dict[int, int | None] = {}
    in_flight: list[Step] = []
    num_preempted, num_submitted = 0, 0
    while num_submitted < 60 or live or in_flight:
        if num_submitted < 60 and rng.random() < 0.4:
            adapter = rng.choice([None, 0, 1, 2, 3, 4])
            prompt = [1] * rng.randint(1, 16)
            (seq,) = submit(scheduler, adapter, prompt=prompt, max_tokens=rng.randint(4, 16))
            live[seq.request_id], num_submitted = seq, num_submitted + 1
        if live and rng.random() < 0.03:
            scheduler.abort(live.popitem()[0])
        plan = scheduler.plan() if len(in_flight) < 2 else None
        if plan is not None:
            num_preempted += len(plan.preempted)
            in_slots |= {one.slot: one.adapter for one in plan.adapter_writes}
            of_rows |= {start.row: start.adapter_slot for start in plan.row_starts}
            for seq, row in zip(plan.sequences, plan.plan.rows, strict=True):
                slot = of_rows[row]
                assert (None if slot is None else in_slots[slot]) == seq.adapter
            in_flight.append(plan)
        assert len(Counter(seq.adapter for seq in scheduler.running if seq.adapter is not None)) <= max_loras
        if in_flight and (plan is None or rng.random() < 0.6):
            done = in_flight.pop(0)
            for seq, ending in scheduler.commit(done, [TOKEN] * sum(done.samples)):
                if ending:
                    del live[seq.request_id]
    assert num_preempted > 0
    assert in_slots.keys() <= set(range(max_loras))
    assert scheduler.num_waiting == scheduler.num_running == 0
    assert scheduler._kv.counts().used == 0

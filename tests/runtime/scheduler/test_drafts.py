"""What is looked up, for which sequences, and what a step makes of it."""

from array import array

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball_protocol import Limits, StepModel
from flyball_runtime.core.request import Sequence, SequenceStatus
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.core.speculation import SpeculativeConfig
from flyball_runtime.governor import Governor
from flyball_runtime.kv_cache import KVCache
from flyball_runtime.scheduler import Drafter, Scheduler, SchedulerConfig, Step
from flyball_runtime.scheduler.drafts import MAX_OCCURRENCES, MIN_ACCEPTANCE, PAUSE_TOKENS, TRIAL_SEQUENCES, look_up
from sequences import make_sequence

BLOCK_SIZE = 4
REPEATED = [1, 2, 3, 4, 5, 6, 7, 1, 2]
CONFIG = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=2)


def naive(tokens: list[int], shortest: int, longest: int, most: int) -> list[int]:
    for length in range(longest, shortest - 1, -1):
        for begin in range(len(tokens) - length - 1, -1, -1):
            if tokens[begin : begin + length] == tokens[-length:]:
                longer = list(tokens)
                while len(longer) < len(tokens) + most:
                    longer.append(longer[begin + length + len(longer) - len(tokens)])
                return longer[len(tokens) :]
    return []


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    tokens=st.lists(st.sampled_from([0, 1, 256, 2**32 - 1]), min_size=1, max_size=30),
    shortest=st.integers(1, 4),
    more=st.integers(0, 3),
    most=st.integers(0, 6),
)
def test_the_longest_latest_run_is_found(tokens: list[int], shortest: int, more: int, most: int):
    found = look_up(array("I", tokens), shortest, shortest + more, most)
    assert found.tolist() == naive(tokens, shortest, shortest + more, most)


def test_only_the_latest_occurrences_are_looked_at():
    tokens = [1, 2, 3] + [4, 2] * (MAX_OCCURRENCES - 1) + [1, 2]
    assert look_up(array("I", tokens), 2, 2, 1).tolist() == [3]
    tokens = [1, 2, 3] + [4, 2] * MAX_OCCURRENCES + [1, 2]
    assert not look_up(array("I", tokens), 2, 2, 1)


def make_scheduler(config: SpeculativeConfig | None = CONFIG, num_blocks: int = 64, **settings: int) -> Scheduler:
    limits = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64} | settings
    drafter = None if config is None else Drafter(config)
    return Scheduler(SchedulerConfig(**limits), KVCache(num_blocks, BLOCK_SIZE), drafter=drafter)


def submit(scheduler: Scheduler, prompt: list[int], max_tokens: int | None = None, stop: int = 99) -> Sequence:
    seq = make_sequence(prompt, max_tokens=max_tokens, max_model_len=64, eos_token_ids=[stop])
    scheduler.submit(seq)
    return seq


def step(scheduler: Scheduler, token_id: int = 3, num_accepted: int = 0) -> Step:
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(plan, [token_id] * sum(plan.samples), num_accepted=[num_accepted] * len(plan.drafts))
    return plan


def outputs(seq: Sequence) -> list[int]:
    return seq.token_ids[seq.num_prompt_tokens :].tolist()


def test_accepted_drafts_come_in_one_step():
    scheduler = make_scheduler()
    seq = submit(scheduler, REPEATED)
    assert step(scheduler).plan.num_drafts == [], "a prompt has no token yet that could be followed"
    plan = step(scheduler, 8, num_accepted=2)
    assert (plan.num_decodes, plan.plan.num_drafts, plan.num_scheduled, plan.samples) == (0, [3], [4], [True])
    assert list(memoryview(plan.plan.token_ids).cast("I")) == [3, 4, 5, 6]
    assert (outputs(seq), plan.num_taken) == ([3, 4, 5, 8], {seq.request_id: 3})
    assert (seq.num_computed_tokens, seq.num_uncomputed_tokens) == (12, 1)
    assert plan.plan.num_prefill_tokens == 0


def test_nothing_is_planned_while_drafts_are_in_flight():
    scheduler = make_scheduler()
    submit(scheduler, REPEATED)
    step(scheduler)
    plan = scheduler.plan()
    assert plan is not None and plan.drafts
    submit(scheduler, [11])
    assert scheduler.plan() is None
    scheduler.commit(plan, [8], num_accepted=[0])
    assert scheduler.plan() is not None


def test_nothing_is_drafted_beside_a_step_in_flight():
    scheduler = make_scheduler()
    submit(scheduler, REPEATED)
    first = scheduler.plan()
    second = scheduler.plan()
    assert second is not None and first is not None and not second.drafts


def test_a_stop_token_among_the_drafts_ends_the_sequence():
    scheduler = make_scheduler()
    seq = submit(scheduler, REPEATED, stop=5)
    step(scheduler)
    plan = scheduler.plan()
    assert plan is not None
    assert scheduler.commit(plan, [8], num_accepted=[3]) == [(seq, "stop")]
    assert outputs(seq) == [3, 4, 5]
    assert scheduler.num_running == 0


def test_drafts_leave_room_for_the_token_behind_them():
    scheduler = make_scheduler()
    seq = submit(scheduler, REPEATED, max_tokens=3)
    step(scheduler)
    plan = scheduler.plan()
    assert plan is not None and plan.plan.num_drafts == [1]
    assert scheduler.commit(plan, [8], num_accepted=[1]) == [(seq, "length")]
    assert outputs(seq) == [3, 4, 8]


def test_a_sequence_that_fails_gets_no_draft():
    scheduler = make_scheduler()
    seq = submit(scheduler, REPEATED)
    step(scheduler)
    plan = scheduler.plan()
    assert plan is not None
    assert scheduler.commit(plan, [None], num_accepted=[2]) == [(seq, "failed")]
    assert outputs(seq) == [3]


def test_a_count_is_wanted_for_each_entry_with_drafts():
    scheduler = make_scheduler()
    submit(scheduler, REPEATED)
    step(scheduler)
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(ValueError, match="got 0 counts of accepted drafts for 1 entries"):
        scheduler.commit(plan, [8])


@pytest.mark.parametrize(
    "settings",
    [
        {"logprobs": 0},
        {"presence_penalty": 0.5},
        {"min_tokens": 2},
        {"logit_bias": {1: 2.0}},
        {"allowed_token_ids": (1,)},
    ],
)
def test_sequences_whose_tokens_are_looked_at_one_by_one_get_none(settings: dict):
    seq = make_sequence(REPEATED)
    assert Drafter(CONFIG).draft(seq)
    seq.sampling = msgspec.structs.replace(SamplingParams(), **settings)
    assert not Drafter(CONFIG).draft(seq)


def test_drafts_come_behind_prompts_and_keep_to_the_budget():
    scheduler = make_scheduler(max_num_batched_tokens=16)
    repeated = submit(scheduler, REPEATED)
    step(scheduler)
    prompt = submit(scheduler, list(range(20, 34)))
    plan = step(scheduler, 30)
    assert plan.sequences == [prompt, repeated]
    assert (plan.num_scheduled, plan.plan.num_drafts, plan.num_tokens) == ([14, 2], [1], 16)


def test_prompts_keep_their_scores_and_vectors_beside_drafts():
    scheduler = make_scheduler()
    submit(scheduler, REPEATED)
    step(scheduler)
    scheduler.submit(make_sequence([20, 21, 22], prompt_logprobs=0, max_model_len=64))
    pooled = make_sequence([23, 24], pooling="mean", max_model_len=64)
    scheduler.submit(pooled)
    plan = step(scheduler)
    assert plan.plan.num_drafts == [3]
    assert [span.entry for span in plan.plan.prompt_spans] == [0]
    assert [span.entry for span in plan.plan.pool_spans] == [1]
    assert pooled.status is SequenceStatus.FINISHED


def test_a_lowered_budget_leaves_none():
    scheduler = make_scheduler()
    for _ in range(3):
        submit(scheduler, REPEATED)
    step(scheduler)
    scheduler.set_limits(Limits(max_num_seqs=4, kv_cache_fraction=1.0, max_num_batched_tokens=3))
    assert step(scheduler).plan.num_drafts == []


def test_nothing_is_drafted_in_a_large_batch():
    scheduler = make_scheduler(
        SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_max=2, disable_by_batch_size=2)
    )
    for _ in range(2):
        submit(scheduler, REPEATED)
    step(scheduler)
    assert step(scheduler, 8).plan.num_drafts == [3, 3]
    submit(scheduler, [20])
    step(scheduler, 1)
    assert step(scheduler, 2).plan.num_drafts == []


def test_drafts_take_no_block_that_a_running_sequence_may_need():
    """16 blocks of 4 tokens: once 14 are in use, a draft that crosses the edge would leave one for two sequences."""
    scheduler = make_scheduler(num_blocks=16)
    repeated = submit(scheduler, [*range(40, 56), *REPEATED, 3])  # 26 tokens: 7 blocks
    submit(scheduler, list(range(10, 35)))  # 25 tokens: 7 blocks
    step(scheduler, 4)
    plan = scheduler.plan()
    assert plan is not None
    assert (plan.plan.num_drafts, len(repeated.block_table)) == ([1], 7), "the last place of the seventh block"


class Pace:
    """Says what there is time for, and what pays."""

    target_s: float | None = None

    def __init__(self, num_tokens: int, pays: bool = True) -> None:
        self.num_tokens = num_tokens
        self._pays = pays
        self.asked: list[tuple[int, int, float]] = []

    def chunk(self, step: Step, start: int, most: int, least: int = 0) -> int:
        return min(most, self.num_tokens) if step.num_decodes else most

    def drafts(self, step: Step, num_drafted: int, most: int) -> int:
        return self.chunk(step, 0, most)

    def fits(self, num_decodes: int, num_context_tokens: int) -> bool:
        return True

    def first_token_s(self, step: Step, num_tokens: int, most: int) -> float:
        return 0.0

    def tokens_per_s(self, step: Step, num_drafted: int, num_drafts: int, num_accepted: float) -> float:
        self.asked.append((num_drafted, num_drafts, num_accepted))
        return float(self._pays == (num_drafted > 0))


@pytest.mark.parametrize(
    ("pace", "expected"), [(Pace(2), [2]), (Pace(0), []), (Pace(9, pays=False), []), (Pace(9), [3])]
)
def test_drafts_keep_to_the_step_time_and_have_to_pay(pace: Pace, expected: list[int]):
    config = SchedulerConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)
    scheduler = Scheduler(config, KVCache(64, BLOCK_SIZE), pace=pace, forecast=pace, drafter=Drafter(CONFIG))
    submit(scheduler, REPEATED)
    step(scheduler)
    assert step(scheduler).plan.num_drafts == expected
    assert pace.asked == [(0, 0, 0.0), (1, 3, 1.5)]


def test_a_sequence_whose_drafts_are_rejected_is_left_alone_for_a_while():
    drafter, seq = Drafter(CONFIG), make_sequence(REPEATED)
    num_verified = 0
    while drafter.draft(seq):
        drafter.verified(seq, 3, 0)
        num_verified += 1
        assert num_verified < 20
    assert seq.draft_acceptance is not None and seq.draft_acceptance < MIN_ACCEPTANCE
    seq.token_ids.extend(REPEATED * PAUSE_TOKENS)
    assert drafter.draft(seq), "it is tried again"
    drafter.verified(seq, 3, 3)
    assert drafter.draft(seq), "one success is enough to go on"


def test_new_sequences_begin_with_what_is_usual():
    drafter = Drafter(CONFIG)
    for _ in range(200):
        drafter.verified(make_sequence(REPEATED), 3, 0)
    assert drafter.acceptance < MIN_ACCEPTANCE
    assert not drafter.draft(make_sequence(REPEATED))


def test_drafts_that_pay_again_come_back():
    """A step of 6 ms takes 8 ms more for four drafts, so a third of them has to be accepted; free text left 0.2."""
    config = SchedulerConfig(max_model_len=200, max_num_seqs=1, max_num_batched_tokens=64)
    governor = Governor(StepModel(base_s=0.004, token_s=0.002))
    drafter = Drafter(SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_max=2))
    drafter.acceptance = 0.2
    scheduler = Scheduler(config, KVCache(64, BLOCK_SIZE), forecast=governor, drafter=drafter)
    seq = make_sequence([7] * 10, max_tokens=150, max_model_len=200)
    scheduler.submit(seq)
    num_steps = 0
    while scheduler.num_running or scheduler.num_waiting:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, [7] * sum(plan.samples), num_accepted=plan.plan.num_drafts)
        num_steps += 1
    assert outputs(seq) == [7] * 150
    assert num_steps < PAUSE_TOKENS + 60, "a pause, a trial or two, and then 5 tokens a step"


def test_free_text_is_left_alone_beside_text_that_repeats_itself():
    """Each draft takes 2 ms of a step of 8 ms: those of one sequence are worth it, those of both are not."""
    config = SchedulerConfig(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64)
    governor = Governor(StepModel(base_s=0.004, token_s=0.002))
    scheduler = Scheduler(config, KVCache(64, BLOCK_SIZE), forecast=governor, drafter=Drafter(CONFIG))
    free, repeated = submit(scheduler, REPEATED), submit(scheduler, REPEATED)
    step(scheduler)
    free.draft_acceptance, repeated.draft_acceptance = 0.2, 0.9
    plan = step(scheduler)
    assert [seq for seq, _ in plan.drafted] == [repeated]
    assert free.min_tokens_to_draft > len(free.token_ids)


def test_short_outputs_get_a_trial_now_and_then():
    drafter = Drafter(CONFIG)
    drafter.acceptance = 0.01
    assert [bool(drafter.draft(make_sequence(REPEATED))) for _ in range(2 * TRIAL_SEQUENCES)].count(True) == 2

"""Who runs first under each policy, and that everybody runs."""

import math
import random
from collections.abc import Iterable

import pytest

from flyball_protocol import Objectives
from flyball_runtime.core.request import Sequence, SequenceStatus
from flyball_runtime.kv_cache import KVCache
from flyball_runtime.scheduler import BlockedBy, Scheduler, SchedulerConfig, Step
from flyball_runtime.scheduler.policies import OUTPUT_TOKEN_AGE_S, PATIENCE_S, POLICIES, WINDOW_S, choose_victim
from flyball_runtime.scheduler.queue import LATE_SHARE
from sequences import make_sequence

BLOCK_SIZE = 4
STEP_S = 0.01


class Prefill:
    """A forecast of so many prompt tokens a second."""

    def __init__(self, tokens_per_s: float) -> None:
        self.tokens_per_s = tokens_per_s

    def first_token_s(self, step: Step, num_tokens: int, most: int) -> float:
        return num_tokens / self.tokens_per_s


class FixedLengths:
    """Outputs of a known length, and a reserve of so many tokens for each running sequence."""

    def __init__(self, num_output_tokens: float, num_reserved: int = 0) -> None:
        self.num_output_tokens = num_output_tokens
        self.num_reserved = num_reserved

    def expected_remaining(self, num_output_tokens: int, route: str = "") -> float:
        return max(1.0, self.num_output_tokens - num_output_tokens)

    def reserve(self, running: Iterable[Sequence]) -> int:
        return sum(self.num_reserved for _ in running)


def make_scheduler(policy: str, *, num_blocks: int = 512, max_num_seqs: int = 1, **kwargs: object) -> Scheduler:
    config = SchedulerConfig(
        max_model_len=256, max_num_seqs=max_num_seqs, max_num_batched_tokens=256, policy=policy, fair_share=False
    )
    return Scheduler(config, KVCache(num_blocks, BLOCK_SIZE), **kwargs)  # type: ignore[arg-type]


class Load:
    """A scheduler, its clock and the order in which sequences were first admitted."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self.admitted: list[Sequence] = []
        self.num_preemptions = 0

    def submit(self, prompt: int | list[int] = 8, *, max_tokens: int = 1, **kwargs: object) -> Sequence:
        seq = make_sequence(prompt, max_tokens=max_tokens, hashed_by=BLOCK_SIZE, **kwargs)  # type: ignore[arg-type]
        seq.arrived_s = self.now_s
        self.scheduler.submit(seq)
        return seq

    def step(self) -> Step:
        running = set(self.scheduler.running)
        step = self.scheduler.plan(self.now_s)
        assert step is not None
        self.admitted += [seq for seq in self.scheduler.running if seq not in running and not seq.num_preemptions]
        self.num_preemptions += len(step.preempted)
        self.scheduler.commit(step, [7] * len(step.sampled))
        self.now_s += STEP_S
        return step

    def run(self) -> None:
        while self.scheduler.num_running or self.scheduler.num_waiting:
            self.step()


def order(policy: str, requests: list[dict[str, object]], **kwargs: object) -> list[int]:
    """Return in which order requests run that wait together, by their numbers."""
    load = Load(make_scheduler(policy, **kwargs))
    sequences = [load.submit(**one) for one in requests]  # type: ignore[arg-type]
    load.run()
    return [sequences.index(seq) for seq in load.admitted]


@pytest.mark.parametrize(
    ("policy", "requests", "expected"),
    [
        ("fcfs", [{"priority": 2}, {"priority": 1, "ttft_deadline_ms": 1.0}, {"max_tokens": 2}], [0, 1, 2]),
        ("priority", [{"priority": 2}, {"priority": 0}, {"priority": -1}, {"priority": 0}], [2, 1, 3, 0]),
        ("sjf", [{"max_tokens": 9}, {"max_tokens": 2, "prompt": 90}, {"max_tokens": 5}], [1, 2, 0]),
        ("srpf", [{"prompt": 9}, {"prompt": 2, "max_tokens": 90}, {"prompt": 5}], [1, 2, 0]),
        (
            "edf",
            [{}, {"ttft_deadline_ms": 9e3}, {"ttft_deadline_ms": 4e3}, {"e2e_deadline_ms": 5e3}, {"priority": -1}],
            [4, 2, 3, 1, 0],
        ),
        ("dpr", [{"prompt": 64}, {"prompt": 64, "max_tokens": 60}, {"prompt": 4, "max_tokens": 60}], [2, 1, 0]),
    ],
)
def test_the_order_of_each_policy(policy: str, requests: list[dict[str, object]], expected: list[int]):
    assert order(policy, requests) == expected


def test_dpr_runs_requests_with_a_common_prefix_one_after_the_other():
    """Three prefixes of 8 blocks, interleaved; under the first, two more groups that share 12."""
    prompts = []
    for number in range(12):
        prefix = [100 + number % 3] * 32
        branch = [200 + number % 2] * 16 if number % 3 == 0 else [300 + number] * 16
        prompts.append([*prefix, *branch, number])
    ordered = [prompts[number] for number in order("dpr", [{"prompt": prompt} for prompt in prompts])]
    assert [prompt[0] for prompt in ordered] in [
        [x] * 4 + [y] * 4 + [z] * 4 for x in (100, 101, 102) for y in (100, 101, 102) for z in (100, 101, 102)
    ]
    branches = [prompt[40] for prompt in ordered if prompt[0] == 100]
    assert branches in ([200, 200, 201, 201], [201, 201, 200, 200])


def test_predicted_lengths_order_sjf_and_max_tokens_bounds_them():
    load = Load(make_scheduler("sjf", lengths=FixedLengths(20.0)))
    assert [load.submit(max_tokens=most).num_predicted_tokens for most in (10, 30)] == [10, 20.0]


@pytest.mark.parametrize("policy", ["sjf", "srpf", "dpr", "edf"])
def test_a_request_that_others_overtake_runs_in_the_end(policy: str):
    """Requests that the policy prefers keep coming, more than can be served."""
    load = Load(make_scheduler(policy))
    load.submit(8)
    load.step()
    passed_over = load.submit(200, max_tokens=20)
    waits_s = {"sjf": 20 * OUTPUT_TOKEN_AGE_S, "srpf": 2.0, "dpr": WINDOW_S, "edf": PATIENCE_S}[policy]
    while passed_over.status is SequenceStatus.WAITING:
        load.submit(4, max_tokens=1 if policy != "dpr" else 2, ttft_deadline_ms=1000.0)
        load.now_s += waits_s / 50
        load.step()
        assert load.now_s < 20 * waits_s


def test_deadlines_give_the_time_at_which_the_first_token_is_due():
    scheduler = make_scheduler("edf", lengths=FixedLengths(11.0))
    load = Load(scheduler)
    load.now_s = 100.0
    assert load.submit().due_s == math.inf
    scheduler.set_objectives(Objectives(ttft_s=2.0, itl_s=0.1))
    assert load.submit().due_s == 102.0, "the objective"
    assert load.submit(ttft_deadline_ms=500.0).due_s == 100.5, "its own"
    assert load.submit(e2e_deadline_ms=5000.0, max_tokens=50).due_s == pytest.approx(104.0), "10 gaps before the end"
    assert load.submit(e2e_deadline_ms=5000.0, ttft_deadline_ms=500.0).due_s == 100.5, "the earlier one"


def test_what_can_no_longer_meet_its_deadline_runs_after_what_can():
    """100 prompt tokens a second: the first has 0.5 s for 100 of them, the second comes later and has time."""
    load = Load(make_scheduler("edf", forecast=Prefill(100.0)))
    hopeless = load.submit(100, ttft_deadline_ms=500.0)
    feasible = load.submit(100, ttft_deadline_ms=1500.0)
    without = load.submit(100)
    load.run()
    assert load.admitted == [feasible, without, hopeless]
    assert (hopeless.is_late, feasible.is_late) == (True, False)


def test_prompts_in_progress_count_against_a_deadline():
    load = Load(make_scheduler("edf", max_num_seqs=2, forecast=Prefill(1000.0)))
    load.submit(255, max_tokens=1)
    load.scheduler._limits = load.scheduler._limits.__class__(
        max_num_seqs=2, kv_cache_fraction=1.0, max_num_batched_tokens=50
    )
    load.step()
    late = load.submit(100, ttft_deadline_ms=250.0)
    in_time = load.submit(100, ttft_deadline_ms=400.0)
    load.run()
    assert (late.is_late, in_time.is_late) == (True, False)


def test_a_stream_that_was_preempted_is_not_late():
    """It got its first token in time."""
    load = Load(make_scheduler("edf", num_blocks=64, max_num_seqs=4))
    sequences = [load.submit(50, max_tokens=100, ttft_deadline_ms=20.0) for _ in range(4)]
    load.run()
    assert load.num_preemptions
    assert not any(seq.is_late for seq in sequences)


def test_late_requests_get_their_share_beside_others_and_the_oldest_is_first():
    """Requests in time keep coming. Per 90 prompt tokens of them, late ones get 10."""
    load = Load(make_scheduler("edf"))
    late = [load.submit(10, ttft_deadline_ms=1.0, request_id=f"late {n}") for n in range(20)]
    load.now_s = 1.0
    while any(seq.status is not SequenceStatus.FINISHED for seq in late):
        while load.scheduler.num_waiting < len(late) + 3:
            load.submit(10, ttft_deadline_ms=60_000.0)
        load.step()
    served = [seq.is_late for seq in load.admitted]
    assert [seq for seq in load.admitted if seq.is_late] == late
    assert sum(served) / len(served) == pytest.approx(LATE_SHARE, rel=0.15)


def test_late_requests_use_what_nobody_in_time_wants():
    load = Load(make_scheduler("edf", max_num_seqs=4))
    late = [load.submit(10, ttft_deadline_ms=1.0) for _ in range(4)]
    load.now_s = 1.0
    assert set(load.step().sequences) == set(late)


def test_clients_take_turns_in_both_lanes():
    config = SchedulerConfig(max_model_len=256, max_num_seqs=1, max_num_batched_tokens=256, policy="edf")
    load = Load(Scheduler(config, KVCache(512, BLOCK_SIZE)))
    for deadline_ms in (1.0, 60_000.0):
        for client in "aaaabb":
            load.submit(10, client=client, ttft_deadline_ms=deadline_ms)
    load.now_s = 1.0
    load.run()
    order = [(seq.is_late, seq.client) for seq in load.admitted]
    assert sorted(client for is_late, client in order[:4]) == ["a", "a", "b", "b"]
    late = [client for is_late, client in order if is_late]
    assert sorted(late) == list("aaaabb")
    assert "b" in late[:2]


def test_a_request_in_a_lane_can_be_aborted():
    load = Load(make_scheduler("edf"))
    late, other = load.submit(10, ttft_deadline_ms=1.0), load.submit(10)
    load.now_s = 1.0
    load.submit(10, ttft_deadline_ms=5000.0)
    load.step()
    assert late.is_late
    assert load.scheduler.abort(late.request_id)
    load.run()
    assert late not in load.admitted
    assert other in load.admitted


# preemption


def test_the_victim_is_of_the_last_level_never_the_first_and_loses_least():
    sequences = []
    for index, (level, computed) in enumerate([(0, 1), (1, 50), (1, 9), (1, 30), (0, 2)]):
        seq = make_sequence(60)
        seq.arrival_index, seq.level, seq.rank, seq.num_computed_tokens = index, (level,), (index,), computed
        sequences.append(seq)
    assert choose_victim(sequences) is sequences[2]
    assert choose_victim([sequences[0], sequences[4]]) is sequences[4], "of equal levels, not the first"
    assert choose_victim([sequences[1], sequences[0]]) is sequences[1]


def test_the_reserve_for_what_runs_keeps_others_out():
    """Of 64 blocks the first has 32, the second needs 10 and 30 are kept for the first. Alone the second runs all the same."""
    load = Load(make_scheduler("fcfs", num_blocks=64, max_num_seqs=2, lengths=FixedLengths(30.0, num_reserved=1200)))
    first, second = load.submit(128, max_tokens=20), load.submit(40, max_tokens=20)
    step = load.step()
    assert (step.sequences, step.blocked_by) == ([first], BlockedBy.RESERVE)
    load.scheduler.abort(first.request_id)
    assert load.step().sequences == [second]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_everybody_ends_and_preemptions_are_bounded(policy: str):
    """Twice as many sequences run as there are blocks for: what is preempted is not admitted to be preempted again."""
    rng = random.Random(policy)
    load = Load(make_scheduler(policy, num_blocks=64, max_num_seqs=16, forecast=Prefill(5000.0)))
    sequences = []
    for _ in range(60):
        deadline_ms = rng.choice([None, 50.0, 2000.0])
        prompt, most = rng.randint(4, 60), rng.randint(1, 120)
        sequences.append(load.submit(prompt, max_tokens=most, ttft_deadline_ms=deadline_ms, priority=rng.randint(0, 2)))
        load.step()
    load.run()
    assert [seq.status for seq in sequences] == [SequenceStatus.FINISHED] * 60
    assert all(seq.num_output_tokens == seq.max_total_tokens - seq.num_prompt_tokens for seq in sequences)
    assert load.num_preemptions <= 2 * len(sequences)

"""Clients share the scheduler: who is next, how far apart two can get, what one client alone gets."""

import itertools
import random
from collections import Counter

import pytest

from flyball_runtime.core.request import Sequence
from flyball_runtime.kv_cache import KVCache
from flyball_runtime.scheduler import BlockedBy, Scheduler, SchedulerConfig, Step
from flyball_runtime.scheduler.policies import POLICIES, Policy
from flyball_runtime.scheduler.queue import MAX_IDLE_CLIENTS, OUTPUT_TOKEN_WEIGHT, WaitingQueue
from sequences import make_sequence

TOKEN = 999_999
MAX_MODEL_LEN = 64
NUM_SEATS = 4

_arrivals = itertools.count()


class Load:
    """A scheduler without a model, which counts admissions and the service of each client."""

    def __init__(self, num_blocks: int = 256, **settings: object) -> None:
        defaults = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": NUM_SEATS, "max_num_batched_tokens": 256}
        config = SchedulerConfig(**(defaults | settings))  # type: ignore[arg-type]
        self.scheduler = Scheduler(config, KVCache(num_blocks, 4, enable_prefix_caching=False))
        self.waiting: Counter[str] = Counter()
        self.service: Counter[str] = Counter()
        self.admitted: list[str] = []
        self.num_preemptions = 0

    def submit(self, client: str, num: int = 1, *, prompt: int = 4, output: int = 4, priority: int = 0) -> None:
        for _ in range(num):
            seq = make_sequence(
                prompt, max_tokens=output, priority=priority, client=client, max_model_len=MAX_MODEL_LEN
            )
            self.scheduler.submit(seq)
        self.waiting[client] += num

    def step(self) -> Step:
        plan = self.scheduler.plan()
        assert plan is not None
        for seq, start in zip(plan.sequences, plan.starts, strict=True):
            if start == 0:
                self._admit(seq)
        for seq in plan.preempted:
            self.waiting[seq.client] += 1
            self.num_preemptions += 1
        self.scheduler.commit(plan, [TOKEN] * sum(plan.samples))
        for seq in plan.got_tokens:
            self.service[seq.client] += OUTPUT_TOKEN_WEIGHT
        return plan

    def _admit(self, seq: Sequence) -> None:
        self.waiting[seq.client] -= 1
        if seq.num_preemptions == 0:
            self.admitted.append(seq.client)
            self.service[seq.client] += seq.num_prompt_tokens


def test_a_small_request_is_next_however_many_another_client_has_queued():
    load = Load()
    load.submit("hog", 100)
    load.step()
    load.submit("small")
    while "small" not in load.admitted:
        load.step()
    assert load.admitted == ["hog"] * NUM_SEATS + ["small"] + load.admitted[NUM_SEATS + 1 :]


def test_clients_that_come_in_the_same_step_take_turns():
    load = Load(max_num_seqs=1)
    load.submit("hog", 5)
    load.submit("small", 2)
    for _ in range(20):
        load.step()
    assert load.admitted[:5] == ["hog", "small", "hog", "small", "hog"]


def test_without_fair_share_arrival_decides():
    load = Load(fair_share=False)
    load.submit("hog", 9)
    load.step()
    load.submit("small")
    while load.waiting.total():
        load.step()
    assert load.admitted == ["hog"] * 9 + ["small"]


def test_a_share_never_outweighs_a_priority():
    load = Load(max_num_seqs=1, policy="priority")
    load.submit("hog", 3, priority=0)
    load.submit("small", 1, priority=1)
    load.submit("hog", 1, priority=1)
    load.submit("small", 1, priority=0)
    for _ in range(24):
        load.step()
    assert load.admitted == ["hog", "small", "hog", "hog", "small", "hog"]


def test_tokens_count_and_not_requests():
    load = Load(max_num_seqs=1)
    load.submit("long", 100, prompt=40, output=10)
    load.submit("short", 400, prompt=4, output=3)
    for _ in range(500):
        load.step()
    per_request = {"long": 40 + 10 * OUTPUT_TOKEN_WEIGHT, "short": 4 + 3 * OUTPUT_TOKEN_WEIGHT}
    num = Counter(load.admitted)
    assert num["short"] / num["long"] == pytest.approx(per_request["long"] / per_request["short"], rel=0.1)


@pytest.mark.parametrize("num_blocks", [256, 20], ids=["enough blocks", "preemptions"])
def test_two_backlogged_clients_never_get_further_apart_than_what_may_run(num_blocks: int):
    bound = 2 * (MAX_MODEL_LEN + OUTPUT_TOKEN_WEIGHT * NUM_SEATS * MAX_MODEL_LEN)
    furthest = {fair: furthest_apart(Load(num_blocks, fair_share=fair), num_steps=1500) for fair in (True, False)}
    assert furthest[True] <= bound < furthest[False]


def furthest_apart(load: Load, num_steps: int) -> int:
    """Return the largest difference of service between two clients that wait all the time."""
    rng = random.Random(0)
    furthest = 0
    for _ in range(num_steps):
        while load.waiting["many"] < 20:
            load.submit("many", rng.randint(1, 20), prompt=rng.randint(1, 4), output=rng.randint(20, 40))
        while load.waiting["few"] <= NUM_SEATS:  # so that some wait after the step too
            load.submit("few", prompt=rng.randint(10, 40), output=rng.randint(1, 20))
        load.step()
        furthest = max(furthest, abs(load.service["many"] - load.service["few"]))
    return furthest


def test_preemption_happens_in_the_tight_case():
    load = Load(20)
    furthest_apart(load, 300)
    assert load.num_preemptions > 10


def test_who_idles_saves_up_nothing():
    load = Load(max_num_seqs=1)
    load.submit("saver")
    while load.waiting["saver"] or load.scheduler.num_running:
        load.step()
    load.submit("steady", 60)
    for _ in range(100):
        load.step()
    load.admitted.clear()
    load.submit("saver", 60)
    for _ in range(100):
        load.step()
    assert abs(load.admitted.count("saver") - load.admitted.count("steady")) <= 2


def test_who_was_away_while_nobody_waited_saves_up_nothing_either():
    load = Load(max_num_seqs=2)
    load.submit("other", output=59)
    load.step()
    for _ in range(10):
        load.submit("steady", prompt=1)
        while load.scheduler.num_waiting or load.scheduler.num_running > 1:
            load.step()
    load.admitted.clear()
    load.submit("saver", 30, prompt=1)
    load.submit("steady", 30, prompt=1)
    while len(load.admitted) < 20:
        load.step()
    assert abs(load.admitted.count("saver") - load.admitted.count("steady")) <= 4


def test_a_newcomer_gets_no_credit_for_what_others_got_before_it_came():
    load = Load(max_num_seqs=2)
    load.submit("first", 2, output=40)
    load.submit("first", 30, output=1)
    for _ in range(35):
        load.step()
    load.admitted.clear()
    load.submit("second", 30, output=1)
    while len(load.admitted) < 20:
        load.step()
    owed = OUTPUT_TOKEN_WEIGHT * 2 * 5  # for what its two sequences put out after the other had come
    assert load.admitted.index("first") <= owed // (4 + OUTPUT_TOKEN_WEIGHT) + 1


def test_running_output_decides_who_is_next_before_it_has_ended():
    load = Load(max_num_seqs=3)
    load.submit("hog", 2, output=40)
    load.submit("other", output=10)
    load.step()
    load.submit("hog", 10)
    load.submit("small")
    while len(load.admitted) < 4:
        load.step()
    assert load.admitted[3] == "small"


def test_output_from_before_a_client_waits_again_is_charged_once():
    load = Load(max_num_seqs=3)
    load.submit("a", output=50)
    load.submit("b", output=50)
    load.submit("b", output=30)
    load.step()
    load.submit("b", 20, output=1)
    for _ in range(25):
        load.step()
    load.submit("a", 20, output=1)
    load.admitted.clear()
    while len(load.admitted) < 10:
        load.step()
    assert "a" in load.admitted[:3]


def test_cached_prompt_tokens_cost_nothing():
    queue = WaitingQueue(POLICIES["fcfs"])
    sequences = [make_sequence(16, client=client) for client in ("a", "b", "a", "b", "b")]
    for number, seq in enumerate(sequences):
        seq.arrival_index = number
        queue.push(seq)
    cached = {"a": 0, "b": 12}
    order = [queue.admit_head(cached[queue.head().client]).client for _ in sequences]
    assert order == ["a", "b", "b", "b", "a"]


def make_arrivals(*clients_and_prompts: tuple[str, int]) -> list[Sequence]:
    """Return a sequence of each client, in this order of arrival and after all earlier ones."""
    sequences = [make_sequence(prompt, client=client) for client, prompt in clients_and_prompts]
    for seq in sequences:
        seq.arrival_index = next(_arrivals)
    return sequences


def arrive(queue: WaitingQueue, *clients_and_prompts: tuple[str, int]) -> list[Sequence]:
    sequences = make_arrivals(*clients_and_prompts)
    for seq in sequences:
        queue.push(seq)
    return sequences


def admit(queue: WaitingQueue, num: int) -> str:
    return "".join(queue.admit_head(0).client for _ in range(num))


def test_a_prompt_costs_its_length():
    queue = WaitingQueue(POLICIES["fcfs"])
    arrive(queue, ("a", 8), ("a", 8), *[("b", 2)] * 5)
    assert admit(queue, 7) == "abbbbab", "a's 8 tokens are worth 4 prompts of b's"


def test_a_newcomer_has_a_part_in_what_was_served_before_it_came():
    """Two clients shared the 30 tokens of a's first prompt, so a third starts with 15, and waits for 3 prompts of b's 6."""
    queue = WaitingQueue(POLICIES["fcfs"])
    arrive(queue, ("a", 30), *[("b", 6)] * 5, ("a", 30))
    order = admit(queue, 1)
    arrive(queue, ("c", 6), ("c", 6))
    assert order + admit(queue, 8) == "abbbcbcba"


def test_a_sequence_that_was_preempted_is_admitted_again_for_nothing():
    queue = WaitingQueue(POLICIES["fcfs"])
    first, _ = arrive(queue, ("a", 4), ("b", 4))
    admit(queue, 2)
    first.num_preemptions += 1
    queue.push(first)
    queue.release(first)
    arrive(queue, ("a", 4), ("b", 4))
    assert queue.admit_head(0) is first
    assert admit(queue, 2) == "ab", "they have had the same, so the order is that of arrival"


def test_the_client_that_idles_longest_is_forgotten_first():
    queue = WaitingQueue(POLICIES["fcfs"])
    names = [f"client {number}" for number in range(MAX_IDLE_CLIENTS + 1)]
    arrive(queue, ("one that runs", 4))
    queue.admit_head(4)
    for name in names[:-1]:
        get_into_debt(queue, name)
    queue.remove(*arrive(queue, (names[0], 4)))  # it is back for a moment, so the second idles longest
    get_into_debt(queue, names[-1])
    *owing, forgotten = make_arrivals(*((names[number], 4) for number in (2, -1, 0, 1)))
    for seq in (forgotten, *owing):
        queue.push(seq)
    assert [queue.admit_head(0) for _ in range(4)] == [forgotten, *owing]


def get_into_debt(queue: WaitingQueue, client: str) -> None:
    """Serve a sequence whose prompt is cached and whose output is still owed for."""
    (seq,) = arrive(queue, (client, 4))
    queue.admit_head(4)
    seq.token_ids.extend([1] * 10)
    queue.release(seq)


def test_who_owes_and_idles_still_owes():
    """A client that comes in bursts is charged for a burst when it is back for the next."""
    load = Load(max_num_seqs=1)
    load.submit("steady", 300)
    load.submit("bursts", output=40)
    while load.waiting["bursts"] or load.service["bursts"] < 4 + 40 * OUTPUT_TOKEN_WEIGHT:
        load.step()
    load.admitted.clear()
    load.submit("bursts", output=40)
    while "bursts" not in load.admitted:
        load.step()
    assert load.admitted.count("steady") >= 5


def test_ever_new_names_do_not_starve_an_old_client():
    load = Load(max_num_seqs=2)
    names = (f"new {number}" for number in itertools.count())
    load.submit("old", 2, output=40)
    load.step()
    load.submit("old")  # it owes for 80 tokens to come
    for _ in range(8):
        load.submit(next(names))
    num_admitted = 0
    while load.admitted.count("old") < 3:
        for _ in range(len(load.admitted) - num_admitted):
            load.submit(next(names))
        num_admitted = len(load.admitted)
        load.step()
        assert len(load.admitted) < 1000, "the old client waits behind every new name"


def test_the_seats_are_never_idle_while_somebody_waits():
    load, rng = Load(), random.Random(1)
    for _ in range(400):
        if rng.random() < 0.4:
            load.submit(rng.choice("abcd"), rng.randint(1, 4), prompt=rng.randint(1, 20), output=rng.randint(1, 20))
        if load.waiting.total() or load.scheduler.num_running:
            plan = load.step()
            assert load.scheduler.num_waiting == 0 or plan.blocked_by is BlockedBy.SEQS


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(("fair_share", "clients"), [(True, [""]), (True, ["one"]), (False, ["a", "b", "c"])])
def test_for_one_client_the_order_is_the_policys(policy: str, fair_share: bool, clients: list[str]):
    for seed in range(60):
        rng = random.Random(seed)
        queue, key = WaitingQueue(POLICIES[policy], fair_share), POLICIES[policy]
        waiting: list[Sequence] = []
        running: list[Sequence] = []
        for number in range(120):
            act(queue, key, waiting, running, rng, number, rng.choice(clients))
            queue.settle()
            assert len(queue) == len(waiting)
            if waiting:
                assert queue.head() is min(waiting, key=key)


def act(
    queue: WaitingQueue,
    key: Policy,
    waiting: list[Sequence],
    running: list[Sequence],
    rng: random.Random,
    number: int,
    client: str,
) -> None:
    """Do one of what the scheduler does to its queue."""
    kind = rng.random()
    if kind < 0.45 or not (waiting or running):
        seq = make_sequence(rng.randint(1, 9), priority=rng.randint(0, 2), client=client)
        seq.arrival_index = number
        waiting.append(seq)
        queue.push(seq)
    elif kind < 0.65 and waiting:
        seq = queue.admit_head(0)
        waiting.remove(seq)
        running.append(seq)
    elif kind < 0.75 and waiting:
        queue.remove(waiting.pop(rng.randrange(len(waiting))))
    elif running:
        seq = running[rng.randrange(len(running))]
        seq.token_ids.append(1)
        if kind > 0.85:
            running.remove(seq)
            if kind > 0.95:
                seq.num_preemptions += 1
                waiting.append(seq)
                queue.push(seq)
            queue.release(seq)


def test_what_is_remembered_is_bounded_and_forgotten_when_nobody_is_left():
    queue = WaitingQueue(POLICIES["priority"])
    sequences = [make_sequence(4, client=f"client {number}") for number in range(MAX_IDLE_CLIENTS + 200)]
    for number, seq in enumerate(sequences):
        seq.arrival_index = number
        queue.push(seq)
    for _ in sequences[1:]:
        queue.release(queue.admit_head(0))
    (level,) = queue._levels.values()
    assert (len(level.accounts), len(level.idle)) == (1, MAX_IDLE_CLIENTS)
    queue.remove(queue.head())
    assert not queue._levels

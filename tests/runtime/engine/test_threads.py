"""The number of threads where replicas share cores: on simulated machines, and with a real kernel."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import make_checkpoint
from flyball_runtime.core import cpus
from flyball_runtime.core.clock import FakeClock
from flyball_runtime.core.cpus import Demand
from flyball_runtime.engine.threads import (
    LOOK_S,
    MAX_PATIENCE,
    SOON_S,
    TOGETHER_S,
    TRIAL_S,
    ThreadCount,
    num_fitting,
    thread_count,
)

STEP_S = 0.05


class Replica:
    """A team of threads that always wants its cores while it ``computes``; and what the kernel says of it."""

    def __init__(self, machine: "Machine", most: int) -> None:
        self.machine = machine
        self.computes = False
        self.stopped_share = 0.0  # by a CPU limit, of the time of its threads
        self._threads = {"1": Demand(0.0, 0.0)}
        self._throttled_s = 0.0
        self.count = ThreadCount(most, self, machine.clock, can_be_apart=True)

    @property
    def num_wanted(self) -> int:
        return self.count.current if self.computes else 0

    def take_step(self, share: float) -> None:
        """Have each thread run for a share of the step, and wait for the rest of it."""
        stopped_s = STEP_S * self.stopped_share
        ran_s = (STEP_S - stopped_s) * share
        self._throttled_s += stopped_s * self.count.current
        threads = [str(number + 1) for number in range(self.count.current)]
        before = {thread: self._threads.get(thread, Demand(0.0, 0.0)) for thread in threads}
        self._threads = {name: Demand(ran + ran_s, waited + STEP_S - ran_s) for name, (ran, waited) in before.items()}

    def demand(self) -> dict[str, Demand]:
        return self._threads

    def idle_s(self) -> float:
        return self.machine.idle_s

    def throttled_s(self) -> float:
        return self._throttled_s


class Machine:
    """Cores that everybody who wants them gets the same share of."""

    def __init__(self, num_cores: int) -> None:
        self.num_cores = num_cores
        self.clock = FakeClock()
        self.idle_s = 0.0
        self.replicas: list[Replica] = []
        self.others = 0.0  # cores that other processes want

    def add(self) -> Replica:
        self.replicas.append(Replica(self, self.num_cores))
        return self.replicas[-1]

    @property
    def num_wanted(self) -> int:
        return sum(one.num_wanted for one in self.replicas)

    def run(self, seconds: float) -> float:
        """Pass time; return the share of it in which a replica lacked more than 0.6 of a core."""
        num_steps = round(seconds / STEP_S)
        num_crowded = 0
        for _ in range(num_steps):
            wanted = self.num_wanted + self.others
            share = min(1.0, self.num_cores / max(1.0, wanted))
            num_crowded += any(one.num_wanted > 1 and one.num_wanted * (1.0 - share) > 0.6 for one in self.replicas)
            for one in self.replicas:
                if one.computes:
                    one.count.update()
                    one.take_step(share)
            self.clock.advance(STEP_S)
            self.idle_s += max(0.0, self.num_cores - wanted) * STEP_S
        return num_crowded / num_steps


@pytest.mark.parametrize(
    ("cores", "threads"),
    [
        (0.3, 1),
        (1.0, 1),
        (1.3, 1),
        (1.5, 2),
        (2.0, 2),
        (2.4, 2),
        (2.6, 3),
        (8.0, 8),
        (15.5, 15),
        (15.9, 16),
        (16.0, 16),
    ],
)
def test_one_more_thread_than_whole_cores_pays_if_little_is_missing(cores: float, threads: int) -> None:
    assert num_fitting(cores) == threads


def test_a_replica_alone_keeps_all_its_threads() -> None:
    machine = Machine(16)
    one = machine.add()
    one.computes = True
    machine.run(300.0)
    assert one.count.current == 16


@pytest.mark.parametrize("num_cores", [2, 4, 16])
def test_two_replicas_share_the_cores_and_the_one_that_is_left_takes_them_back(num_cores: int) -> None:
    machine = Machine(num_cores)
    one, other = machine.add(), machine.add()
    one.computes = other.computes = True
    machine.run(1.0)
    assert (one.count.current, other.count.current) == (num_cores // 2, num_cores // 2)
    other.computes = False
    machine.run(2.0)
    assert one.count.current == num_cores
    other.computes = True
    machine.run(2.0)
    assert machine.num_wanted <= num_cores


def test_what_happened_while_weights_were_loaded_is_not_counted() -> None:
    machine = Machine(2)
    one = machine.add()
    for _ in range(100):  # beside three times as many threads as cores, and nobody asks for a step
        one.take_step(1 / 3)
        machine.clock.advance(STEP_S)
    one.computes = True
    machine.run(0.5)
    assert one.count.current == 2


def test_a_replica_that_comes_later_gets_its_cores_too() -> None:
    machine = Machine(8)
    first, second = machine.add(), machine.add()
    first.computes = True
    machine.run(30.0)
    second.computes = True
    machine.run(5.0)
    assert machine.num_wanted <= 8
    assert min(first.count.current, second.count.current) >= 3


@given(
    num_cores=st.integers(2, 12),
    loads=st.lists(st.tuples(st.lists(st.booleans(), min_size=3, max_size=3), st.floats(0.5, 40.0)), max_size=8),
)
def test_whatever_came_before_cores_are_neither_crowded_for_long_nor_left(
    num_cores: int, loads: list[tuple[list[bool], float]]
) -> None:
    machine = Machine(num_cores)
    replicas = [machine.add() for _ in range(3)]
    for computes, seconds in loads:
        for one, does in zip(replicas, computes, strict=True):
            one.computes = does
        machine.run(seconds)
    for one in replicas:
        one.computes = True
    machine.run(2 * LOOK_S * num_cores)
    assert machine.run(60.0) < 0.2
    replicas[1].computes = replicas[2].computes = False
    machine.run(2.0 * MAX_PATIENCE)
    assert replicas[0].count.current == num_cores


def test_a_neighbour_that_comes_and_goes_changes_little_after_a_while() -> None:
    machine = Machine(2)
    one = machine.add()
    one.computes = True
    numbers = []
    for second in range(240):
        machine.others = 2.0 if second % 4 < 2 else 0.0
        machine.run(1.0)
        numbers.append(one.count.current)
    changes = [before != now for before, now in itertools.pairwise(numbers[120:])]
    assert sum(changes) <= 2 * math.ceil(120.0 / MAX_PATIENCE)


def test_a_neighbour_of_lower_priority_does_not_keep_threads_away_for_ever() -> None:
    """It uses every core that nobody else wants, so that none is ever idle."""
    machine = Machine(2)
    one = machine.add()
    one.computes = True
    machine.others = 2.0
    machine.run(1.0)
    assert one.count.current == 1
    machine.others = 0.0
    one.idle_s = lambda: 0.0  # type: ignore[method-assign]
    machine.run(SOON_S)
    assert one.count.current == 1
    machine.run(TRIAL_S)
    assert one.count.current == 2


def test_what_a_cpu_limit_stops_is_no_neighbour() -> None:
    machine = Machine(2)
    one = machine.add()
    one.computes, one.stopped_share = True, 0.4
    machine.run(30.0)
    assert one.count.current == 2


def test_a_replica_with_pauses_finds_its_cores_again() -> None:
    machine = Machine(2)
    one, other = machine.add(), machine.add()
    one.computes = other.computes = True
    machine.run(1.0)
    one.computes = other.computes = False
    machine.run(20.0)
    one.computes = True
    machine.run(0.5)
    assert one.count.current == 2


def test_a_kernel_that_does_not_count_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Silent(Replica):
        def demand(self) -> dict[str, Demand]:
            return {}

    machine = Machine(2)
    with caplog.at_level("INFO"):
        assert thread_count(2, machine.clock, Silent(machine, 2)) is None
    assert [record.getMessage() for record in caplog.records] == [
        "2 CPU threads, also while other processes use the cores: this kernel counts no waiting times"
    ]
    assert thread_count(1, machine.clock) is None


def test_threads_that_ended_or_began_do_not_confuse_the_sums() -> None:
    before = {"1": Demand(10.0, 1.0), "2": Demand(20.0, 2.0), "3": Demand(5.0, 0.5)}
    now = {"1": Demand(11.0, 1.5), "3": Demand(0.25, 0.125), "4": Demand(2.0, 0.0)}
    assert cpus.demand_since(before, now) == Demand(1.0 + 0.25 + 2.0, 0.5 + 0.125)


CROWDED = """
import hashlib, os, threading, time
from flyball_runtime.core.cpus import demand, demand_since
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
data, before, end_s = bytes(1 << 24), demand(), time.monotonic() + 1.0
def work():
    while time.monotonic() < end_s: hashlib.sha256(data)  # without Python's lock
threads = [threading.Thread(target=work) for _ in range(3)]
for one in threads: one.start()
time.sleep(0.9)
ran_s, waited_s = demand_since(before, demand())
for one in threads: one.join()
print(ran_s / (ran_s + waited_s))
"""


@pytest.mark.skipif(not cpus.demand(), reason="this kernel counts no waiting times")
def test_the_kernel_says_what_threads_got_of_a_core() -> None:
    result = subprocess.run([sys.executable, "-c", CROWDED], capture_output=True, text=True, check=True)
    assert 0.05 < float(result.stdout) < 0.5  # a third; less where others use that core


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_idle_time_is_that_of_the_cores_that_are_named() -> None:
    mine = cpus.cores()
    if len(mine) < 2:
        pytest.skip("one core is all there is")
    assert 0.0 < cpus.idle_s({min(mine)}) < cpus.idle_s(mine)


def test_threads_alone_have_a_core_each_and_leave_it_to_others_at_once() -> None:
    machine = Machine(2)
    one = machine.add()
    one.computes = True
    machine.run(2 * LOOK_S)
    assert one.count.are_apart
    machine.others = 2.0
    machine.run(4 * LOOK_S)
    assert (one.count.current, one.count.are_apart) == (1, False)
    machine.others = 0.0
    machine.run(2.0)
    assert (one.count.current, one.count.are_apart) == (2, False), "others may come back soon"
    machine.run(TOGETHER_S)
    assert one.count.are_apart


def test_a_thread_that_shares_its_own_core_is_let_go_before_any_is_removed() -> None:
    """Beside a busy program two threads apart get 1 and 0.5 cores, and when they may run anywhere, 0.67 each."""
    machine = Machine(2)
    one = machine.add()
    one.computes = True
    machine.run(2 * LOOK_S)
    seen = []
    for _ in range(40):
        one.count.update()
        one.take_step(0.75 if one.count.are_apart else 2 / 3)
        machine.clock.advance(STEP_S)
        seen.append((one.count.current, one.count.are_apart))
    assert list(dict.fromkeys(seen)) == [(2, True), (2, False), (1, False)]


def test_a_little_company_leaves_each_thread_its_core() -> None:
    machine = Machine(2)
    one = machine.add()
    one.computes, machine.others = True, 0.2
    machine.run(60.0)
    assert (one.count.current, one.count.are_apart) == (2, True)


def test_threads_that_cannot_be_placed_are_never_apart() -> None:
    machine = Machine(2)
    one = machine.add()
    one.count = ThreadCount(2, one, machine.clock)
    one.computes = True
    machine.run(60.0)
    assert (one.count.current, one.count.are_apart) == (2, False)


ENGINE = """
import itertools, json, os, subprocess, sys, time
from flyball_runtime.llm import LLM
from flyball_runtime.core.sampling_params import SamplingParams
llm = LLM(sys.argv[1], max_num_seqs=4)
cores = len(os.sched_getaffinity(0))
greedy = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
def generate():
    return [one.token_ids for one in llm.generate([[5, 6, 7], [8, 9]], greedy)]
tokens = [generate()]
others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
deadline_s = time.monotonic() + 60.0
while time.monotonic() < deadline_s and llm.engine.state().num_cpu_threads == cores:
    tokens.append(generate())
tokens.append(generate())
for one in others: one.kill()
are_fewer = llm.engine.state().num_cpu_threads < cores
print(json.dumps([are_fewer, all(one == tokens[0] for one in tokens), len(os.sched_getaffinity(0)) == cores]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not cpus.demand(), reason="this kernel counts no waiting times")
def test_an_engine_beside_busy_processes_computes_the_same_with_fewer_threads(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core is all there is")
    path = make_checkpoint(tmp_path, "llama3")
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    result = subprocess.run([sys.executable, "-c", ENGINE, path], capture_output=True, text=True, env=variables)
    assert result.returncode == 0, result.stderr
    are_fewer, are_the_same_tokens, may_run_anywhere = json.loads(result.stdout.splitlines()[-1])
    assert are_fewer
    assert are_the_same_tokens
    assert may_run_anywhere, "a library leaves the threads of its user alone"


BOUND = """
import json, os, sys
from types import SimpleNamespace
from flyball_runtime.core.config import EngineConfig
from flyball_runtime.core.request import Request
from flyball_runtime.core.sampling_params import SamplingParams
from flyball_runtime.engine import runner
cores = os.sched_getaffinity(0)
threads = SimpleNamespace(current=len(cores), are_apart=False, update=lambda: True)
runner.thread_count = lambda *_, can_be_apart: threads if can_be_apart else None
engine = runner.start_engine(EngineConfig(model=sys.argv[1], served_model_name="m", max_num_seqs=4), owns_process=True)
seen = []
for are_apart in (False, True, False):
    threads.are_apart = are_apart
    engine.submit(Request(request_id="a", prompt_token_ids=[5, 6, 7], sampling=SamplingParams(max_tokens=2)))
    while engine.has_work():
        engine.step()
    other = engine._executor._grammars._threads.submit(os.sched_getaffinity, 0).result()
    seen.append([os.sched_getaffinity(0) == cores, len(os.sched_getaffinity(0)), other == cores])
print(json.dumps(seen))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds threads")
def test_an_engine_with_a_process_of_its_own_binds_what_computes_and_nothing_else(tmp_path: Path) -> None:
    num_cores = len(os.sched_getaffinity(0))
    if num_cores < 2:
        pytest.skip("one core is all there is")
    path = make_checkpoint(tmp_path, "llama3")
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    result = subprocess.run([sys.executable, "-c", BOUND, path], capture_output=True, text=True, env=variables)
    assert result.returncode == 0, result.stderr
    anywhere = [True, num_cores, True]
    assert json.loads(result.stdout.splitlines()[-1]) == [anywhere, [False, 1, True], anywhere]

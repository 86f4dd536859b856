"""The work queue, played at random against what it promises."""

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flyball_operator.cluster.work_queue import Backoff, WorkQueue

KEYS = st.sampled_from("abcd")


class QueueMachine(RuleBasedStateMachine):
    """Remembers for each key when it has to come at the latest and at the earliest, and checks what comes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.queue: WorkQueue[str] = WorkQueue(Backoff(1.0, 8.0, random=lambda: 0.0), clock=lambda: self.now)
        self.due: dict[str, float] = {}
        self.active: set[str] = set()
        self.tries: dict[str, int] = {}
        self.failing: set[str] = set()
        self.not_before: dict[str, float] = {}

    @rule(key=KEYS, delay=st.sampled_from([0.0, 0.0, 3.0]))
    def add(self, key: str, delay: float) -> None:
        self.queue.add(key, delay)
        at = max(self.now + delay, self.not_before.get(key, 0.0))
        self.due[key] = min(self.due.get(key, float("inf")), at)

    @rule(seconds=st.sampled_from([0.5, 1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        ready = {key: at for key, at in self.due.items() if at <= self.now and key not in self.active}
        key = self.queue.take()
        assert (key is None) == (not ready)
        if key is not None:
            assert ready[key] == min(ready.values())
            del self.due[key]
            self.active.add(key)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def succeed(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.active)))
        self.queue.done(key)
        self.active.remove(key)
        self.tries.pop(key, None)
        self.failing.discard(key)
        self.not_before.pop(key, None)

    @precondition(lambda self: self.active)
    @rule(data=st.data(), at_least=st.sampled_from([0.0, 5.0]), expected=st.booleans())
    def fail(self, data: st.DataObject, at_least: float, expected: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.active)))
        self.tries[key] = self.tries.get(key, 0) + 1
        (self.failing.discard if expected else self.failing.add)(key)
        self.not_before[key] = self.now + at_least
        retry = self.now + min(8.0, 2.0 ** (self.tries[key] - 1))
        self.due[key] = max(self.now + at_least, min(retry, self.due.get(key, retry)))
        assert self.queue.failed(key, at_least_s=at_least, expected=expected) == self.due[key] - self.now
        self.active.remove(key)

    @invariant()
    def counts(self) -> None:
        assert self.queue.num_due == sum(at <= self.now for at in self.due.values())
        assert self.queue.num_failing == len(self.failing)

    def teardown(self) -> None:
        """Nothing is ever lost: all that was added comes."""
        for key in sorted(self.active):
            self.queue.done(key)
        self.active.clear()
        self.now += 100.0
        came = set()
        while (key := self.queue.take()) is not None:
            came.add(key)
        assert came == set(self.due)


QueueMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestQueue = QueueMachine.TestCase


def test_jitter_shortens_a_wait_by_half_at_most() -> None:
    assert Backoff(1.0, 60.0, random=lambda: 0.0).after(3) == 4.0
    assert Backoff(1.0, 60.0, random=lambda: 1.0).after(3) == 2.0
    assert Backoff(1.0, 60.0, random=lambda: 0.0).after(1000) == 60.0


def test_waiting_ends_when_something_is_due() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.add("later", 0.02)
        assert await waiting == "later"
        queue.add("now")
        assert await queue.get() == "now"

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_a_key_that_is_worked_on_wakes_nobody_until_it_is_released() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("a")
        assert await queue.get() == "a"
        waiting = asyncio.create_task(queue.get())
        queue.add("a")
        await asyncio.sleep(0.01)
        assert not waiting.done()
        queue.done("a")
        assert await waiting == "a"

    asyncio.run(asyncio.wait_for(scenario(), 10))

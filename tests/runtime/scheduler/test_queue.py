from flyball_runtime.core.request import Sequence
from flyball_runtime.scheduler.policies import fcfs, priority
from flyball_runtime.scheduler.queue import WaitingQueue
from sequences import make_sequence


def arrivals(*priorities: int) -> list[Sequence]:
    sequences = [make_sequence(1, priority=p) for p in priorities]
    for index, seq in enumerate(sequences):
        seq.arrival_index = index
    return sequences


def drained(queue: WaitingQueue) -> list[Sequence]:
    return [queue.admit_head(0) for _ in range(len(queue))]


def test_fcfs_keeps_the_order_of_arrival_whatever_the_priority():
    a, b, c = arrivals(2, 0, 1)
    queue = WaitingQueue(fcfs)
    for seq in (b, c, a):
        queue.push(seq)
    assert queue.head() is a
    assert drained(queue) == [a, b, c]


def test_priority_then_arrival():
    a, b, c, d = arrivals(1, 0, 1, 0)
    queue = WaitingQueue(priority)
    for seq in (a, b, c, d):
        queue.push(seq)
    assert drained(queue) == [b, d, a, c]


def test_a_sequence_in_the_middle_can_be_removed():
    a, b, c = arrivals(0, 0, 0)
    queue = WaitingQueue(fcfs)
    for seq in (a, b, c):
        queue.push(seq)
    queue.remove(b)
    assert drained(queue) == [a, c]


def test_a_sequence_that_comes_back_waits_before_later_arrivals():
    a, b, c = arrivals(0, 0, 0)
    queue = WaitingQueue(fcfs)
    queue.push(b)
    queue.push(c)
    queue.push(a)
    assert queue.head() is a

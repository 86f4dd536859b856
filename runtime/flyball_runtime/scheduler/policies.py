"""In which order sequences run.

A policy is a pure function from a sequence to a sort key: the queue admits the smallest key first, and preemption takes
the largest key among the running. Keys must be unique and must not change while a sequence waits. One order for both
ends makes starvation impossible within a key's own terms: the sequence with the smallest key is never preempted while
another one runs, so it finishes, and then the next one has the smallest key. A preempted sequence keeps its key and so
waits before everything that would have been admitted after it.
"""

from collections.abc import Callable, Iterable

from flyball_runtime.core.sequence import Sequence

Key = tuple[float, ...]
Policy = Callable[[Sequence], Key]


def fcfs(seq: Sequence) -> Key:
    """First come, first served."""
    return (seq.arrival_index,)


def priority(seq: Sequence) -> Key:
    """Lower ``Request.priority`` first; first come, first served among equals. Low priorities can starve: they asked to."""
    return (seq.priority, seq.arrival_index)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}


def choose_victim(running: Iterable[Sequence], policy: Policy) -> Sequence:
    """Return the sequence to preempt: the one that the policy would run last.

    Under both policies here that is the latest arrival (of the lowest priority), which has computed least and so loses
    least in most mixes.
    """
    return max(running, key=policy)

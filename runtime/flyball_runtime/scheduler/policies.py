"""In which order sequences run.

A policy is a pure function from a sequence to a sort key, whose last part is the arrival: of each client the queue admits
the smallest key first, and preemption takes the largest key among the running, whoever's it is. Keys must be unique and
must not change. Some running sequence has the smallest key; it is never preempted, so it finishes, and preemption cannot
go in circles. A preempted sequence keeps its key, and with it the place before its client's later ones.

Between clients the queue decides (``waiting_queue.py``), within what precedes the arrival in the key: a fair share never
outweighs a priority.
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

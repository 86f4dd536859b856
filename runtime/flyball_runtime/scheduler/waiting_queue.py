"""Sequences that wait for admission, in policy order."""

from bisect import bisect_left, insort

from flyball_runtime.core.sequence import Sequence
from flyball_runtime.scheduler.policies import Key, Policy


class WaitingQueue:
    """A sorted list: servers bound their queue, so shifting its pointers is cheaper than a heap that must forget aborts."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._entries: list[tuple[Key, Sequence]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def head(self) -> Sequence:
        return self._entries[0][1]

    def push(self, seq: Sequence) -> None:
        insort(self._entries, (self._policy(seq), seq), key=_key)

    def pop(self) -> Sequence:
        return self._entries.pop(0)[1]

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence that is in the queue."""
        index = bisect_left(self._entries, self._policy(seq), key=_key)
        assert self._entries[index][1] is seq, f"{seq!r} is not where its key says"
        del self._entries[index]


def _key(entry: tuple[Key, Sequence]) -> Key:
    return entry[0]

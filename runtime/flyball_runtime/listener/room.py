"""How much the relay takes on: requests, and bytes of them. Bytes count when they are there, not when they are announced."""

import asyncio
import contextlib
from collections.abc import Iterator


class NoRoom(Exception):
    """The other requests leave no room for this one."""


class Share:
    """One request, and the bytes of its body."""

    def __init__(self, room: "Room", deadline: asyncio.Timeout) -> None:
        self.num_bytes = 0
        self.deadline = deadline
        self._room = room

    def grow(self, num_bytes: int) -> None:
        """Count bytes that have come. Raises NoRoom."""
        self.num_bytes += num_bytes
        self._room.make(self, num_bytes)

    def complete(self) -> None:
        """Say that the request is whole; it is not given up for others any more."""
        self._room.arriving.pop(self, None)


class Room:
    """Holds ``max_requests`` and ``max_bytes`` of their bodies; then the one that has been arriving for longest is given up.

    So those lose who are slow, or who mean to take the room away from others, and a request that comes at once gets through.
    """

    def __init__(self, max_bytes: int, max_requests: int) -> None:
        self.max_bytes = max_bytes
        self.max_requests = max_requests
        self.arriving: dict[Share, None] = {}  # oldest first
        self._shares: set[Share] = set()
        self._held_bytes = 0

    @contextlib.contextmanager
    def share(self, deadline: asyncio.Timeout) -> Iterator[Share]:
        """Give a share that is returned at the end of the block; ``deadline`` is moved to now when it is given up.

        Raises:
            NoRoom: all other requests are whole.
        """
        share = Share(self, deadline)
        while len(self._shares) >= self.max_requests:
            self._give_up_slowest(share)
        self._shares.add(share)
        self.arriving[share] = None
        try:
            yield share
        finally:
            share.complete()
            self._free(share)

    def make(self, wanting: Share, num_bytes: int) -> None:
        self._held_bytes += num_bytes
        while self._held_bytes > self.max_bytes:
            self._give_up_slowest(wanting)

    def _give_up_slowest(self, wanting: Share) -> None:
        slowest = next(iter(self.arriving), wanting)
        if slowest is wanting:
            raise NoRoom
        slowest.complete()
        self._free(slowest)
        slowest.deadline.reschedule(asyncio.get_running_loop().time())

    def _free(self, share: Share) -> None:
        self._shares.discard(share)
        self._held_bytes -= share.num_bytes
        share.num_bytes = 0

"""How much the relay holds of requests that it is given. Bytes count when they are there, not when they are announced."""

import asyncio
import contextlib
from collections.abc import Iterator


class NoRoom(Exception):
    """The others' bodies leave no room for this one."""


class Share:
    """The bytes of one request's body."""

    def __init__(self, room: "Room", deadline: asyncio.Timeout) -> None:
        self.num_bytes = 0
        self.deadline = deadline
        self._room = room

    def grow(self, num_bytes: int) -> None:
        """Count bytes that have come. Raises NoRoom."""
        self.num_bytes += num_bytes
        self._room.make(self, num_bytes)

    def complete(self) -> None:
        """Say that the body is whole; it is not given up for others any more."""
        self._room.arriving.pop(self, None)


class Room:
    """Holds ``max_bytes`` of bodies. When they are used up, the body that has been arriving for longest is given up.

    So those lose who are slow, or who mean to take the room away from others, and a request that comes at once gets through.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.arriving: dict[Share, None] = {}  # oldest first
        self._held_bytes = 0

    @contextlib.contextmanager
    def share(self, deadline: asyncio.Timeout) -> Iterator[Share]:
        """Give a share that is returned at the end of the block. ``deadline`` is moved to now when the body is given up."""
        share = Share(self, deadline)
        self.arriving[share] = None
        try:
            yield share
        finally:
            share.complete()
            self._free(share)

    def make(self, wanting: Share, num_bytes: int) -> None:
        self._held_bytes += num_bytes
        while self._held_bytes > self.max_bytes:
            slowest = next(iter(self.arriving), wanting)
            if slowest is wanting:
                raise NoRoom
            slowest.complete()
            self._free(slowest)
            slowest.deadline.reschedule(asyncio.get_running_loop().time())

    def _free(self, share: Share) -> None:
        self._held_bytes -= share.num_bytes
        share.num_bytes = 0

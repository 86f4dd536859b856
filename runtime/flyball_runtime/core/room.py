"""How much of the requests that arrive may be in memory. Bytes count when they are there, not when they are announced."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator


class RoomFull(Exception):
    """The other requests leave no room for this one."""


class GivenUp(RoomFull):
    """This request has been arriving for longest, and others needed its room."""


class RoomShare:
    """One request, and the bytes of its body."""

    def __init__(self, room: "Room") -> None:
        self.num_bytes = 0
        self._room = room
        self._deadline: asyncio.Timeout | None = None
        self._given_up = False

    @contextlib.asynccontextmanager
    async def arriving(self, timeout_s: float) -> AsyncIterator[None]:
        """Let the block receive the request; until its end the request may be given up for others.

        Raises:
            GivenUp: it was.
            TimeoutError: the block took longer than ``timeout_s``.
        """
        self._room.arriving[self] = None
        try:
            async with asyncio.timeout(timeout_s) as self._deadline:
                yield
        except TimeoutError:
            if not self._given_up:
                raise
        finally:
            self._room.arriving.pop(self, None)
        if self._given_up:
            raise GivenUp

    def grow(self, num_bytes: int) -> None:
        """Count bytes that have come. Raises RoomFull."""
        self._room.make(self, num_bytes)

    def give_up(self) -> None:
        """End the block of ``arriving``."""
        self._given_up = True
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time())


class Room:
    """Holds ``max_requests`` and ``max_bytes`` of their bodies; then the one that has been arriving for longest is given up.

    So those lose who are slow, or who mean to take the room away from others, and a request that comes at once gets through.

    Args:
        max_requests: None is any number.
    """

    def __init__(self, max_bytes: int, max_requests: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.arriving: dict[RoomShare, None] = {}  # oldest first
        self._max_requests = max_requests
        self._shares: set[RoomShare] = set()
        self._held_bytes = 0

    @contextlib.contextmanager
    def share(self) -> Iterator[RoomShare]:
        """Give a share that is returned at the end of the block. Raises RoomFull when all other requests are whole."""
        while self._max_requests is not None and len(self._shares) >= self._max_requests:
            self._give_up(next(iter(self.arriving), None))
        share = RoomShare(self)
        self._shares.add(share)
        try:
            yield share
        finally:
            self._free(share)

    def make(self, wanting: RoomShare, num_bytes: int) -> None:
        """Make room for bytes of ``wanting``. Raises RoomFull when nobody else has been arriving for longer."""
        wanting.num_bytes += num_bytes
        self._held_bytes += num_bytes
        while self._held_bytes > self.max_bytes:
            slowest = next((share for share in self.arriving if share.num_bytes), None)
            self._give_up(None if slowest is wanting else slowest)

    def _give_up(self, slowest: RoomShare | None) -> None:
        if slowest is None:
            raise RoomFull
        self.arriving.pop(slowest)
        self._free(slowest)
        slowest.give_up()

    def _free(self, share: RoomShare) -> None:
        self._shares.discard(share)
        self._held_bytes -= share.num_bytes
        share.num_bytes = 0

"""Work that takes too long for the event loop: one thread per lane, in which clients take turns."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from flyball_runtime.core.errors import RequestError

T = TypeVar("T")


class TooManyLongTexts(RequestError):
    status, code = 429, "too_many_long_texts"

    def __init__(self, num_waiting: int) -> None:
        super().__init__(
            f"{num_waiting} requests with long texts are waiting to be tokenized, the limit of this replica. "
            "Retry after 1 s or add replicas.",
            retry_after_s=1,
        )


class Lane:
    """Runs one piece of work at a time in a thread of its own. When several wait, each client has one turn after another.

    The work has to release Python's lock, as ``encode_batch`` of tokenizers does, or to consist of short steps in Python;
    else the event loop waits for it all the same.

    Args:
        max_waiting: pieces of work that may wait; more are refused.
    """

    def __init__(self, name: str, max_waiting: int) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._max_waiting = max_waiting
        self._turns: dict[str, deque[asyncio.Future[None]]] = {}  # by client; the first client is next
        self._busy = False

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """Return what ``work`` returns. Raises TooManyLongTexts, and whatever ``work`` raises."""
        await self._turn_of(client)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._pass_on()

    async def _turn_of(self, client: str) -> None:
        if not self._busy:
            self._busy = True
            return
        num_waiting = sum(map(len, self._turns.values()))
        if num_waiting >= self._max_waiting:
            raise TooManyLongTexts(num_waiting)
        turn = asyncio.get_running_loop().create_future()
        self._turns.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was this one's turn already
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._turns:
            client, turns = next(iter(self._turns.items()))
            turn = turns.popleft()
            del self._turns[client]
            if turns:
                self._turns[client] = turns  # behind the other clients
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False

"""Work that takes too long for the event loop: one thread per lane, in which clients take turns."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request
from starlette.types import Receive

from flyball_runtime.api.errors import ClientLeft
from flyball_runtime.api.identity import client_of
from flyball_runtime.core.errors import RequestError

T = TypeVar("T")

MAX_LONG_BYTES = 256 * 1024
"""Longer bodies have a lane of their own, so that a long prompt never waits behind a body of 4 MB."""

MAX_WAITING = 256
"""Bodies that may wait in a lane."""


class TooManyLongTexts(RequestError):
    status, code = 429, "too_many_long_texts"

    def __init__(self, num_waiting: int) -> None:
        super().__init__(
            f"{num_waiting} requests with long bodies are waiting to be tokenized, the limit of this replica. "
            "Retry after 1 s or add replicas.",
            retry_after_s=1,
        )


class Lane:
    """Runs one piece of work at a time in a thread of its own. When several wait, each client has one turn after another.

    The work has to release Python's lock, as ``encode_batch`` of tokenizers does, or to consist of short steps in Python;
    else the event loop waits for it all the same.

    Args:
        max_waiting: pieces of work that may wait; more are refused.
        max_waiting_bytes: bytes that they may hold together.
    """

    def __init__(self, name: str, max_waiting: int, max_waiting_bytes: int) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0
        self._turns: dict[str, deque[asyncio.Future[None]]] = {}  # by client; the first client is next
        self._busy = False

    async def run(self, client: str, num_bytes: int, work: Callable[[], T]) -> T:
        """Return what ``work``, which holds ``num_bytes``, returns. Raises TooManyLongTexts, and whatever ``work`` raises.

        Work that is cancelled while it waits is not done, and leaves its place to others.
        """
        if self._busy:
            await self._turn_of(client, num_bytes)
        self._busy = True
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._pass_on()

    async def _turn_of(self, client: str, num_bytes: int) -> None:
        num_waiting = sum(map(len, self._turns.values()))
        if num_waiting >= self._max_waiting or self._waiting_bytes + num_bytes > self._max_waiting_bytes:
            raise TooManyLongTexts(num_waiting)
        turn = asyncio.get_running_loop().create_future()
        self._turns.setdefault(client, deque()).append(turn)
        self._waiting_bytes += num_bytes
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(client, turn)
            else:  # it was this one's turn already
                self._pass_on()
            raise
        finally:
            self._waiting_bytes -= num_bytes

    def _forget(self, client: str, turn: asyncio.Future[None]) -> None:
        turns = self._turns.get(client, deque())
        if turn in turns:
            turns.remove(turn)
        if not turns:
            self._turns.pop(client, None)

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


class Lanes:
    """Does the work of a request where the length of its body says: on the event loop, among long or among huge bodies.

    Args:
        max_inline_bytes: longest body whose work is done on the event loop.
        max_waiting_bytes: bytes of the bodies that may wait in each lane.
    """

    def __init__(self, max_inline_bytes: int, max_waiting_bytes: int) -> None:
        self._max_inline_bytes = max_inline_bytes
        self._long = Lane("long-bodies", MAX_WAITING, max_waiting_bytes)
        self._huge = Lane("huge-bodies", MAX_WAITING, max_waiting_bytes)

    async def run(self, request: Request, num_bytes: int, work: Callable[[], T]) -> T:
        """Return what ``work`` returns. The body of ``request``, which has ``num_bytes``, must have been read.

        Raises:
            TooManyLongTexts: it would have to wait behind too many others.
            ClientLeft: the client left meanwhile. Work that had not begun is not done.
        """
        if num_bytes <= self._max_inline_bytes:
            return work()
        lane = self._long if num_bytes <= MAX_LONG_BYTES else self._huge
        return await _while_connected(request.receive, lane.run(client_of(request), num_bytes, work))


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns, or cancel it and raise ClientLeft when the client leaves."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

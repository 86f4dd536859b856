"""What one beam search has found, told to each of the choices that it answers."""

import asyncio
from collections.abc import AsyncIterator

from msgspec import structs

from flyball_runtime.core.request import Failed, Finished, Hypotheses, RequestEvent, Tokens


class Found:
    """The events of one engine request, for several choices; whichever asks first waits for them."""

    def __init__(self, events: AsyncIterator[RequestEvent]) -> None:
        self._events = events
        self._lock = asyncio.Lock()
        self._hypotheses: Hypotheses | None = None
        self._ending: Finished | Failed | None = None

    async def choice(self, rank: int) -> AsyncIterator[RequestEvent]:
        """Yield the output of this rank, from 0 on, and its ending. If nothing was found, the request's ending alone."""
        async with self._lock:
            if self._ending is None:
                await self._wait()
        found, ending = self._hypotheses, self._ending
        if found is not None and isinstance(ending, Finished):
            one = found.hypotheses[rank]
            yield structs.replace(found, hypotheses=[one])
            yield structs.replace(ending, reason=one.reason)
        elif ending is not None:
            yield ending

    async def _wait(self) -> None:
        async for event in self._events:
            if isinstance(event, Hypotheses):
                self._hypotheses = event
            elif not isinstance(event, Tokens):
                self._ending = event

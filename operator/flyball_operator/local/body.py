"""Request bodies on their way through the balancer."""

import io
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from flyball_operator.local.choices import num_choices
from flyball_operator.local.connections import Connection

MAX_HELD_BYTES = 1 << 20
"""A request body up to this size is read before a replica is chosen: a slow sender occupies no replica, and the request can be
sent again when the replica refuses it. A longer one is passed on as it comes. So is an answer, and a stream from its start."""


class BrokenBody(Exception):
    """The client's body is no HTTP."""


class Body:
    """A request body: held, or the beginning of it and the rest as it comes.

    Attributes:
        broken: what was wrong with the rest of it.
        num_choices: how many engine requests it is; 1 when it is too long to be held.
    """

    def __init__(self, held: bytes, rest: aiohttp.StreamReader | None) -> None:
        self.broken: BrokenBody | None = None
        self._held = held
        self.num_choices = num_choices(held) if rest is None else 1
        self._rest = rest
        self._spent = False

    @classmethod
    async def read(cls, content: aiohttp.StreamReader, connection: Connection) -> "Body":
        """Read a body as far as it is held. Raises BrokenBody, NoRoom."""
        held = bytearray()
        while len(held) <= MAX_HELD_BYTES:
            chunk = await _next(content)
            if not chunk:
                return cls(bytes(held), None)
            connection.hold(len(chunk))
            held += chunk
        return cls(bytes(held), content)

    @property
    def can_be_sent(self) -> bool:
        """False once a part that is not held has gone to a replica."""
        return not self._spent

    def data(self) -> io.BytesIO | AsyncIterator[bytes] | None:
        if self._rest is not None:
            return self._pass_on(self._rest)
        return io.BytesIO(self._held) if self._held else None

    async def _pass_on(self, rest: aiohttp.StreamReader) -> AsyncIterator[bytes]:
        self._spent = True
        yield self._held
        try:
            while chunk := await _next(rest):
                yield chunk
        except BrokenBody as error:
            self.broken = error
            raise


async def _next(content: aiohttp.StreamReader) -> bytes:
    try:
        return await content.readany()
    except (web.RequestPayloadError, aiohttp.ClientPayloadError, aiohttp.http_exceptions.HttpProcessingError) as error:
        raise BrokenBody(str(error)) from error

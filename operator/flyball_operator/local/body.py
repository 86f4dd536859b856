"""Request bodies on their way through the balancer, and how many choices they ask for."""

import io
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from flyball_operator.local.connections import ClientConnection

MAX_CHOICES = 256
"""What a runtime refuses beyond (its ``max_choices``)."""

MAX_LIST_BYTES = 64 * 1024
"""A longer list of prompts counts as one: taking apart a hostile one would hold up every other request."""

MAX_HELD_BYTES = 1 << 20
"""A request body up to this size is read before a replica is chosen: a slow sender occupies no replica, and the request can be
sent again when the replica refuses it. A longer one is passed on as it comes. So is an answer, and a stream from its start."""


class _Asked(msgspec.Struct):
    """The two fields that multiply a request; whether they are valid is the runtime's to say."""

    n: Any = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")


_asked = msgspec.json.Decoder(_Asked)
_prompts = msgspec.json.Decoder(list[msgspec.Raw])


def num_choices(body: bytes) -> int:
    """Return how many choices a request's body asks for: prompts times ``n``. 1 for whatever is no such request."""
    try:
        asked = _asked.decode(body)
        wanted = _num_prompts(bytes(asked.prompt)) * (asked.n if isinstance(asked.n, int) else 1)
    except (ValueError, RecursionError):  # no JSON, or not of this shape
        return 1
    return max(1, min(wanted, MAX_CHOICES))


def _num_prompts(prompt: bytes) -> int:
    """Return how many prompts there are: a list of texts or of lists has several, a text or a list of ids is one."""
    if len(prompt) > MAX_LIST_BYTES:
        return 1
    several = prompt[:1] == b"[" and prompt[1:].lstrip()[:1] in (b'"', b"[")
    return len(_prompts.decode(prompt)) if several else 1


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
    async def read(cls, content: aiohttp.StreamReader, connection: ClientConnection) -> "Body":
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

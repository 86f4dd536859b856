"""Requests to an endpoint, and its answers: the list of models, and streams of chunks.

aiohttp and not httpx: at 500 concurrent streams httpx took 300-450 us of CPU a chunk, and 5-25 ms a request, growing with
the number of open connections; aiohttp took 12-27 us and 0.1-0.2 ms, which one core can afford.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct, field

from flyball_clients.endpoint import Api, Endpoint
from flyball_clients.errors import BadAnswer, Disconnected, HttpError, RequestTimeout, ServerError, Unreachable

# uvicorn closes idle connections after 5 s. A request on a connection that is being closed would count as a failure.
KEEPALIVE_TIMEOUT_S = 2.0

# The end of a body follows [DONE], often in a packet of its own. A server that never ends it costs so long, and a connection.
END_TIMEOUT_S = 1.0


class ReportedUsage(Struct, frozen=True):
    """Token counts of one request, by the server's own tokenizer."""

    prompt_tokens: int
    completion_tokens: int = 0


class _Delta(Struct):
    """Answer text under ``content``; servers stream a reasoning model's thoughts under either of the other two names."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    role: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class Chunk(Struct):
    """A completions or chat chunk. Fields that are not listed are skipped while decoding."""

    choices: list[_Choice] = field(default_factory=list)
    usage: ReportedUsage | None = None
    error: Any = None

    @property
    def text(self) -> str:
        """Answer text of this chunk, possibly empty."""
        return "".join(choice.text or (choice.delta and choice.delta.content) or "" for choice in self.choices)

    @property
    def finished(self) -> bool:
        return any(choice.finish_reason for choice in self.choices)

    @property
    def carries_token(self) -> bool:
        """Whether this chunk contains a token.

        Empty text in the middle of a stream is a token whose bytes do not yet form a character. The first chunk of a chat,
        which has the role, and a last chunk with ``finish_reason`` and no text contain no token.
        """
        return any(_carries_token(choice) for choice in self.choices)


def _carries_token(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is None:
        return bool(choice.text) or choice.finish_reason is None
    if delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls:
        return True
    return delta.role is None and choice.finish_reason is None


_decoder = msgspec.json.Decoder(Chunk)


def decode_chunk(data: bytes) -> Chunk:
    """Return the chunk. Raises BadAnswer if the data is not a chunk, ServerError if it is an error object."""
    try:
        chunk = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadAnswer(f"the server sent {data[:80]!r} in the stream, which is not a completion chunk: {exc}") from exc
    if chunk.error is not None:
        raise ServerError(error_message(data))
    return chunk


def error_message(body: bytes) -> str:
    """Return the message of an OpenAI error object, or the start of any other body."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:200].decode(errors="replace").strip() or "no body"
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)[:500]


class SSEParser:
    """Turns packets into the data of whole events, in order.

    Works on bytes, so a packet may end inside an event, a line ending or a UTF-8 character. Lines end in LF or CRLF.
    Comments and the fields ``event``, ``id`` and ``retry`` are skipped. Follows the WHATWG HTML standard, section
    "Server-sent events", but for the lone CR line ending, which no such server sends.
    """

    __slots__ = ("_data", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, packet: bytes) -> list[bytes]:
        """Return the data of each event that this packet completes."""
        *lines, self._rest = (self._rest + packet).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events


def open_session(endpoint: Endpoint, timeout_s: float, *, keep_alive: bool = True) -> aiohttp.ClientSession:
    """Return a connection pool without a bound. ``timeout_s`` bounds each request, from connecting to the last byte.

    Proxies from the environment are not used, because they would be measured too.

    Args:
        keep_alive: whether a connection is used again.
    """
    kept = {"keepalive_timeout": KEEPALIVE_TIMEOUT_S} if keep_alive else {"force_close": True}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, **kept),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, 30.0)),
        headers=endpoint.headers,
    )


async def stream_chunks(
    session: aiohttp.ClientSession, endpoint: Endpoint, api: Api, body: bytes
) -> AsyncGenerator[Chunk, None]:
    """Post a request whose JSON has ``stream`` on, and yield its chunks as they come.

    Closing the iterator closes the connection, which aborts the request on the server.

    Raises:
        EndpointError: the server does not answer, refuses, disconnects, is too slow, or does not send a stream.
    """
    async with translated(session, endpoint), session.post(endpoint.url(api), data=body) as response:
        if response.status != 200:
            raise HttpError(response.status, error_message(await response.read()))
        parser = SSEParser()
        finished = False
        async for packet in response.content.iter_any():
            for data in parser.feed(packet):
                if data == b"[DONE]":
                    await _read_end(response)
                    return
                chunk = decode_chunk(data)
                finished = finished or chunk.finished
                yield chunk
        if not finished:
            raise Disconnected("the stream ended without a finish_reason or [DONE].")


async def _read_end(response: aiohttp.ClientResponse) -> None:
    """Read what follows a complete answer, because only a connection whose body was read to its end is used again.

    Whatever goes wrong here is no failure of the request. It only costs the connection.
    """
    with suppress(TimeoutError, aiohttp.ClientError, ConnectionError):
        async with asyncio.timeout(END_TIMEOUT_S):
            async for _ in response.content.iter_any():
                pass


@asynccontextmanager
async def translated(session: aiohttp.ClientSession, endpoint: Endpoint) -> AsyncIterator[None]:
    """Raise aiohttp's exceptions as exceptions of this package."""
    try:
        yield
    except aiohttp.ClientConnectorError as exc:
        raise Unreachable(endpoint.base_url, str(exc.os_error)) from exc
    except TimeoutError as exc:
        raise RequestTimeout(session.timeout.total or 0.0) from exc
    except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError) as exc:
        raise Disconnected(f"the connection broke: {exc or type(exc).__name__}") from exc


class ModelCard(Struct, frozen=True):
    """One entry of /v1/models. ``max_model_len`` is in tokens; not every server reports it."""

    id: str
    max_model_len: int | None = None


class _ModelList(Struct, frozen=True):
    data: list[ModelCard]


async def list_models(session: aiohttp.ClientSession, endpoint: Endpoint) -> list[ModelCard]:
    """Return the models of a server. Raises EndpointError if it does not answer or has no such list."""
    async with translated(session, endpoint), session.get(endpoint.models_url) as response:
        body = await response.read()
        if response.status != 200:
            raise HttpError(response.status, error_message(body))
    try:
        return msgspec.json.decode(body, type=_ModelList).data
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadAnswer(f"the answer of {endpoint.models_url} is not a list of models: {exc}") from exc


async def find_model(session: aiohttp.ClientSession, endpoint: Endpoint, name: str | None) -> ModelCard:
    """Return the model ``name``, or the first model in the server's list.

    A name that is not listed is used as it is, because servers may route names that they do not list.

    Raises:
        EndpointError: the server does not answer, or ``name`` is None and the list is empty.
    """
    try:
        cards = await list_models(session, endpoint)
    except (HttpError, BadAnswer):
        if name is None:
            raise
        cards = []  # not needed: the caller knows the name
    if name is not None:
        return next((card for card in cards if card.id == name), ModelCard(name))
    if not cards:
        raise BadAnswer(f"{endpoint.models_url} lists no models; give a name with --model.")
    return cards[0]

"""HTTP to an endpoint.

aiohttp and not httpx: at 500 concurrent streams httpx took 300-450 us of CPU a chunk, and 5-25 ms a request, growing with
the number of open connections; aiohttp took 12-27 us and 0.1-0.2 ms, which one core can pay.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from flyball_runtime.client.chunk import Chunk, decode_chunk, error_message
from flyball_runtime.client.endpoint import Api, Endpoint
from flyball_runtime.client.errors import Disconnected, HttpError, RequestTimeout, Unreachable
from flyball_runtime.client.sse import SSEParser

# uvicorn closes idle connections after 5 s; reusing one at that very moment would count as a server's failure.
KEEPALIVE_TIMEOUT_S = 2.0


def open_session(endpoint: Endpoint, timeout_s: float) -> aiohttp.ClientSession:
    """A connection pool without a cap; ``timeout_s`` bounds each request from connecting to the last byte.

    Proxies named by the environment are not used: a measurement through one would be a measurement of it.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_TIMEOUT_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, 30.0)),
        headers=endpoint.headers,
    )


async def stream_chunks(
    session: aiohttp.ClientSession, endpoint: Endpoint, api: Api, body: bytes
) -> AsyncGenerator[Chunk, None]:
    """Post a request whose JSON has ``stream`` on, and yield its chunks as they come.

    Closing the iterator closes the connection, which aborts the request on the server.

    Raises:
        EndpointError: the server is not there, refuses, breaks off, is late, or sends what is not a stream.
    """
    async with translated(session, endpoint), session.post(endpoint.url(api), data=body) as response:
        if response.status != 200:
            raise HttpError(response.status, error_message(await response.read()))
        parser = SSEParser()
        finished = False
        async for packet in response.content.iter_any():
            for data in parser.feed(packet):
                if data == b"[DONE]":
                    return
                chunk = decode_chunk(data)
                finished = finished or chunk.finished
                yield chunk
        if not finished:
            raise Disconnected("the stream ended without a finish_reason or [DONE].")


@asynccontextmanager
async def translated(session: aiohttp.ClientSession, endpoint: Endpoint) -> AsyncIterator[None]:
    """Turn aiohttp's exceptions into this package's."""
    try:
        yield
    except aiohttp.ClientConnectorError as exc:
        raise Unreachable(endpoint.base_url, str(exc.os_error)) from exc
    except TimeoutError as exc:
        raise RequestTimeout(session.timeout.total or 0.0) from exc
    except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError) as exc:
        raise Disconnected(f"the connection broke: {exc or type(exc).__name__}") from exc
